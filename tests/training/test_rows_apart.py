"""What of a traced program is taken to mix rows: all of it looked through, nothing compiled or run."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

from train._rows_apart import why_not

ONE = jax.ShapeDtypeStruct((), jnp.float32)
OTHER = jax.random.key(0, impl="rbg")


def doubled(x):
    return jax.pure_callback(lambda x: 2 * x, ONE, x)


def of_words(x):
    return x + jax.lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (3,))[1].sum()


@jax.custom_batching.custom_vmap
def by_rule(x):
    return 2 * x


by_rule.def_vmap(lambda size, batched, x: (x + x.mean(), True))


@pytest.mark.parametrize(
    ("mixes", "message"),
    [
        (doubled, "pure_callback"),
        (lambda x: io_callback(lambda x: 2 * x, ONE, x), "io_callback"),
        (of_words, "rng_bit_generator"),
        (lambda x: jax.lax.rng_uniform(x, 1.0, (3,)), "rng_uniform"),
        (lambda x: jax.ffi.ffi_call("of_somebody", ONE)(x), "ffi_call"),
        (by_rule, "custom_vmap_call"),
        # Not the first part of a program alone, and parts of parts.
        (lambda x: jax.lax.cond(x > 0, lambda: x, lambda: doubled(x)), "pure_callback"),
        (lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jax.jit(doubled)(y), x), "pure_callback"),
    ],
)
def test_what_is_handed_a_whole_batch_is_named(mixes, message):
    assert message in why_not(jax.make_jaxpr(mixes)(jnp.float32(1)).jaxpr)


def test_keys_that_come_from_outside_are_seen():
    """Nothing in the program makes the key; it only draws with it."""
    with_key = jax.make_jaxpr(lambda key: jax.random.bits(key))
    assert "key<rbg>" in why_not(with_key(OTHER).jaxpr)
    assert why_not(with_key(jax.random.key(0, impl="threefry2x32")).jaxpr) is None


def test_what_keeps_rows_apart_passes():
    def noisy(x):
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), 3)
        many = jax.lax.scan(lambda y, k: (y + jax.random.normal(k), None), x, jax.random.split(key, 3))[0]
        return jax.lax.cond(many > 0, jnp.sin, jnp.cos, many)

    assert why_not(jax.make_jaxpr(noisy)(jnp.float32(1)).jaxpr) is None
