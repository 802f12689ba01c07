"""The add direction is at most the remove direction (proofs/add_direction.md): by quadrature and by draws."""

import math

import jax
import numpy as np
import pytest

from jaxacct import BandedToeplitz, Mechanism, sample_privacy_loss
from jaxacct.schemes import BMinSep, Poisson
from jaxacct.statistics.hockey_stick import hockey_stick
from tests.oracles.settings import slow

FALSE_ALARM = 1e-6

LINE = np.linspace(-13, 13, 26_001)
WEIGHTS = np.exp(-(LINE**2) / 2) / math.sqrt(2 * math.pi) * (LINE[1] - LINE[0])
COARSE = np.linspace(-8, 8, 401)
PLANE = np.exp(-(COARSE**2) / 2) / math.sqrt(2 * math.pi) * (COARSE[1] - COARSE[0])


def divergences(ratio, weights, epsilon: float) -> tuple[float, float]:
    """(H(P, Q), H(Q, P)) of f = `ratio` at points of these weights under Q."""
    alpha = math.exp(epsilon)
    remove, add = np.maximum(ratio - alpha, 0.0), np.maximum(1 - alpha * ratio, 0.0)
    return float((weights * remove).sum()), float((weights * add).sum())


def ratio_of(shifts, shares, *points):
    """P / Q at points: P a mixture of normals at these shifts, (count, dimensions), Q the standard one."""
    exponents = [
        sum(s * z for s, z in zip(shift, points, strict=True)) - shift @ shift / 2 for shift in shifts
    ]
    return sum(share * np.exp(exponent) for share, exponent in zip(shares, exponents, strict=True))


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
        remove, add = divergences(ratio_of(shifts, shares, LINE), WEIGHTS, epsilon)
        assert add <= remove * (1 + 1e-5) + 1e-13
        if len(shares) > 1 and max(shares) < 0.9 and epsilon > 0.2 and add > 1e-6:
            closest = min(closest, remove / add)
    assert 1 < closest < 1.05  # by little, so the quadrature would show a mistake
    for shifts, shares, epsilon in mixtures(2, 60):
        ratio = ratio_of(shifts, shares, *np.meshgrid(COARSE, COARSE, indexing="ij"))
        remove, add = divergences(ratio, np.outer(PLANE, PLANE), epsilon)
        assert add <= remove * (1 + 1e-3) + 1e-9
    one = divergences(ratio_of(np.array([[1.3]]), [1.0], LINE), WEIGHTS, 0.8)
    assert one[0] == pytest.approx(one[1], rel=1e-6)


def test_a_mixture_in_place_of_q_breaks_it():
    """Attack: with P one Gaussian and Q a mixture the add direction is the larger one."""
    ratio = ratio_of(np.array([[0.0], [2.0]]), [0.9, 0.1], LINE)
    remove, add = divergences(1 / ratio, WEIGHTS * ratio, 0.1)
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
