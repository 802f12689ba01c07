"""jaxacct: certified noise for differentially private training, on accelerators.

How much noise is enough, and can you prove it? `calibrate` answers with a `Plan`: a noise multiplier for
DP-SGD or BandMF under a sampling scheme, certified by Monte Carlo with its failure probability spent in
delta. Estimates (`estimate_delta`, `estimate_epsilon`) are other functions with another type.
"""

__version__ = "0.1.0"

from jaxacct.calibration import NotCertifiedError, calibrate
from jaxacct.estimates.estimate import Estimate, estimate_delta, estimate_epsilon
from jaxacct.estimates.profile import Profile, privacy_profile
from jaxacct.estimates.shared_draws import delta_curve, sample_privacy_losses
from jaxacct.likelihood.loss import privacy_loss
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.plan import Plan
from jaxacct.proposals.sampling import sample_privacy_loss
from jaxacct.schemes import (
    SCHEMES,
    BallsInBins,
    BMinSep,
    CyclicPoisson,
    MultiAttribution,
    Poisson,
    TruncatedBMinSep,
)
from jaxacct.statistics.bounds import Budget
from jaxacct.statistics.hockey_stick import NonFiniteLossError
from jaxacct.strategies import BandedInverse, BandedToeplitz, Dense, Toeplitz, prefix_sum_error
from jaxacct.verification.run import Evidence, verify

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
