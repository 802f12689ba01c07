"""Public names of `jaxacct`, as type checkers and the package itself read them."""

from jaxacct import accountants as accountants
from jaxacct import checker as checker
from jaxacct import individual as individual
from jaxacct import interoperation as interoperation
from jaxacct import schemes as schemes
from jaxacct import strategies as strategies
from jaxacct.accountants.history import delta as delta
from jaxacct.accountants.history import epsilon as epsilon
from jaxacct.calibration.calibrate import NotCertifiedError as NotCertifiedError
from jaxacct.calibration.calibrate import calibrate as calibrate
from jaxacct.calibration.options import CalibrationOptions as CalibrationOptions
from jaxacct.calibration.targets import Target as Target
from jaxacct.core.check import Verdict as Verdict
from jaxacct.core.claim import Claim as Claim
from jaxacct.core.claim import ClaimedTarget as ClaimedTarget
from jaxacct.core.evidence import Evidence as Evidence
from jaxacct.core.plan import Plan as Plan
from jaxacct.core.verify import verify as verify
from jaxacct.estimates.estimate import Estimate as Estimate
from jaxacct.estimates.estimate import estimate_delta as estimate_delta
from jaxacct.estimates.estimate import estimate_epsilon as estimate_epsilon
from jaxacct.estimates.profile import Profile as Profile
from jaxacct.estimates.profile import privacy_profile as privacy_profile
from jaxacct.likelihood.loss import privacy_loss as privacy_loss
from jaxacct.mechanisms.mechanism import Mechanism as Mechanism
from jaxacct.proposals.sampling import sample_privacy_loss as sample_privacy_loss
from jaxacct.recommendation.result import Recommendation as Recommendation
from jaxacct.recommendation.result import Recommended as Recommended
from jaxacct.recommendation.search import recommend as recommend
from jaxacct.report import plots as _plots
from jaxacct.report import risk as _risk
from jaxacct.schemes import SCHEMES as SCHEMES
from jaxacct.schemes import BalancedMinSep as BalancedMinSep
from jaxacct.schemes import BallsInBins as BallsInBins
from jaxacct.schemes import BMinSep as BMinSep
from jaxacct.schemes import CustomScheme as CustomScheme
from jaxacct.schemes import CyclicPoisson as CyclicPoisson
from jaxacct.schemes import EpochwiseAllocation as EpochwiseAllocation
from jaxacct.schemes import FixedOrder as FixedOrder
from jaxacct.schemes import IndependentAttribution as IndependentAttribution
from jaxacct.schemes import MultiAttribution as MultiAttribution
from jaxacct.schemes import Poisson as Poisson
from jaxacct.schemes import TruncatedBMinSep as TruncatedBMinSep
from jaxacct.statistics.bounds import Budget as Budget
from jaxacct.statistics.hockey_stick import NonFiniteLossError as NonFiniteLossError
from jaxacct.strategies import BandedInverse as BandedInverse
from jaxacct.strategies import BandedToeplitz as BandedToeplitz
from jaxacct.strategies import BufferedToeplitz as BufferedToeplitz
from jaxacct.strategies import Dense as Dense
from jaxacct.strategies import FiniteToeplitz as FiniteToeplitz
from jaxacct.strategies import Toeplitz as Toeplitz
from jaxacct.strategies import prefix_sum_error as prefix_sum_error

plot = _plots
risk = _risk
__all__: list[str]
__version__: str
