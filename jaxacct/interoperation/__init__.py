"""Interoperation with other libraries: privacy loss distributions, events, samplers of jax-privacy."""

from jaxacct.common.lazy_names import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
