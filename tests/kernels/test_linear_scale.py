"""Likelihood ratios at several noise multipliers in linear scale, against enumeration."""

import jax
import numpy as np
import pytest
from scipy.special import logsumexp

from jaxacct import (
    BallsInBins,
    BandedToeplitz,
    BMinSep,
    CyclicPoisson,
    IndependentAttribution,
    MultiAttribution,
    Poisson,
)
from jaxacct.kernels import gpu_recurrence
from jaxacct.likelihood import rounding
from tests.oracles import enumeration

# The factors of sigma = 2, 0.5 and 0.07: with the last, e^r is beyond float32 for most of the large ratios.
SIGMAS = np.array([2.0, 0.5, 0.07])
FACTORS = np.stack([SIGMAS**-2, 1 / SIGMAS], axis=1).astype(np.float32)


@pytest.fixture(autouse=True)
def without_a_kernel(monkeypatch):
    """On a GPU, too, where logarithms would be used."""
    monkeypatch.setattr(gpu_recurrence, "serves", lambda _: False)


def by_enumeration(scheme, factors, arrays, halves):
    """(exact likelihood ratios of (count, num_samples), log-ratios of one participation)."""
    distribution = enumeration.pattern_distribution(scheme)
    patterns, weights = np.array(list(distribution)), np.log(list(distribution.values()))
    ratios = np.einsum("vk,kns->vns", factors.astype(float), np.array(arrays, float))
    together = np.einsum("xn,v->vx", patterns * (patterns - 1) * halves, factors[:, 0].astype(float))
    logs = weights[:, None] + np.einsum("xn,vns->vxs", patterns, ratios) - together[:, :, None]
    return logsumexp(logs, axis=1), ratios


@pytest.mark.parametrize(
    "scheme",
    [
        Poisson(9, 0.2),
        BMinSep(5, 1, 1.0),
        CyclicPoisson(11, 4, 0.3),
        BallsInBins(10, 4),
        BMinSep(12, 3, 0.3),
        BMinSep(7, 3, 1.0),
        BMinSep(5, 8, 0.4, False),
        MultiAttribution(7, 3, 0.2, 3),
        MultiAttribution(4, 1, 0.3, 2),
        MultiAttribution(5, 2, 1.0, 3, False),
        pytest.param(CyclicPoisson(12, 3, 1.0), marks=pytest.mark.slow),
        pytest.param(BMinSep(10, 4, 0.25, False), marks=pytest.mark.slow),
        pytest.param(BMinSep(9, 1, 0.4, False), marks=pytest.mark.slow),
        pytest.param(BMinSep(1, 2, 0.5), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sums_against_enumeration(scheme):
    """Right to float32's rounding wherever finite; infinite or NaN only where e^r has no room, and there."""
    assert scheme.many_multipliers is not None
    rng = np.random.default_rng(scheme.iterations)
    arrays = [rng.normal(size=(scheme.iterations, 200)).astype(np.float32) for _ in range(2)]
    halves = rng.uniform(0.02, 0.1, scheme.iterations).astype(np.float32)
    ours = np.asarray(jax.jit(scheme.many_multipliers.log_likelihood_ratios)(arrays, FACTORS, halves))
    exact, ratios = by_enumeration(scheme, FACTORS, arrays, halves)
    assert ours.shape == exact.shape
    finite, tolerance = np.isfinite(ours), 5e-6 * (1 + np.abs(exact))
    if scheme.sampling_probability == 1:  # log-ratios are added up, each with the errors in its budget
        tolerance += rounding._RATIO_ROUNDINGS * rounding.UNIT * np.abs(ratios).sum(axis=1)
    assert np.all(np.abs(ours - exact)[finite] <= tolerance[finite])
    assert finite[:2].all()
    # Whatever is added up, not multiplied, is at the mercy of the range.
    assert scheme.sampling_probability == 1 or not finite[2].all()
    assert finite[2, ratios[2].max(axis=0) < 15].all()


def test_many_counts():
    """A loop in the program."""
    scheme, rng = MultiAttribution(3, 5, 0.02, 20, False), np.random.default_rng(0)
    arrays = [rng.normal(size=(3, 200)).astype(np.float32) / 2 for _ in range(2)]
    halves, factors = np.full(3, 0.5, np.float32), np.array([[0.25, 0.5], [1 / 0.49, 1 / 0.7]], np.float32)
    ours = np.asarray(jax.jit(scheme.many_multipliers.log_likelihood_ratios)(arrays, factors, halves))
    exact, _ = by_enumeration(scheme, factors, arrays, halves)
    np.testing.assert_allclose(ours, exact, rtol=5e-6, atol=5e-6)
    assert exact.max() > 1


@pytest.mark.parametrize(
    "scheme",
    [
        IndependentAttribution(8, 3, 0.3, 2),
        IndependentAttribution(7, 3, 1.0, 2),
        IndependentAttribution(6, 2, 0.3, 3, False),
        pytest.param(IndependentAttribution(6, 3, 0.3, 3), marks=pytest.mark.slow),
        pytest.param(IndependentAttribution(4, 1, 0.3, 2), marks=pytest.mark.slow),
        pytest.param(IndependentAttribution(3, 5, 0.4, 2), marks=pytest.mark.slow),
        pytest.param(IndependentAttribution(7, 3, 0.3, 1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_independent_examples_against_enumeration(scheme):
    """Of all tuples, where all columns of C are whole."""
    bands, n = min(2, scheme.min_separation), scheme.iterations
    strategy, rng = BandedToeplitz.square_root(bands), np.random.default_rng(0)
    dense = enumeration.strategy_matrix(strategy.coefficients, n + bands - 1, n)
    signal = rng.integers(0, 2, (100, n)) @ dense.T * (rng.random((100, 1)) < 0.5)
    noise = rng.normal(size=signal.shape)
    arrays = [((signal @ dense) - 0.5).T.astype(np.float32), (noise @ dense).T.astype(np.float32)]
    norms = strategy.column_products(scheme.min_separation).astype(np.float32)
    ours = np.asarray(jax.jit(scheme.many_multipliers.log_likelihood_ratios)(arrays, FACTORS, norms))
    outputs = [signal + sigma * noise for sigma in SIGMAS]
    exact = [
        enumeration.log_ratio(scheme, strategy.coefficients, *at) for at in zip(SIGMAS, outputs, strict=True)
    ]
    exact, finite = np.array(exact), np.isfinite(ours)
    np.testing.assert_allclose(ours[finite], exact[finite], rtol=1e-5, atol=1e-5)
    assert finite[:2].all()
    assert scheme.sampling_probability == 1 or not finite[2].all()


@pytest.mark.parametrize(
    "scheme", [MultiAttribution(1, 2, 0.5, 2, False), IndependentAttribution(1, 2, 0.5, 2, False)]
)
def test_coefficients_that_float32_does_not_have(scheme):
    """Two examples at one step, where the second costs e^-50 to e^-110 and one is worth up to e^88."""
    ratios, halves = np.linspace(40, 89, 200), np.linspace(25, 55, 20).astype(np.float32)
    run, each = jax.jit(scheme.many_multipliers.log_likelihood_ratios), np.ones((1, 1), np.float32)
    # Argument of a scheme for two at one step: half a square norm, or the square norm of d = 0.
    norms = (
        np.float32(halves)
        if not scheme.examples_overlap
        else np.float32([[2, 0]]) * np.float32(halves)[:, None]
    )
    ours = np.array([run([ratios[None].astype(np.float32)], each, norm)[0] for norm in norms])
    two = 2 * ratios - 2 * halves[:, None].astype(float)
    exact = np.logaddexp(np.log(0.25), np.logaddexp(np.log(0.5) + ratios, np.log(0.25) + two))
    finite = np.isfinite(ours)
    np.testing.assert_allclose(ours[finite], exact[finite], rtol=5e-6)
    assert finite[0].any() and not finite[:, -1].any() and not finite[-1].any()


@pytest.mark.parametrize(
    ("scheme", "last", "first"),
    [(BMinSep(4, 2, 0.5, False), 62, 20), (IndependentAttribution(6, 2, 0.05, 2, False), 34, 12)],
    ids=["one example", "two"],
)
def test_scales_whose_reciprocals_float32_does_not_have(scheme, last, first):
    """What happens near the end is worth nearly all of float32's range, one participation before it much."""
    n = scheme.iterations
    ratios = np.full((n, 400), -30, np.float32)
    ratios[-2], ratios[0] = np.linspace(last, last + 28, 400), first
    norms = np.float32([0.5, 0])
    ours = np.asarray(
        jax.jit(scheme.many_multipliers.log_likelihood_ratios)([ratios], np.ones((1, 1)), norms)
    )[0]
    distribution = {(): 1.0}
    for _ in range(scheme.examples_per_unit):
        one = enumeration.pattern_distribution(scheme if scheme.parts is None else scheme.one)
        distribution = {(*before, x): w * v for before, w in distribution.items() for x, v in one.items()}
    vectors = np.array(list(distribution), float)  # (tuples, examples, steps)
    counts = vectors.sum(axis=1)
    together = (counts**2 - (vectors**2).sum(axis=1)).sum(axis=1) / 2 * 0.5
    logs = np.log(list(distribution.values())) - together
    exact = logsumexp(logs[:, None] + counts @ ratios.astype(float), axis=0)
    finite = np.isfinite(ours)
    np.testing.assert_allclose(ours[finite], exact[finite], rtol=5e-6)
    assert finite[0] and not finite[-1]
