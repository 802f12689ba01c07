"""Flax modules for tests without a program for each of their parameters."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def squared(model, example):
    """The squared error of a module that returns one number."""
    return (model(example["x"]) - example["y"]) ** 2


def made(make):
    """The module that `make()` makes, with parameters drawn by NumPy: initializers compile every shape anew.

    Normal numbers over the root of the inputs that are added up; keys and counts of generators are 0.
    """
    generator = np.random.default_rng(0)

    def drawn(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.device_put(np.zeros(leaf.shape, leaf.dtype))
        scale = np.sqrt(max(1, np.prod(leaf.shape[:-1])))
        # Of an array of NumPy `jnp.asarray` makes a program for every shape, and this none.
        return jax.device_put(np.asarray(generator.normal(size=leaf.shape) / scale, leaf.dtype))

    definition, state = nnx.split(nnx.eval_shape(make))
    return nnx.merge(definition, jax.tree.map(drawn, state))
