"""Likelihoods of b-min-sep: steps without participation, and what thousands of steps round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxacct import BandedToeplitz, BMinSep, Poisson
from jaxacct.kernels import recurrence
from jaxacct.kernels.likelihoods import interacting_recurrence
from jaxacct.likelihood.loss import loss_of_scores
from tests.oracles.recurrences import log_likelihood_ratios


def likelihood(ratios, p, b):
    """Of a cold start, (num_samples,); ratios are (num_samples, n)."""
    return jax.jit(BMinSep(ratios.shape[-1], b, p, False).log_likelihood_ratios)(jnp.asarray(ratios))


def test_steps_without_participation_cost_nothing():
    """Fifty thousand steps whose roundings would all go one way: the sum carries what it loses along."""
    n, p, b = 50_000, 5e-7, 2
    ratios = np.random.default_rng(0).normal(size=(2, n)).astype(np.float32)
    ratios[:, [100, 40_000]] = 19.0
    single = likelihood(ratios, p, b)
    exact = log_likelihood_ratios(BMinSep(n, b, p, False), ratios, 0.5)
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, exact, rtol=0, atol=2e-6)


def test_two_sum_is_exact():
    rng = np.random.default_rng(1)
    a, b = (rng.normal(size=10_000) * np.exp(rng.uniform(-20, 20, 10_000)) for _ in range(2))
    a, b = a.astype(np.float32), b.astype(np.float32)
    total, lost = jax.jit(recurrence.two_sum)(a, b)
    exactly = np.asarray(total, np.longdouble) + np.asarray(lost, np.longdouble)
    np.testing.assert_array_equal(exactly, a.astype(np.longdouble) + b)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 65])
def test_tree_sum(size):
    values = np.random.default_rng(size).normal(size=(3, size)).astype(np.float32)
    summed = jax.jit(recurrence.tree_sum, static_argnames="axis")(values, axis=1)
    np.testing.assert_allclose(summed, values.astype(float).sum(1), atol=1e-5)


def test_gradients_flow(x64):
    """Tangents of L are minorants (proofs/derivations.md, 9): it must differentiate, also at p = 1."""
    for p in (0.2, 1.0):
        gradient = jax.jit(jax.grad(BMinSep(10, 3, p).log_likelihood_ratios))(np.zeros(10))
        assert np.all(np.isfinite(gradient))
        assert np.all(gradient >= 0)


def test_softplus_has_a_derivative_at_0(x64):
    """Tangents at the point where f = 1 pass through it: 1/2 there, where `max` and `abs` together give 0."""
    derivative = jax.jit(jax.grad(recurrence.softplus))
    for d, slope in ((0.0, 0.5), (-1.0, 1 / (1 + np.e)), (1.0, np.e / (1 + np.e)), (-np.inf, 0.0)):
        assert float(derivative(d)) == pytest.approx(slope, abs=1e-15)


def test_a_certain_participation_adds_up_thousands_of_ratios():
    """At p = 1 ln f is the sum of the ratios of a phase: a plain float32 sum loses hundreds of ulps."""
    ratios = np.full((2, 40_000), np.float32(0.1))
    exact = 20_000 * np.float64(np.float32(0.1))
    found = np.asarray(likelihood(ratios, 1.0, 2), np.float64)
    plain = np.cumsum(ratios[0, ::2])[-1]
    assert abs(plain - exact) > 100 * 2.0**-23 * exact > 100 * np.max(np.abs(found - exact))


# Planted mistakes of shape and dtype, which would broadcast or widen, are refused.


def test_overlaps_have_an_axis_for_every_step_apart_and_scores_one_for_every_step():
    options = dict(processes=2, log_p=-1.0, log_q=-0.5, block=2)
    with pytest.raises(AssertionError, match="assert_axis_dimension"):
        interacting_recurrence.interacting_log_recurrence(jnp.ones((4, 3)), jnp.ones((4, 1)), **options)
    with pytest.raises(AssertionError, match="assert_shape"):
        loss_of_scores(Poisson(4, 0.5), BandedToeplitz.identity(), jnp.ones((3, 1)), 1.0)


@pytest.mark.parametrize("other", [jnp.ones(3, jnp.int32), jnp.ones((2, 3))])
def test_nothing_is_promoted_implicitly(other):
    """`STRICT` of `conftest.py` holds."""
    with pytest.raises((ValueError, TypeError), match=r"promotion"):
        jax.jit(jnp.add)(jnp.ones(3), other)


@pytest.mark.parametrize(("n", "b"), [(1, 1), (31, 2), (65, 16), (5, 9)])
def test_every_separation(n, b, x64):
    ratios = np.outer((0.01, 1.0, 300.0), np.random.default_rng(n * b).normal(size=n))
    for p in (1e-6, 0.1, 0.999999, 1.0):
        exact = log_likelihood_ratios(BMinSep(n, b, p, False), ratios, 0.5)
        np.testing.assert_allclose(likelihood(ratios, p, b), exact, rtol=1e-11, atol=1e-12)
