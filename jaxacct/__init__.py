"""jaxacct: certified noise for differentially private training, on accelerators.

`calibrate` returns a `Plan`: a noise multiplier for DP-SGD or BandMF under a sampling scheme, certified by
Monte Carlo with the failure probability included in delta. Estimates (`estimate_delta`, `estimate_epsilon`,
and `recommend`, which ranks candidates for certification) have other functions and types.
"""

import importlib
from typing import TYPE_CHECKING

from jaxacct.common.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from jaxacct import (  # noqa: F401
        accountants,
        checker,
        individual,
        interoperation,
        schemes,
        strategies,
    )
    from jaxacct.accountants.history import delta, epsilon
    from jaxacct.calibration.calibrate import NotCertifiedError, calibrate
    from jaxacct.calibration.options import CalibrationOptions
    from jaxacct.calibration.targets import Target
    from jaxacct.core.check import Verdict
    from jaxacct.core.claim import Claim, ClaimedTarget
    from jaxacct.core.evidence import Evidence
    from jaxacct.core.plan import Plan
    from jaxacct.core.verify import verify
    from jaxacct.estimates.estimate import Estimate, estimate_delta, estimate_epsilon
    from jaxacct.estimates.profile import Profile, privacy_profile
    from jaxacct.likelihood.loss import privacy_loss
    from jaxacct.mechanisms.mechanism import Mechanism
    from jaxacct.proposals.sampling import sample_privacy_loss
    from jaxacct.recommendation.result import Recommendation, Recommended
    from jaxacct.recommendation.search import recommend
    from jaxacct.report import plots as plot  # noqa: F401
    from jaxacct.report import risk  # noqa: F401
    from jaxacct.schemes import (
        SCHEMES,
        BalancedMinSep,
        BallsInBins,
        BMinSep,
        CustomScheme,
        CyclicPoisson,
        EpochwiseAllocation,
        FixedOrder,
        IndependentAttribution,
        MultiAttribution,
        Poisson,
        TruncatedBMinSep,
    )
    from jaxacct.statistics.bounds import Budget
    from jaxacct.statistics.hockey_stick import NonFiniteLossError
    from jaxacct.strategies import (
        BandedInverse,
        BandedToeplitz,
        BufferedToeplitz,
        Dense,
        FiniteToeplitz,
        Toeplitz,
        prefix_sum_error,
    )

# Stability: names in `__all__` here and in public modules keep their meaning within a minor version, and a
# removal is announced in the changelog one minor version ahead; all other names may change. The name of a
# scheme, strategy or accountant never gets another meaning: a change of the mathematics is a new name. A plan
# loads in every version with its schema version, which recomputes its guarantee, and is refused by all
# others.
__all__ = [
    "SCHEMES",
    "BMinSep",
    "BalancedMinSep",
    "BallsInBins",
    "BandedInverse",
    "BandedToeplitz",
    "Budget",
    "BufferedToeplitz",
    "CalibrationOptions",
    "Claim",
    "ClaimedTarget",
    "CustomScheme",
    "CyclicPoisson",
    "Dense",
    "EpochwiseAllocation",
    "Estimate",
    "Evidence",
    "FiniteToeplitz",
    "FixedOrder",
    "IndependentAttribution",
    "Mechanism",
    "MultiAttribution",
    "NonFiniteLossError",
    "NotCertifiedError",
    "Plan",
    "Poisson",
    "Profile",
    "Recommendation",
    "Recommended",
    "Target",
    "Toeplitz",
    "TruncatedBMinSep",
    "Verdict",
    "calibrate",
    "delta",
    "epsilon",
    "estimate_delta",
    "estimate_epsilon",
    "prefix_sum_error",
    "privacy_loss",
    "privacy_profile",
    "recommend",
    "sample_privacy_loss",
    "verify",
]

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
# Modules as attributes, loaded as late; training is there where it is installed with the package.
_MODULES = {
    "accountants": "jaxacct.accountants",
    "checker": "jaxacct.checker",
    "individual": "jaxacct.individual",
    "interoperation": "jaxacct.interoperation",
    "plot": "jaxacct.report.plots",
    "risk": "jaxacct.report.risk",
    "schemes": "jaxacct.schemes",
    "strategies": "jaxacct.strategies",
    "train": "jaxacct.train",
}


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
