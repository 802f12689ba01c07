"""Differentially private training in Flax under a plan: it runs the certified mechanism.

Installed as `jaxacct.train` (the extra `jaxacct[train]`); in a checkout the folder is the package `train`. It
imports `jaxacct` and never the other way round.
"""

from jaxacct.common.lazy_names import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
