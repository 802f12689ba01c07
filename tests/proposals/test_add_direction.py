"""The add direction is at most the remove direction (proofs/add_direction.md): by quadrature and by draws."""

import math

import jax
import numpy as np
import pytest

from jaxacct import BandedToeplitz, Mechanism, sample_privacy_loss
from jaxacct.schemes import BMinSep, Poisson
from jaxacct.statistics.hockey_stick import DIRECTIONS, hockey_stick
from tests.oracles.settings import slow
from tests.oracles.tuples import divergence

FALSE_ALARM = 1e-6


def divergences(shifts, shares, epsilon: float, points: int) -> list[float]:
    """H(P, Q) and H(Q, P) of P a mixture of normals at these shifts, (count, dimensions), Q the standard."""
    pair = (shifts, shares), (np.zeros((1, np.shape(shifts)[1])), np.ones(1))
    return [float(divergence(*pair, 1.0, epsilon, side, points=points)) for side in DIRECTIONS]


def mixtures(dimensions: int, count: int):
    """Shifts of both signs, with shares of all sizes."""
    rng = np.random.default_rng(dimensions)
    for _ in range(count):
        parts = rng.integers(1, 6)
        shifts = rng.normal(0, rng.choice([0.2, 0.7, 1.5]), (parts, dimensions))
        yield shifts, rng.dirichlet(np.full(parts, rng.choice([0.2, 1.0]))), rng.uniform(0, 2.5)


def test_the_add_direction_is_at_most_the_remove_direction():
    """Mixtures in one and two dimensions, and every scheme of two steps; equal for one Gaussian."""
    closest = math.inf
    for shifts, shares, epsilon in mixtures(1, 400):
        remove, add = divergences(shifts, shares, epsilon, 26_001)
        assert add <= remove * (1 + 1e-5) + 1e-13
        if len(shares) > 1 and max(shares) < 0.9 and epsilon > 0.2 and add > 1e-6:
            closest = min(closest, remove / add)
    assert 1 < closest < 1.05  # by little, so the quadrature would show a mistake
    for shifts, shares, epsilon in mixtures(2, 60):
        remove, add = divergences(shifts, shares, epsilon, 401)
        assert add <= remove * (1 + 1e-3) + 1e-9
    one = divergences(np.array([[1.3]]), np.ones(1), 0.8, 26_001)
    assert one[0] == pytest.approx(one[1], rel=1e-6)


def test_a_mixture_in_place_of_q_breaks_it():
    """Attack: with P one Gaussian and Q a mixture the add direction is the larger one."""
    remove, add = (divergence({0: 1.0}, {0: 0.9, 2: 0.1}, 1.0, 0.1, side) for side in DIRECTIONS)
    assert add > 1.5 * remove > 1e-3


@pytest.mark.parametrize("scheme", [BMinSep(50, 8, 0.03), slow(Poisson(50, 0.02))])
def test_rare_small_likelihoods_are_rare_large_ones(scheme):
    """Draws of both directions, at many epsilons (Hoeffding, 1e-6 for each)."""
    mechanism, key = Mechanism(scheme, BandedToeplitz.identity(), 0.7), jax.random.key(3)
    losses = {d: np.asarray(sample_privacy_loss(key, mechanism, 20_000, d)) for d in ("remove", "add")}
    allowed = math.sqrt(math.log(2 / FALSE_ALARM) / (2 * 20_000))
    for epsilon in np.linspace(0, 1, 9):
        remove = hockey_stick(epsilon - losses["remove"]).mean()
        assert hockey_stick(epsilon + losses["add"]).mean() <= remove + 2 * allowed
