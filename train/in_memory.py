"""Numbers that two readers read from memory, instead of each computing them for itself."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def in_memory(function: Callable[[], Any], true: jax.Array):
    """Return `function()`, a pytree of arrays, stored before anything reads it.

    Compilers compute again what two readers need, and may round it otherwise; where one of them writes to
    what was read, they copy that first or give up vector instructions. What a branch returns is in memory.
    XLA on GPUs turns a branch of elementwise operations and sums into a `select`, and may then compute its
    numbers again; it does not where the branch holds a barrier. On CPUs a barrier alone is ignored.

    Args:
      function: without arguments.
      true: () bool that is True, not a constant of the program.
    """
    shapes = jax.eval_shape(function)

    def otherwise():
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return lax.cond(true, lambda: lax.optimization_barrier(function()), otherwise)


def true_of(tree) -> jax.Array:
    """Return () bool that is True for any arrays, and that no compiler takes for a constant.

    Args:
      tree: pytree of arrays, rows along the first axis; the program's arguments, or computed from them.
    """
    found = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
    if not found:
        return jnp.ones((), bool)  # no number to read twice
    # Of an empty array the sum would be a constant.
    first = found[0]
    column = jnp.real(first.reshape(len(first), -1)[:, :1]).astype(jnp.float32)
    return jnp.sum(column == 3) <= len(first)
