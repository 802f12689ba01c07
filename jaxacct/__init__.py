"""jaxacct: certified noise for differentially private training, on accelerators.

How much noise is enough, and can you prove it? `calibrate` answers with a `Plan`: a noise multiplier for
DP-SGD or BandMF under a sampling scheme, certified by Monte Carlo with its failure probability spent in
delta. Estimates (`estimate_delta`, `estimate_epsilon`) are other functions with another type.
"""

__version__ = "0.1.0"

from jaxacct.bounds import Budget
from jaxacct.calibrate import NotCertifiedError, calibrate
from jaxacct.estimate import Estimate, estimate_delta, estimate_epsilon
from jaxacct.hockey_stick import NonFiniteLossError
from jaxacct.mechanism import Mechanism
from jaxacct.non_banded import BandedInverse, Dense, Toeplitz
from jaxacct.plan import Plan
from jaxacct.privacy_loss import privacy_loss
from jaxacct.profile import Profile, privacy_profile
from jaxacct.sampling import sample_privacy_loss
from jaxacct.schemes import (
    SCHEMES,
    BallsInBins,
    BMinSep,
    CyclicPoisson,
    MultiAttribution,
    Poisson,
    TruncatedBMinSep,
)
from jaxacct.shared_draws import delta_curve, sample_privacy_losses
from jaxacct.toeplitz import BandedToeplitz, prefix_sum_error
from jaxacct.verify import Evidence, verify

__all__ = [
    "SCHEMES",
    "BMinSep",
    "BallsInBins",
    "BandedInverse",
    "BandedToeplitz",
    "Budget",
    "CyclicPoisson",
    "Dense",
    "Estimate",
    "Evidence",
    "Mechanism",
    "MultiAttribution",
    "NonFiniteLossError",
    "NotCertifiedError",
    "Plan",
    "Poisson",
    "Profile",
    "Toeplitz",
    "TruncatedBMinSep",
    "calibrate",
    "delta_curve",
    "estimate_delta",
    "estimate_epsilon",
    "prefix_sum_error",
    "privacy_loss",
    "privacy_profile",
    "sample_privacy_loss",
    "sample_privacy_losses",
    "verify",
]
