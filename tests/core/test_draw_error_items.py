"""Every `draw_error` and every error of a replica module, recomputed: two-sided, so that no term is left out.

Allowances are far above measured errors, so draws do not show a term that is missing.
"""

import math

import numpy as np
import pytest

from jaxacct import (
    BalancedMinSep,
    BallsInBins,
    BandedToeplitz,
    BMinSep,
    CustomScheme,
    CyclicPoisson,
    EpochwiseAllocation,
    Mechanism,
    MultiAttribution,
    Poisson,
    TruncatedBMinSep,
)
from jaxacct.kernels import lockouts
from jaxacct.kernels.likelihoods import epochs
from jaxacct.proposals.base import plain

U = 2.0**-24
SHARE = 2.0**-51  # of a choice's probability, for each of its choices


def product(*errors):
    return math.expm1(sum(map(math.log1p, errors)))


def waits(p, most, n, start=0.0):
    """Two ends of a wait, 2^-38 together, over the chance of its step; the last wait; hazards of n steps."""
    return math.expm1(most * 2.0**-38 / p + 2.0**-38 + n * 2.0**-44 + start)


DRAW_ERRORS = [
    (Poisson(40, 0.3), waits(0.3, 40, 40)),
    (Poisson(40, 1e-5), waits(1e-5, 40, 40)),
    (BMinSep(41, 4, 1.0, False), 0.0),
    (CyclicPoisson(41, 4, 0.3), math.expm1(11 * 2 * SHARE / 0.3 + 4 * SHARE * 4)),
    (BallsInBins(41, 4), math.expm1(4 * SHARE * 4)),
    (BMinSep(41, 4, 0.3, False), waits(0.3, 11, 41)),
    (BMinSep(41, 4, 0.3), waits(0.3, 11, 41, 4 * SHARE * 1.9 / 0.3)),
    # One participation is left from step 8 on, with 33 steps for it.
    (BalancedMinSep(41, 4, 3), waits(1 / 33, 3, 41)),
    (BalancedMinSep(41, 4, 2.5), waits(1 / 33, 3, 41, 3 * 2 * SHARE * 6)),
    (EpochwiseAllocation(41, 8, 3), waits(1 / 8, 6, 41)),
]


@pytest.mark.parametrize("scheme, expected", DRAW_ERRORS, ids=str)
def test_errors_of_draws(scheme, expected):
    assert scheme.draw_error() == pytest.approx(expected, rel=1e-9, abs=0)
    at = Mechanism(scheme, BandedToeplitz.identity(), 1.0)
    assert plain(at, "remove").relative_error == pytest.approx(expected, rel=1e-9, abs=0)
    assert scheme.draw_variation == scheme.max_participations * (scheme.iterations + 1) * 2.0**-62
    assert plain(at, "remove").total_variation == scheme.draw_variation


def test_errors_of_batch_sizes_and_of_participations_multiply():
    scheme = TruncatedBMinSep(120, 4, 0.1, 50, 600)
    relative, variation = scheme.side_information.error()
    of = plain(Mechanism(scheme, BandedToeplitz.identity(), 2.5), "remove")
    assert relative > 0
    assert of.relative_error == pytest.approx(product(relative, scheme.draw_error()), rel=1e-9)
    assert of.total_variation == variation + scheme.draw_variation


def one(scheme, sigma=1.5, bands=1):
    return Mechanism(scheme, BandedToeplitz.square_root(bands), sigma)


@pytest.mark.parametrize("p, magnified", [(0.05, 1.0), (0.5, 1.0), (0.9, 5.0), (0.99, 50.0)])
def test_errors_of_b_min_sep_pairs(p, magnified):
    scheme, m = BMinSep(400, 400, p, False), 2
    relative, variation = scheme.replicas.errors(one(scheme, 50.0), m)
    walks = 400 + 2 * scheme.max_participations
    assert relative >= math.expm1(U * 20 * m * walks * magnified) * (1 - 1e-9)
    if magnified == 1:
        assert relative == pytest.approx(math.expm1(U * 20 * m * walks), rel=1e-9)
    assert variation == pytest.approx(m * 400 * 2.0**-32 + 2 * m * 400 * 2.0**-64, rel=1e-12)


def test_errors_of_modules_with_thresholds():
    poisson, bins, users = Poisson(40, 0.3), BallsInBins(40, 4), MultiAttribution(60, 4, 0.02, 3)
    assert poisson.replicas.errors(one(poisson), 3) == (0.0, 40 * 4 * 2.0**-33)
    assert bins.replicas.errors(one(bins), 3) == (0.0, 3 * 4 * 2.0**-32)
    assert users.replicas.errors(one(users), 2) == (0.0, (60 * 16 + 8) * 2.0**-32)


def test_errors_of_cyclic_chains():
    scheme, m, sigma, p = CyclicPoisson(40, 4, 0.3), 3, 1.5, 0.3
    largest = m**2 / sigma**2 - math.log(p) - math.log1p(-p)
    relative, variation = scheme.replicas.errors(one(scheme, sigma), m)
    assert relative == pytest.approx(math.expm1(30 * U * (20 + 8 * largest)), rel=1e-6)
    assert variation == pytest.approx(30 * 2.0**-22 + m * 4 * 2.0**-32, rel=1e-12)


def test_errors_of_two_participations():
    """16 roundings of a step and 20 of an event for the rarest one, and for any; two of them in a pair."""
    scheme = BalancedMinSep(30, 30, 1)
    relative, variation = scheme.replicas.errors(one(scheme, 1.5), 2)
    # The earliest of the steps before the last one, and that both participate.
    rarest = (math.exp(1 / 1.5**2) + 2 * 29) / 2 + 1
    assert relative == pytest.approx(math.expm1(2 * U * 36 * (rarest + 1)), rel=1e-6)
    assert variation == 2.0**-40


def test_errors_of_pairs_of_a_table():
    """Waits and outcomes of both replicas over their chances, which attraction makes smaller by a ratio."""
    scheme = CustomScheme([0.05] * 400, 20)
    log_z, relative, variation = (
        scheme.replicas.log_normalizer(one(scheme, 50.0), 2),
        *scheme.replicas.errors(one(scheme, 50.0), 2),
    )
    least = 2 * 20 * 2.0**-38 / 0.05  # without attraction
    assert least < relative < 1.1 * least + 402 * 2.0**-48 and 0 < log_z < 0.1
    # 20 outcomes of each replica, of three in a state of two: that one, the other or both participate.
    assert variation == pytest.approx(2 * (scheme.draw_variation + 20 * 3**2 * SHARE / 2), rel=1e-12)
    assert scheme.replicas.errors(one(scheme, 0.7), 2)[0] > 1.1 * least


def test_rounding_of_sums_over_epochs():
    count, M, b, ratio, error = 5, 100, 30, 3.0, 7.0
    offset, largest = -(b - 1) * math.log((M - b) / (M - b + 1)), count * ratio
    items = [
        error,
        11 * (2 * largest + offset),
        7 * largest + 6 * offset + 8 * 7 + 12,
        4 * largest + 2 * offset,
    ]
    assert epochs.rounding_bound(count, M, b, ratio, error) == pytest.approx(U * count * sum(items), rel=1e-9)


def test_a_replica_is_free_again_at_the_step_of_its_release(key):
    """Both replicas join at step 0 and at step b: the first one is in both, and no other one can be."""
    positions, counts = np.tile([0, 5], (50, 1)), np.full((50, 2), 2.0, np.float32)
    shares = lockouts.shares_of_one(key, positions.astype(np.int32), counts, 2, 5)
    np.testing.assert_array_equal(shares, np.ones((50, 2)))
