"""What is released are integers: the low bits of a sum tell nothing, and no output is ruled out by one.

The attack: one step, one band, 768 coordinates, sigma 1, a canary of 1/36,000 of the clip norm. Float32 noise
near zero comes from sums of normals that are multiples of 2^-24, and a canary shifts the release off it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxacct import BandedInverse, BandedToeplitz, BMinSep, BufferedToeplitz, Mechanism, Poisson
from train.clipping.grid import Grid, GridSum
from train.noise import recursion as noise
from train.optimizers import privatize
from train.procedures.step import CLIPPINGS

pytestmark = pytest.mark.optimized  # many draws from few programs

FALSE_ALARM = 1e-6
COORDINATES, TRIALS = 768, 10_000
CANARY = 1 / 36_000 / np.sqrt(COORDINATES)
MECHANISM = Mechanism(Poisson(1, 1.0), BandedToeplitz((1.0,)), 1.0)


def released_integers(value: float, key: int) -> np.ndarray:
    """(trials, coordinates) float32 releases of the trainer; each coordinate's sum is `value`."""
    words = np.arange(8, dtype=np.uint32) + np.uint32(key)
    private = privatize(MECHANISM, clip_norm=1.0, expected_batch_size=1.0, key=words)
    params = jnp.zeros((TRIALS, COORDINATES))
    counts = jnp.full(params.shape, int(value / private.grid.unit), jnp.int32)
    total = GridSum.of(counts, private.grid)
    update, _ = jax.jit(private.update)(total, private.init(params))
    return np.asarray(update)


def released_floats(value: float, key: int) -> np.ndarray:
    """The same as it was before: float32 sums plus float32 normals."""
    a, b = (
        jax.random.normal(jax.random.fold_in(jax.random.key(key), i), (TRIALS, COORDINATES)) for i in range(2)
    )
    return np.asarray(jnp.float32(value) + (a + b) * jnp.float32(np.sqrt(0.5)))


def off_the_lattice(release: np.ndarray) -> np.ndarray:
    """(trials,) how many small coordinates are not the noise that a multiple of 2^-24 gives."""
    small = np.abs(release) < 2.0**-4
    root = np.float32(np.sqrt(0.5))
    multiple = np.round(release.astype(np.float64) / root * 2**24) / 2**24
    on = multiple.astype(np.float32) * root == release
    return (small & ~on).sum(axis=1) / np.maximum(1, small.sum(axis=1))


def low_bits(release: np.ndarray) -> np.ndarray:
    """(trials,) share of odd integers on the trainer's grid, for an attacker who has it."""
    integers = np.round(release.astype(np.float64) * 2**20).astype(np.int64)
    near = np.abs(integers) < 2**23  # beyond, float32 rounds the release
    return ((integers & 1 == 1) & near).sum(axis=1) / COORDINATES


def epsilon_found(present: np.ndarray, absent: np.ndarray) -> float:
    """A lower bound on epsilon from thresholds chosen on the first half, wrong with probability 1e-6."""
    half = TRIALS // 2
    best = 0.0
    for sign in (1, -1):
        p, q = sign * present, sign * absent
        at = max(np.quantile(np.r_[p[:half], q[:half]], np.linspace(0.01, 0.99, 99)),
                 key=lambda t: np.mean(p[:half] > t) - np.mean(q[:half] > t))  # fmt: skip
        hits, false = int((p[half:] > at).sum()), int((q[half:] > at).sum())
        risk = FALSE_ALARM / 4
        true_rate = stats.beta.ppf(risk, hits, half - hits + 1) if hits else 0.0
        false_rate = stats.beta.isf(risk, false + 1, half - false) if false < half else 1.0
        best = max(best, float(np.log(max(true_rate, 1e-300) / false_rate)))
    return best


@pytest.fixture(scope="module")
def released():
    """With the canary and without."""
    return released_integers(CANARY, 1), released_integers(0.0, 100)


@pytest.mark.slow  # `test_low_bits_of_real_steps_reveal_nothing` is its fast sibling
@pytest.mark.parametrize("statistic", [off_the_lattice, low_bits])
def test_the_low_bit_attack_finds_nothing(statistic, released):
    """10,000 trials with and without the canary; Kolmogorov-Smirnov, and epsilon by counting."""
    present, absent = map(statistic, released)
    assert stats.ks_2samp(present, absent).pvalue > FALSE_ALARM
    assert epsilon_found(present, absent) < 0.3  # the canary's own shift is 1/36,000 of sigma


@pytest.mark.slow
def test_the_same_attack_breaks_float_sums():
    """The attack has power: against float32 sums it wins nearly every trial."""
    present, absent = (off_the_lattice(released_floats(v, k)) for v, k in ((CANARY, 1), (0.0, 2)))
    assert epsilon_found(present, absent) > 5


LEAVES = {"a": 256, "b": 512}  # of a trial
BY_STEPS = 1500  # trials


@functools.cache
def program(kind, dtype, strategy, mistake=None):
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
        mixed = sum(
            strategy.array[k] * released[step - k] for k in range(1, min(step + 1, strategy.bands))
        ) / strategy.array[0] + np.zeros(now.shape)
        shown = [now >> bit & 1 for bit in range(4)]
        shown += [(now + released[step - 1]) & 1] * (step > 0)
        shown += [np.cos(2 * np.pi * mixed) * (1 - 2 * (now & 1))]
        for part in np.split(np.stack(shown), [LEAVES["a"]], axis=2):
            found.append(part.mean(axis=2))
    return np.concatenate(found)


def attack_p_value(kind, dtype, strategy, mistake=None) -> float:
    """P-value of the best statistic: Kolmogorov-Smirnov, Bonferroni."""
    made = program(kind, dtype, strategy, mistake)
    present, absent = (
        low_bit_statistics(stepwise(made, there, key), strategy) for there, key in ((True, 1), (False, 100))
    )
    return len(present) * min(stats.ks_2samp(a, b).pvalue for a, b in zip(present, absent, strict=True))


THREE = BandedToeplitz.square_root(3)
SETTINGS = [
    ("per_example", jnp.bfloat16, BandedInverse.bisr(iterations=3, bands=2)),
    *(
        pytest.param(*setting, marks=pytest.mark.slow)
        for setting in (
            ("per_example", jnp.float32, BufferedToeplitz((0.95, 0.4), (0.2, 0.3), 3)),
            ("ghost", jnp.bfloat16, THREE),
        )
    ),
]


@pytest.mark.parametrize(("kind", "dtype", "strategy"), SETTINGS)
def test_low_bits_of_real_steps_reveal_nothing(kind, dtype, strategy):
    """Gradients in bfloat16, several bands: 1,500 trials of 768 coordinates each.

    A share of odd numbers that a canary moves by 0.005 of all would be noticed. Halves that go to even
    numbers where z is on a grid, a banded inverse's, move it by 0.008.
    """
    assert attack_p_value(kind, dtype, strategy) > FALSE_ALARM


@pytest.mark.parametrize("mistake", ["coarse", pytest.param("rounded to bfloat16", marks=pytest.mark.slow)])
def test_low_bits_of_broken_noise_reveal_the_canary(mistake, monkeypatch):
    """Noise on a coarser grid than the sums, or noise that was cast to bfloat16: the same attack wins."""
    real = noise.draw

    def broken(*given, **named):
        drawn, after = real(*given, **named)

        def coarser(leaf):
            if mistake == "coarse":
                return leaf // 2 * 2
            return leaf.astype(jnp.bfloat16).astype(jnp.int32)

        return jax.tree.map(coarser, drawn), after

    monkeypatch.setattr(noise, "draw", broken)
    assert attack_p_value("per_example", jnp.bfloat16, THREE, mistake) < 1e-100


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
    assert (
        stats.chi2.isf(1 - FALSE_ALARM / 2, counts.size)
        < statistic
        < stats.chi2.isf(FALSE_ALARM / 2, counts.size)
    )


def test_rounding_is_of_the_whole_release():
    """round(g + x) = g + round(x) for whole g, in float64 up to 2^52, at halves too."""
    generator = np.random.default_rng(0)
    g = generator.integers(-(2**46), 2**46, 100_000).astype(float)
    g *= 2  # ties go to even numbers, so an odd g moves them: probability 0 under a continuous distribution
    x = np.r_[generator.normal(scale=2**20, size=99_000), np.arange(-500, 500) + 0.5]
    np.testing.assert_array_equal(np.round(g + np.round(x * 64) / 64), g + np.round(np.round(x * 64) / 64))


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
        with pytest.raises(ValueError, match="bits"):
            Grid(1.0, wrong)
