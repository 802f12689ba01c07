"""Gradients of grouped convolutions: those of JAX, and no row in another, whatever it holds.

`jax.vmap` alone mixes rows here: what is not finite in one of them is NaN in all.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxacct import BandedToeplitz, Mechanism, Poisson
from tests.refusals import refused
from train.clipping.ghost import ghost_gradient_sum
from train.clipping.grid import Grid
from train.clipping.per_example import clipped_gradient_sum
from train.clipping.programs import without_batch_groups
from train.clipping.rows_apart import programs_in

GRID = Grid.of(Mechanism(Poisson(12, 0.5), BandedToeplitz.identity(), 1.0), 1.0)
ROWS, LAYOUTS = 4, {"NHWC": ("NHWC", "HWIO", "NHWC"), "NCHW": ("NCHW", "OIHW", "NCHW")}
generator = np.random.default_rng(0)
IMAGES = generator.normal(size=(ROWS, 5, 5, 4)).astype(np.float32)


def convolved(kernel, image, groups=2, layout="NHWC", **options):
    options = {"window_strides": (1, 1), "padding": "SAME"} | options
    kernel = kernel if layout == "NHWC" else kernel.transpose(3, 2, 0, 1)
    image = image[None] if layout == "NHWC" else image.transpose(2, 0, 1)[None]
    options |= dict(dimension_numbers=LAYOUTS[layout], feature_group_count=groups)
    out = lax.conv_general_dilated(image, kernel, **options)
    return jnp.sum(jnp.sin(out))


def kernel(groups=2, times=1):
    return generator.normal(size=(2, 3, 4 // groups, 4 * times)).astype(np.float32)


LOSSES = {
    "two groups": (convolved, kernel()),
    "channels first": (functools.partial(convolved, layout="NCHW"), kernel()),
    "more outputs": (convolved, kernel(times=3)),
    "depthwise, multiplied": (functools.partial(convolved, groups=4), kernel(4, 2)),
    "strided": (functools.partial(convolved, window_strides=(2, 2), padding=((1, 1), (2, 1))), kernel()),
    "dilated": (functools.partial(convolved, rhs_dilation=(2, 1)), kernel()),
    "rematerialised": (jax.checkpoint(lambda w, x: jax.jit(convolved)(jnp.sin(w), x)), kernel()),
}


def others(rows, at):
    return np.delete(np.asarray(rows), at, 0)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_jax_and_rows_stay_apart(name):
    loss, weights = LOSSES[name]
    gradient = jax.grad(loss)
    together = jax.jit(jax.vmap(without_batch_groups(gradient), (None, 0)))
    found = together(weights, IMAGES)
    expected = jax.jit(jax.vmap(gradient, (None, 0)))(weights, IMAGES)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)
    for bad, at in ((np.nan, 0), (np.inf, 2), (3e38, 1)):
        images = IMAGES.copy()
        images[at] = bad
        np.testing.assert_array_equal(others(together(weights, images), at), others(found, at))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA mixes them on CPUs; a GPU keeps them apart")
def test_plain_vmap_mixes_rows():
    """What the others are here for; once XLA no longer does it, they may go."""
    loss, weights = LOSSES["two groups"]
    images = IMAGES.copy()
    images[1] = np.nan
    found = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(weights, images)
    assert not np.isfinite(others(found, 1)).all()


@pytest.mark.parametrize("sum_of", [clipped_gradient_sum, ghost_gradient_sum])
@pytest.mark.parametrize("micro", [2, 4])
def test_one_example_moves_no_other_in_a_clipped_sum(sum_of, micro):
    loss, weights = LOSSES["rematerialised"]  # which ghost clipping has no fast way for
    given, options = (loss, jnp.asarray(weights)), dict(grid=GRID, microbatch_size=micro)
    summed = jax.jit(lambda images: sum_of(*given, images, np.ones(ROWS, bool), **options).norms)
    # On CPUs XLA leaves convolutions within loops as they are, so its input is tested, too.
    assert set(re.findall(r"batch_group_count = (\d+)", summed.lower(IMAGES).as_text())) == {"1"}
    honest = summed(IMAGES)
    for bad, at in ((np.nan, 0), (3e38, 1)):
        images = IMAGES.copy()
        images[at] = bad
        np.testing.assert_array_equal(others(summed(images), at), others(honest, at))


def test_in_a_loop_it_is_refused():
    def loss(w, x):
        return lax.scan(lambda y, _: (y + convolved(w * y, x), None), jnp.float32(1), None, length=2)[0]

    given = without_batch_groups(jax.grad(loss)), kernel(), IMAGES[0]
    refused("must not have a grouped convolution within scan", jax.eval_shape, *given)


def layouts(program):
    """Dimension numbers of all convolutions of a program."""
    for eqn in getattr(program, "jaxpr", program).eqns:
        if eqn.primitive.name == "conv_general_dilated":
            yield eqn.params["dimension_numbers"]
        for inner in programs_in(eqn.params):
            yield from layouts(inner)


@pytest.mark.parametrize("sum_of", [clipped_gradient_sum, ghost_gradient_sum])
def test_convolutions_are_in_the_fast_layout(sum_of):
    """All of them, in the loop over microbatches, where XLA takes ten times as long with others."""

    def summed(images):
        loss, weights = functools.partial(convolved, groups=1, layout="NCHW"), jnp.asarray(kernel(1))
        return sum_of(loss, weights, images, np.ones(ROWS, bool), grid=GRID, microbatch_size=2).norms

    found = list(layouts(jax.make_jaxpr(summed)(IMAGES)))
    assert found
    for numbers in found:
        last = len(numbers.lhs_spec) - 1
        assert numbers.lhs_spec == numbers.out_spec == (0, last, *range(1, last))
        assert numbers.rhs_spec == (last, last - 1, *range(last - 1))
