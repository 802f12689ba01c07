"""What is released are integers: the low bits of a sum tell nothing, and no output is ruled out by one.

The attack: 768 coordinates, sigma 1, a canary of 1/36,000 of the clip norm. Float32 noise near zero is a sum
of normals that are multiples of 2^-24, and a canary shifts the release off it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxacct import BandedInverse, BandedToeplitz, BMinSep, BufferedToeplitz, Mechanism, Poisson
from tests.refusals import refused
from train.clipping.grid import Grid
from train.noise import recursion as noise
from train.optimizers import privatize
from train.procedures.step import CLIPPINGS

pytestmark = pytest.mark.optimized  # many draws from few programs

FALSE_ALARM = 1e-6
CANARY = 1 / 36_000 / np.sqrt(768)


LEAVES = {"a": 256, "b": 512}  # of a trial
BY_STEPS = 1500  # trials


@functools.cache
def program(kind, dtype, strategy):
    """(step, first state of a key, grid unit): real steps whose gradients are computed in `dtype`."""
    params = {name: jnp.zeros((BY_STEPS, width), dtype) for name, width in LEAVES.items()}
    mechanism = Mechanism(BMinSep(3, strategy.bands, 1.0, False), strategy, 1.0)
    private = privatize(mechanism, clip_norm=1.0, expected_batch_size=1.0, key=np.zeros(8, np.uint32))

    def loss(params, example):
        return sum(jnp.sum(leaf * example.astype(dtype)) for leaf in params.values())

    def step(state, batch, mask):
        options = dict(grid=private.grid, microbatch_size=1)
        return private.update(CLIPPINGS[kind](loss, params, batch, mask, **options).total, state)

    return jax.jit(step), lambda key: noise.init(strategy, params, key), private.grid.unit


def stepwise(made, present: bool, key: int):
    """Integers that three steps release: (steps, trials, 768). A coordinate's sum has the canary or not.

    Gradients are clipped, and summed with that of a public example.
    """
    step, first, unit = made
    batch, released = np.array([CANARY, 5e-4], np.float32), []
    state = first(np.arange(8, dtype=np.uint32) + np.uint32(key))
    for _ in range(3):
        update, state = step(state, batch, np.array([present, True]))
        values = np.concatenate([np.asarray(leaf, np.float64) for leaf in update.values()], axis=1)
        released.append(np.round(values / unit).astype(np.int64))
    return np.stack(released)


def low_bit_statistics(released, strategy) -> np.ndarray:
    """(statistics, trials) of an adversary with the grid, C and all earlier releases.

    Shares of each of the lowest four bits, of the parity of sums with the release before, and the mean
    position of `C r` between multiples of its first coefficient, by step and leaf.
    """
    found = []
    for step, now in enumerate(released):
        earlier = range(1, min(step + 1, strategy.bands))
        mixed = sum(strategy.array[k] * released[step - k] for k in earlier) / strategy.array[0] + np.zeros(
            now.shape
        )
        shown = [now >> bit & 1 for bit in range(4)]
        shown += [(now + released[step - 1]) & 1] * (step > 0)
        shown += [np.cos(2 * np.pi * mixed) * (1 - 2 * (now & 1))]
        for part in np.split(np.stack(shown), [LEAVES["a"]], axis=2):
            found.append(part.mean(axis=2))
    return np.concatenate(found)


def attack_p_value(kind, dtype, strategy) -> float:
    """P-value of the best statistic: Kolmogorov-Smirnov, Bonferroni."""
    made = program(kind, dtype, strategy)
    both = (stepwise(made, there, key) for there, key in ((True, 1), (False, 100)))
    present, absent = (low_bit_statistics(released, strategy) for released in both)
    return len(present) * min(stats.ks_2samp(a, b).pvalue for a, b in zip(present, absent, strict=True))


THREE = BandedToeplitz.square_root(3)
SLOW = (
    ("per_example", jnp.float32, BufferedToeplitz((0.95, 0.4), (0.2, 0.3), 3)),
    ("ghost", jnp.bfloat16, THREE),
)
SETTINGS = [("per_example", jnp.bfloat16, BandedInverse.bisr(iterations=3, bands=2))]
SETTINGS += [pytest.param(*setting, marks=pytest.mark.slow) for setting in SLOW]


@pytest.mark.parametrize(("kind", "dtype", "strategy"), SETTINGS)
def test_low_bits_of_real_steps_reveal_nothing(kind, dtype, strategy):
    """Gradients in bfloat16, several bands: 1,500 trials of 768 coordinates each.

    A share of odd numbers that a canary moves by 0.005 of all would be noticed. Halves that go to even
    numbers where z is on a grid, a banded inverse's, move it by 0.008.
    """
    assert attack_p_value(kind, dtype, strategy) > FALSE_ALARM


def test_noise_integers_have_no_holes():
    """Every integer within 3.2 deviations comes: 37 expected at the rarest, missed with probability 1e-13."""
    strategy, levels = BandedToeplitz((1.0,)), 256.0
    params = jnp.zeros(4_000_000)
    state = noise.init(strategy, params, np.arange(8, dtype=np.uint32))
    drawn = np.asarray(jax.jit(lambda s: noise.draw(strategy, levels, s, params)[0])(state))
    reach = int(3.2 * levels)
    counts = np.bincount(drawn[np.abs(drawn) <= reach] + reach, minlength=2 * reach + 1)
    assert counts.min() > 0
    # And as often as rounded normals: chi-square over all of them.
    edges = (np.arange(-reach, reach + 2) - 0.5) / levels
    expected = np.diff(stats.norm.cdf(edges)) * params.size
    statistic = float(((counts - expected) ** 2 / expected).sum())
    least, most = stats.chi2.isf([1 - FALSE_ALARM / 2, FALSE_ALARM / 2], counts.size)
    assert least < statistic < most


SUMS = BufferedToeplitz((0.95, 0.4), (0.2, 0.3), 12)


@pytest.mark.parametrize(
    "strategy", [BandedToeplitz.square_root(1), BandedToeplitz.square_root(4), SUMS], ids=[1, 4, "sums"]
)
def test_the_release_is_a_function_of_what_was_accounted_for(strategy):
    """r_t = round((u_t - sum c_k r_{t-k}) / c_0) with u = C g + levels z, computed apart in float64.

    Two data sets with the same u (noise moved by what the sums differ) release the same integers.
    """
    levels, steps = 2.0**20, 12
    c, bands = strategy.array, strategy.bands
    params = np.zeros(50, np.float32)
    state = noise.init(strategy, params, np.arange(8, dtype=np.uint32))
    draw = jax.jit(lambda state: noise.draw(strategy, levels, state, params))
    generator = np.random.default_rng(1)
    g = generator.integers(-(2**20), 2**20, (steps, 50)).astype(float)
    released, u = np.zeros((steps, 50)), np.zeros((steps, 50))
    for t in range(steps):
        z = np.asarray(noise.standard_normals(state.key, t, 50))
        drawn, state = draw(state)
        released[t] = g[t] + np.asarray(drawn)
        u[t] = levels * z + sum(c[k] * g[t - k] for k in range(min(t + 1, bands)))
    again = np.zeros((steps, 50))
    for t in range(steps):
        again[t] = np.round((u[t] - sum(c[k] * again[t - k] for k in range(1, min(t + 1, bands)))) / c[0])
    np.testing.assert_array_equal(again, released)


def test_grids():
    """Noise spans 2^19 to 2^20 grid units; below 1/8 of a clip norm the gradients' 2^23 bound it."""
    for sigma, bits in ((0.4, 21), (1.0, 20), (1.1, 19), (24.0, 15), (0.01, 23)):
        assert Grid.of(Mechanism(Poisson(1, 1.0), BandedToeplitz((1.0,)), sigma), 3.0) == Grid(3.0, bits)
    assert Grid(3.0, 20).unit == 3 * 2.0**-20
    for wrong in (-1, 24, 1.5):
        refused("bits", Grid, 1.0, wrong)
