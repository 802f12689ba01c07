"""jaxacct: certified noise for differentially private training, on accelerators.

`calibrate` returns a `Plan`: a noise multiplier for DP-SGD or BandMF under a sampling scheme, certified by
Monte Carlo with the failure probability included in delta. Estimates (`estimate_delta`, `estimate_epsilon`,
and `recommend`, which ranks candidates for certification) have other functions and types.
"""

import importlib

from jaxacct.common.lazy_names import homes_of
from jaxacct.common.version import VERSION

__version__ = VERSION

# Stability: names in `__all__` here and in public modules keep their meaning within a minor version, and a
# removal is announced in the changelog one minor version ahead; all other names may change. The name of a
# scheme, strategy or accountant never gets another meaning: a change of the mathematics is a new name. A plan
# loads in every version with its schema version, which recomputes its guarantee, and is refused by all
# others.

# Where public names live. `import jaxacct` loads none of it: the first use of a name loads its module.
_MODULE_OF = homes_of(__file__)
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
