"""A run goes on with the constants that its loss began with, however JAX keeps them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.batches import fingerprints

# In JAX 0.8 nothing can be lowered in this way.
needs_apart = pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="JAX lowers no constants apart")


def programs(by):
    constant = by + jnp.arange(300.0)

    def of_loop(x):
        return jax.lax.scan(lambda y, _: (y + (constant * x).sum(), None), 0.0, None, length=2)[0]

    def of_branch(x):
        return jax.lax.cond(x > 0, lambda: constant.sum(), lambda: 0.0)

    plain, inner = (lambda x: constant * x), jax.jit(lambda x: constant * x)
    kept = (lambda x: constant), (lambda x: jax.random.bits(jax.random.key(0)).astype(jnp.float32) * by * x)
    return [plain, of_loop, of_branch, lambda x: inner(x).sum(), *kept]


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=needs_apart)])
def test_every_constant_is_in_the_digest(apart):
    before = jax.config.values.get("jax_use_simplified_jaxpr_constants", False)
    try:
        if apart:
            jax.config.update("jax_use_simplified_jaxpr_constants", True)
        digests = [
            [fingerprints.of_trace(jax.jit(function).trace(2.0).jaxpr) for function in programs(by)]
            for by in (1, 1, 2)
        ]
    finally:
        if apart:
            jax.config.update("jax_use_simplified_jaxpr_constants", before)
    assert digests[0] == digests[1]
    assert not set(digests[0]) & set(digests[2])


def test_a_constant_key_is_in_the_digest():
    keys = [jax.random.key(seed) for seed in (0, 0, 1)]
    digests = [
        fingerprints.of_trace(jax.make_jaxpr(lambda x, key=key: jax.random.normal(key) + x)(np.float32(1)))
        for key in keys
    ]
    assert digests[0] == digests[1] != digests[2]


def test_sets_are_in_the_digest_in_one_order():
    """Not in that of the set, which is another for texts in another process, and for these by insertion."""
    sets = frozenset((0, 8)), frozenset((8, 0))
    assert sets[0] == sets[1] and list(sets[0]) != list(sets[1])
    assert len({tuple(fingerprints._parameter(each)) for each in sets}) == 1
    assert tuple(fingerprints._parameter(sets[0])) != tuple(fingerprints._parameter(frozenset()))
