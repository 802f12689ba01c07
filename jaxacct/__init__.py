"""jaxacct: certified noise for differentially private training, on accelerators.

`calibrate` returns a `Plan`: a noise multiplier for DP-SGD or BandMF under a sampling scheme, certified by
Monte Carlo with the failure probability included in delta. Estimates (`estimate_delta`, `estimate_epsilon`,
and `recommend`, which ranks candidates for certification) have other functions and types.
"""

import importlib
from typing import TYPE_CHECKING

from jaxacct.common.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:  # the same names, for type checkers and editors; `as` exports them
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
    from jaxacct.report import plots as plot  # noqa: F401
    from jaxacct.report import risk as risk
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

# Stability: names in `__all__` here and in public modules keep their meaning within a minor version, and a
# removal is announced in the changelog one minor version ahead; all other names may change. The name of a
# scheme, strategy or accountant never gets another meaning: a change of the mathematics is a new name. A plan
# loads in every version with its schema version, which recomputes its guarantee, and is refused by all
# others.

# Where public names live. `import jaxacct` loads none of it: the first use of a name loads its module.
_HOMES = {
    "jaxacct.accountants.history": "delta epsilon",
    "jaxacct.calibration.calibrate": "NotCertifiedError calibrate",
    "jaxacct.calibration.options": "CalibrationOptions",
    "jaxacct.calibration.targets": "Target",
    "jaxacct.recommendation.result": "Recommendation Recommended",
    "jaxacct.recommendation.search": "recommend",
    "jaxacct.estimates.estimate": "Estimate estimate_delta estimate_epsilon",
    "jaxacct.estimates.profile": "Profile privacy_profile",
    "jaxacct.likelihood.loss": "privacy_loss",
    "jaxacct.mechanisms.mechanism": "Mechanism",
    "jaxacct.core.check": "Verdict",
    "jaxacct.core.claim": "Claim ClaimedTarget",
    "jaxacct.core.evidence": "Evidence",
    "jaxacct.core.plan": "Plan",
    "jaxacct.core.verify": "verify",
    "jaxacct.proposals.sampling": "sample_privacy_loss",
    "jaxacct.schemes": "SCHEMES BalancedMinSep BallsInBins BMinSep CustomScheme CyclicPoisson "
    "EpochwiseAllocation FixedOrder IndependentAttribution MultiAttribution Poisson "
    "TruncatedBMinSep",
    "jaxacct.statistics.bounds": "Budget",
    "jaxacct.statistics.hockey_stick": "NonFiniteLossError",
    "jaxacct.strategies": "BandedInverse BandedToeplitz BufferedToeplitz Dense FiniteToeplitz Toeplitz "
    "prefix_sum_error",
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)
# Modules as attributes, loaded as late; training is there where it is installed with the package.
_PARTS = "accountants checker individual interoperation schemes strategies train"
_MODULES = {name: f"jaxacct.{name}" for name in _PARTS.split()}
_MODULES |= {"plot": "jaxacct.report.plots", "risk": "jaxacct.report.risk"}


def __getattr__(name: str):
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'jaxacct' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})
