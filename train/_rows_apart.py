"""Whether a loss of one example stays one of one example when JAX computes many of them together.

`jax.vmap` keeps rows apart, but for what follows: keys other than threefry's draw the bits of a whole batch
from its first row's, and callbacks and `custom_vmap` rules are handed the batch. One example could then
change what others contribute, and clipping would not bound it.
"""

import jax
import jax.numpy as jnp

_TOGETHER = frozenset(
    "pure_callback io_callback custom_vmap_call rng_bit_generator rng_uniform ffi_call".split()
)


def why_not(jaxpr) -> str | None:
    """What in a traced program may mix rows, a clause; None where nothing does."""
    threefry = jax.random.key(0, impl="threefry2x32").dtype
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _TOGETHER:
            return f"{eqn.primitive.name} is handed a whole batch"
        for var in (*eqn.invars, *eqn.outvars):
            kind = getattr(var.aval, "dtype", None)
            if kind is not None and jnp.issubdtype(kind, jax.dtypes.prng_key) and kind != threefry:
                return f"keys of {kind} draw for a whole batch at once; use those of threefry2x32"
        for part in jax.tree.leaves(eqn.params, is_leaf=lambda part: _program(part) is not None):
            inner = _program(part)
            found = None if inner is None else why_not(inner)
            if found is not None:
                return found
    return None


def _program(part):
    """The program that a parameter of an equation is, or None."""
    inner = getattr(part, "jaxpr", part)
    return inner if hasattr(inner, "eqns") else None
