"""jaxacct: certified noise for differentially private training, on accelerators.

`calibrate` returns a `Plan`: a noise multiplier for DP-SGD or BandMF under a sampling scheme, certified by
Monte Carlo with the failure probability included in delta. Estimates (`estimate_delta`, `estimate_epsilon`,
and `recommend`, which ranks candidates for certification) have other functions and types.
"""

from jaxacct.common.lazy_names import lazy
from jaxacct.common.version import VERSION

__version__ = VERSION

# Stability: names in `__all__` here and in public modules keep their meaning within a minor version, and a
# removal is announced in the changelog one minor version ahead; all other names may change. The name of a
# scheme, strategy or accountant never gets another meaning: a change of the mathematics is a new name. A plan
# loads in every version with its schema version, which recomputes its guarantee, and is refused by all
# others.

# `import jaxacct` loads no public name: the first use of one loads its module. Modules are attributes, loaded
# as late; training is there where it is installed with the package.
_PARTS = "accountants checker individual interoperation schemes strategies train"
_MODULES = {name: f"jaxacct.{name}" for name in _PARTS.split()}
_MODULES |= {"plot": "jaxacct.report.plots", "risk": "jaxacct.report.risk"}
__getattr__, __dir__, __all__ = lazy(__name__, __file__, _MODULES)
