"""Float32 likelihood ratios of adversarial rows against float64 recurrences over steps.

The bound of `likelihood.rounding` for the recurrence holds for each row at its own size. Most of these rows
are outside of what samples reach.
"""

import math

import jax
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.likelihood import rounding
from tests.oracles.enumeration import log_ratio, strategy_matrix
from tests.oracles.recurrences import log_likelihood_ratios, of_two_examples
from tests.oracles.settings import slow_but

pytestmark = pytest.mark.optimized

SIGMA = 1.0


def rows(n: int, b: int, p: float) -> np.ndarray:
    """(rows, n) float32: constants, spikes at and beside the separation, cancellation, drift, noise."""
    generator, steps = np.random.default_rng(0), np.arange(n)
    even = math.log((1 - p) / p) if p < 1 else 0.0  # both branches weigh the same where b = 1
    made = [0 * steps + value for value in (0.0, 1e-7, -1e-7, 1.0, -30.0, 20.0, -87.5, even, 1 / 3)]
    made += [30.0 * (-1.0) ** steps, np.where(steps % b == 0, 25.0, -25.0)]
    made += [np.where(steps % max(1, b - 1) == 0, 15.0, 0.0), np.where(steps % (b + 1) == b, 12.0, -1.0)]
    made += [np.where(np.isin(steps % 64, (0, 63)), 9.0, 0.1), np.where(steps == n - 1, 80.0, 0.0)]
    made += [np.where(steps == 0, 80.0, -0.01), np.linspace(-5, 5, n), np.linspace(1e-3, -1e-3, n)]
    made += [np.float32(1 + 2**-23) * (steps % 2), even + 1e-3 * np.sin(steps), 40 * np.sin(steps / b)]
    made += [scale * generator.normal(size=n) for scale in (1e-3, 1.0, 10.0, 30.0)]
    return np.array(made, np.float32)


def worst_share(scheme) -> float:
    """The largest error of a row, in shares of what is reserved for it."""
    mechanism = ja.Mechanism(scheme, ja.BandedToeplitz.identity(), SIGMA)
    n, p = scheme.iterations, getattr(scheme, "sampling_probability", 1.0)
    ratios = rows(n, scheme.min_separation, p)
    half, sizes = 0.5 / SIGMA**2, None
    if scheme.side_information is not None:
        most = scheme.max_batch_size
        sizes = np.where(np.arange(n) % 3 == 0, most - 1, most + np.arange(n) % 7).astype(np.int32)
        sizes = np.broadcast_to(sizes, ratios.shape)
        ratios = np.clip(ratios, -30, 30)
    arguments = (ratios, np.float32(half)) if sizes is None else (ratios, np.full(n, half, np.float32), sizes)
    found = np.asarray(jax.jit(scheme.log_likelihood_ratios)(*arguments), np.float64)
    exact = log_likelihood_ratios(scheme, ratios, half, sizes)
    assert np.isfinite(found).all() and np.isfinite(exact).all()
    count = rounding.max_unit_participations(scheme)
    more = 0.0 if sizes is None else 3 * count * (np.abs(ratios).max(axis=1) + half)
    return max(shares_of(mechanism, ratios, np.maximum(exact, 0.0) + more, np.abs(found - exact)))


def shares_of(mechanism, ratios, largest, errors) -> list[float]:
    """Errors of rows in shares of what is reserved for them, at their largest ln of the likelihood."""
    count, shares = rounding.max_unit_participations(mechanism.scheme), []
    for row, most, wrong in zip(ratios, largest, errors, strict=True):
        size = rounding.Size(count, 0.0, 0.0, most, 0.0, 0.0, 0.0, float(np.abs(row).max()))
        booked = rounding._recurrence_error(mechanism, size, count)
        assert mechanism.scheme.parts is None or booked < 400
        shares.append(wrong / booked)
    return shares


SCHEMES = [
    ja.BMinSep(2000, 16, 0.1),
    ja.BMinSep(20_000, 1, 0.3),
    ja.BMinSep(20_000, 64, 1e-4),
    ja.BMinSep(20_000, 64, 0.999),
    ja.BMinSep(20_000, 64, 1.0),
    ja.BMinSep(20_000, 1024, 0.01, False),
    ja.BMinSep(20_000, 3, 1e-7),
    ja.Poisson(20_000, 0.01),
    ja.Poisson(20_000, 0.999),
    ja.CyclicPoisson(20_000, 7, 0.4),
    ja.BallsInBins(20_000, 100),
    ja.MultiAttribution(20_000, 16, 0.05, 3),
    ja.MultiAttribution(20_000, 16, 0.3, 20),
    ja.TruncatedBMinSep(20_000, 16, 0.05, 60, 2000),
]


@pytest.mark.parametrize("scheme", slow_but({0}, SCHEMES), ids=str)
def test_no_row_is_off_by_more_than_is_booked(scheme):
    assert worst_share(scheme) < 1


def test_two_examples_of_a_user_against_enumeration():
    scheme, strategy = ja.IndependentAttribution(4, 3, 0.4, 2, False), ja.BandedToeplitz.square_root(3)
    outputs = np.random.default_rng(0).normal(size=(9, 6))
    scores = outputs @ strategy_matrix(strategy.coefficients, 6, 4) - 0.5
    products = strategy.column_products(3)
    exact = log_ratio(scheme, strategy.coefficients, 1.0, outputs)
    np.testing.assert_allclose(of_two_examples(scheme, scores, products), exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "scheme",
    [
        ja.BMinSep(7, 3, 0.3),
        ja.BMinSep(6, 1, 0.4),
        ja.CyclicPoisson(7, 3, 0.4),
        ja.BallsInBins(7, 3),
        ja.Poisson(5, 0.2),
    ]
    + [ja.MultiAttribution(5, 2, 0.3, 3), ja.BMinSep(7, 3, 1.0), ja.BMinSep(6, 4, 0.3, False)],
    ids=str,
)
def test_the_recurrences_against_enumeration(scheme):
    outputs = np.random.default_rng(0).normal(size=(9, scheme.iterations))
    exact = log_ratio(scheme, (1.0,), 1.0, outputs)
    np.testing.assert_allclose(
        log_likelihood_ratios(scheme, outputs - 0.5, 0.5), exact, rtol=1e-10, atol=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize(("n", "p"), [(20_000, 0.05), (5000, 0.9), (5000, 1e-5)])
def test_two_examples_of_a_user(n, p):
    """Rows up to 8 in size, for which the bound is a number."""
    scheme, strategy = ja.IndependentAttribution(n, 4, p, 2, False), ja.BandedToeplitz.square_root(3)
    ratios = np.clip(rows(n, 4, p), -8, 8)
    products = strategy.column_products(4).astype(np.float32)
    found = np.asarray(jax.jit(scheme.log_likelihood_ratios)(ratios, products), np.float64)
    exact = of_two_examples(scheme, ratios, products.astype(np.float64))
    mechanism = ja.Mechanism(scheme, strategy, SIGMA)
    assert max(shares_of(mechanism, ratios, np.maximum(exact, 0.0), np.abs(found - exact))) <= 1
