"""Statistics of a batch of one: found in programs, without false alarms.

The programs are those that batch norm of Haiku (variance as the mean of squares), Keras (of deviations) and
Equinox (sums over a named axis of `jax.vmap`) trace to.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

from train.clipping.per_example import check_loss

pytestmark = pytest.mark.usefixtures("default_promotion")

VECTOR, IMAGE = np.ones(5, np.float32), np.ones((6, 6, 3), np.float32)
KERNEL = jnp.ones((5, 4))


def of_deviations(x, axes=0):
    return (x - x.mean(axes)) * lax.rsqrt(x.var(axes) + 1e-5)


def of_squares(x):
    mean = x.mean(0)
    return (x - mean) / jnp.sqrt(jnp.square(x).mean(0) - mean**2 + 1e-5)


def by_name(x):
    def one(x):
        mean = lax.pmean(x, "batch")
        return (x - mean) / jnp.sqrt(lax.pmean((x - mean) ** 2, "batch") + 1e-5)

    return jax.vmap(one, axis_name="batch")(x)


class Merged(nnx.Module):
    """Its parameters are given as a state: no module is there to be asked for its batch norm."""

    def __init__(self):
        self.norm = nnx.BatchNorm(5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x).sum()


GRAPH, SCALES, STATISTICS = nnx.split(Merged(), nnx.Param, ...)


def in_scan(params, x):
    return lax.scan(lambda y, _: (of_deviations(y @ params @ params.T), None), x[None], None, length=2)[
        0
    ].sum()


def carried(params, x):
    """The example is in the carry from the second pass on."""

    def one(carry, row):
        return carry + row, of_deviations(carry @ params)

    return lax.scan(one, jnp.zeros((1, 5)), jnp.stack([x, x])[:, None])[1].sum()


TAKING = {
    "deviations": lambda params, x: of_deviations(x[None] @ params).sum(),
    "squares": lambda params, x: of_squares(x[None] @ params).sum(),
    "a named axis": lambda params, x: by_name(x[None] @ params).sum(),
    "scan": in_scan,
    "a carry": carried,
    "cond": lambda params, x: lax.cond(x[0] > 0, of_deviations, jnp.cos, x[None] @ params).sum(),
    "while": lambda params, x: lax.while_loop(
        lambda y: y[0, 0] < 0, lambda y: of_deviations(y), x[None] @ params
    ).sum(),
    "remat": jax.checkpoint(lambda params, x: of_deviations(x[None] @ params).sum()),
    "relu": lambda params, x: jax.nn.relu(of_deviations(jax.jit(jax.nn.silu)(x[None] @ params))).sum(),
}


def test_statistics_of_a_batch_of_one_are_refused():
    for name in TAKING:
        with pytest.raises(
            ValueError, match=r"^loss must not divide by .*first axis of \(1, \d\): batch norm; use"
        ):
            check_loss(TAKING[name], KERNEL, VECTOR[None], 1)


def test_of_images_and_of_a_merged_module_they_are_refused():
    with pytest.raises(ValueError, match=r"first axis of \(1, 6, 6, 3\)"):
        check_loss(lambda p, x: p * of_deviations(x[None], (0, 1, 2)).sum(), 1.0, IMAGE[None], 1)
    with pytest.raises(ValueError, match=r"first axis of \(1, 5\)"):
        check_loss(lambda p, x: nnx.merge(GRAPH, p, STATISTICS, copy=True)(x[None]), SCALES, VECTOR[None], 1)


def module(made, x):
    params = jax.eval_shape(made.init, jax.random.key(0), x)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
    return (lambda params, x: made.apply(params, x).sum()), params, x


def number(function, x=VECTOR[None]):
    return (lambda params, x: params * function(x).sum()), jnp.ones(()), x


ALLOWED = {
    "group norm": lambda: module(linen.GroupNorm(num_groups=3), IMAGE[None]),
    "layer norm": lambda: module(linen.LayerNorm(), VECTOR[None]),
    "layer norm of one feature": lambda: module(linen.LayerNorm(), VECTOR[:, None]),
    "instance norm": lambda: module(linen.InstanceNorm(), IMAGE[None]),
    "attention": lambda: module(linen.MultiHeadDotProductAttention(1), VECTOR[None, None]),
    "a kernel of one pixel, standardized": lambda: (
        lambda params, x: (x @ of_deviations(params)).sum(),
        jnp.ones((1, 4)),
        np.ones(1, np.float32),
    ),
    "an image, standardized": lambda: number(lambda x: (x - x.mean()) / x.std(), IMAGE[None]),
    "softmax": lambda: number(lambda x: jax.nn.softmax(x, axis=0)),
    "root mean square": lambda: number(lambda x: jnp.sqrt(jnp.mean(x**2, axis=0))),
    "a norm": lambda: number(lambda x: x / jnp.linalg.norm(x, axis=0)),
    "two means": lambda: number(lambda x: (x - x.mean(0)) / (1 + jnp.square(x).mean(0))),
    "stored statistics": lambda: number(lambda x: (x - 1) * lax.rsqrt(jnp.ones(5) + 1e-5)),
}


def test_other_norms_are_trained():
    for name in ALLOWED:
        loss, params, x = ALLOWED[name]()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_loss(loss, params, jnp.asarray(x)[None], 1)
