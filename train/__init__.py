"""Differentially private training in Flax under a plan: it runs the certified mechanism.

Installed as `jaxacct.train` (the extra `jaxacct[train]`); in a checkout the folder is the package `train`. It
imports `jaxacct` and never the other way round.
"""

import importlib

from jaxacct.common.lazy_names import homes_of

# Public name -> its module; the first use of a name loads it.
_MODULE_OF = homes_of(__file__)
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
