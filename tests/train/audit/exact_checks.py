"""What a run of `fit` releases in the coordinates of canaries, and exact tests of it against the plan.

Every example is a canary, alone in its coordinate, or silent. Where no example moves a coordinate, C times
the releases is the mechanism's noise: independent standard normals in units of its deviation, for each
coordinate and step. Where a canary does, subtracting C times its participations leaves the same. Both hold up
to rounding, whose bound is subtracted from every statistic. Batches are compared with the distribution of the
plan's scheme. Proof that p-values are valid: jaxacct/proofs/audits.md.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy
from jax.experimental import io_callback

from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.schemes import Scheme
from train.audit.bounds import lowest_rate
from train.audit.canaries import LENGTH, outputs
from train.batches.sources import ArrayRows
from train.clipping.grid import Grid
from train.options import TrainOptions
from train.training import fit

FALSE_ALARM = 1e-6
"""Probability that any check refutes an honest run; divided equally among the checks."""
_AT_A_TIME = 256
_RATES = np.concatenate([sign * np.geomspace(1e-5, 8, 64) for sign in (1, -1)])
"""Exponents of the Chernoff bound; each gives a valid bound, and the best of them is close to the optimum."""


@dataclass(frozen=True)
class Observed:
    """What a run releases at some coordinates.

    Attributes:
      outputs: (coordinates, steps) float64: outputs of the mechanism per clip norm.
      batches: the examples of each step.
      rounding: bound on the error of an output by rounding to the grid and to float32.
    """

    outputs: np.ndarray
    batches: list[np.ndarray]
    rounding: float


class _Rows(ArrayRows):
    """A data set that keeps the batch that was read last."""

    last = np.zeros(0, np.int64)

    def take(self, indices, size: int):
        jax.effects_barrier()  # the step before has used its batch
        self.last = np.array(indices, np.int64)
        return super().take(indices, size)


def observe(plan, params, canary_of, coordinates, *, clip_norm, keys) -> Observed:
    """Run `fit` on canaries alone and return what it releases at `coordinates` of the flattened parameters.

    `canary_of`, (examples,) int32, has the coordinate of each example's canary, or -1 for a silent example.
    """
    steps = plan.mechanism.scheme.iterations
    rows, log = _Rows(canary_of), np.full((steps, len(coordinates)), np.nan, np.float32)
    batches: list[np.ndarray] = [np.zeros(0, np.int64)] * steps

    def flat(tree):
        return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(tree)])

    def loss(params, at):
        return jnp.where(at >= 0, LENGTH * clip_norm * flat(params)[jnp.maximum(at, 0)], 0.0)

    def write(step, row):
        log[int(step)], batches[int(step)] = np.asarray(row), rows.last

    def update(updates, step, params=None):
        io_callback(write, None, step, flat(updates)[coordinates])
        return jax.tree.map(jnp.zeros_like, updates), step + 1

    record = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
    options = TrainOptions(keys=keys, microbatch_size=16, progress=False, verify=False, prefetch=0)
    fit(plan, params, loss, rows, record, clip_norm=clip_norm, options=options)
    jax.effects_barrier()
    assert np.isfinite(log).all()
    sums = log.T * plan.expected_batch_size
    return Observed(
        outputs(plan.mechanism, sums / clip_norm), batches, rounding(plan.mechanism, sums, clip_norm)
    )


def rounding(mechanism: Mechanism, sums: np.ndarray, clip_norm: float) -> float:
    """Bound on the rounding error of outputs, per clip norm: of the grid, then of float32."""
    sizes = np.abs(mechanism.strategy.array[: sums.shape[1]])
    # Noise and a canary's gradient are rounded to the grid, with errors of at most a unit.
    grid = 2 * sizes.sum() * 2.0 ** -Grid.of(mechanism, clip_norm).bits
    # A release is rounded to float32 once, and twice when it is scaled to a sum per clip norm.
    worst = scipy.signal.lfilter(sizes, [1.0], np.abs(sums, dtype=np.float64), axis=1).max()
    return float(grid + 2.0**-22 * worst / clip_norm)


def epsilon_lower_bound(present: np.ndarray, absent: np.ndarray, delta: float, confidence: float) -> float:
    """Return a lower bound on epsilon at `delta` from independent trials, false with 1 - confidence.

    An event has probability `a <= e^epsilon b + delta` under neighbouring data sets, so epsilon is at least
    `log((a - delta) / b)`. The event, a score above or not above a threshold, is chosen on the first half of
    the trials; on the second the Clopper-Pearson bounds on a and b fail with probability
    `(1 - confidence) / 2` each. `present` and `absent` are (trials,) scores with and without the canary.
    """
    half, level = len(present) // 2, (1 - confidence) / 2
    first, second = (present[:half], absent[:half]), (present[half:], absent[half:])

    def lower(threshold, above, sides):
        p, q = (np.sort(side) for side in (sides if above else sides[::-1]))
        hits, false = (np.searchsorted(side, threshold, side="right") for side in (p, q))
        hits, false = (len(p) - hits, len(q) - false) if above else (hits, false)
        low, high = lowest_rate(hits, len(p), level), 1 - lowest_rate(len(q) - false, len(q), level)
        return np.log(np.maximum(low - delta, 1e-300) / high)

    thresholds = np.quantile(np.concatenate(first), np.linspace(0.02, 0.98, 97))
    found = {above: lower(thresholds, above, first) for above in (True, False)}
    above = bool(found[True].max() >= found[False].max())
    return max(0.0, float(lower(thresholds[found[above].argmax()], above, second)))


@dataclass(frozen=True)
class Check:
    """Result of one test.

    Attributes:
      name: what is tested.
      p_value: upper bound on the probability of the observation, or a worse one, under the plan.
      level: p-value below which the plan is refuted.
    """

    name: str
    p_value: float
    level: float

    @property
    def refuted(self) -> bool:
        """Whether the plan is refuted at this level."""
        return self.p_value < self.level


def examine(mechanism: Mechanism, observed: Observed, canaries: int, dataset_size: int) -> tuple[Check, ...]:
    """Test a run in which the first `canaries` examples are canaries and all others are silent.

    Coordinates are observed in pairs; the first of each has the canary of the example of its number. One
    participation of a canary contributes a clip norm.
    """
    present, silent = (observed.outputs[side::2] / mechanism.noise_multiplier for side in (0, 1))
    error = observed.rounding / mechanism.noise_multiplier
    joined = _participations(observed.batches, canaries)
    expected = mechanism.scheme.expected_batch_sizes(dataset_size)
    residual = present - outputs(mechanism, joined / mechanism.noise_multiplier)
    p_values = (
        _noise(silent, error)
        | _canary(mechanism, residual, joined, observed.batches, expected, error)
        | _batches(mechanism.scheme, observed.batches, dataset_size)
    )
    level = FALSE_ALARM / len(p_values)
    return tuple(Check(name, min(1.0, float(p)), level) for name, p in p_values.items())


def _participations(batches: Sequence[np.ndarray], canaries: int) -> np.ndarray:
    """Return (canaries, steps) float64: how often each canary is in each batch."""
    joined = np.zeros((canaries, len(batches)))
    for step, members in enumerate(batches):
        np.add.at(joined[:, step], members[members < canaries], 1.0)
    return joined


def _noise(noise: np.ndarray, rounding: float) -> dict[str, float]:
    """P-values of (coordinates, steps) noise that should be independent standard normals."""
    pairs_of_steps, distances_of_steps = _repeated(noise.T, rounding)
    pairs, distances = _repeated(noise, rounding)
    return {
        "noise: variance": _energy(noise.reshape(1, -1), rounding),
        "noise: variance at each step": _energy(noise.T, rounding),
        "noise: normal distribution": _normality(noise, rounding),
        "noise: correlation of two steps": pairs_of_steps,
        "noise: correlation at each distance of steps": distances_of_steps,
        "noise: correlation of two coordinates": pairs,
        "noise: correlation at each distance of coordinates": distances,
    }


def _energy(rows: np.ndarray, rounding: float) -> float:
    """Two-sided, by the chi-square distribution of each row's squared norm; as many tests as rows."""
    norms, slack = np.linalg.norm(rows, axis=1), rounding * math.sqrt(rows.shape[1])
    above = scipy.stats.chi2.sf(np.maximum(norms - slack, 0) ** 2, rows.shape[1])
    below = scipy.stats.chi2.cdf((norms + slack) ** 2, rows.shape[1])
    return 2 * len(rows) * float(np.minimum(above, below).min())


def _normality(noise: np.ndarray, rounding: float) -> float:
    """By the Dvoretzky-Kiefer-Wolfowitz inequality with Massart's constant."""
    exact = scipy.special.ndtr(np.sort(noise, axis=None))
    steps = np.arange(noise.size + 1) / noise.size
    distance = max((steps[1:] - exact).max(), (exact - steps[:-1]).max())
    # A shift of all values by `rounding` moves the distribution function by at most its density's maximum.
    distance = max(0.0, distance - rounding / math.sqrt(2 * math.pi))
    return 2 * math.exp(-2 * noise.size * distance**2)


def _repeated(rows: np.ndarray, rounding: float) -> tuple[float, float]:
    """Return p-values of the largest correlation of two rows, and of sums of those at the same distance.

    A row's inner product with the direction of an earlier one is standard normal, independent at one
    distance.
    """
    number, size = rows.shape
    if number < 2:
        return 1.0, 1.0
    directions = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
    largest, sums = 0.0, np.zeros(number)
    for start in range(0, number - 1, _AT_A_TIME):
        scores = directions[start : start + _AT_A_TIME] @ rows[start:].T
        for at, row in enumerate(scores):
            later = row[at + 1 :]
            sums[1 : 1 + len(later)] += later
            largest = max(largest, np.abs(later).max(initial=0.0))
    counts = np.arange(number - 1, 0, -1)
    slack = rounding * math.sqrt(size)
    pairs = _normal(np.array([largest]), slack) * number * (number - 1) / 2
    distances = _normal(sums[1:] / np.sqrt(counts), slack * np.sqrt(counts)) * (number - 1)
    return float(pairs.min()), float(distances.min())


def _normal(scores: np.ndarray, slack) -> np.ndarray:
    """Two-sided p-values of standard normals that rounding moves by at most `slack`."""
    return 2 * scipy.special.ndtr(-np.maximum(np.abs(scores) - slack, 0.0))


def _canary(mechanism, residual, joined, batches, expected, rounding) -> dict[str, float]:
    """P-values of what canaries add beyond their amplitude, along their participations.

    Given the batches, the inner product of the noise with any direction is normal.
    """
    column = mechanism.strategy.array[: joined.shape[1]]
    # C' times the residuals: their parts along each participation.
    along = joined * scipy.signal.lfilter(column, [1.0], residual[:, ::-1], axis=1)[:, ::-1]
    slack = rounding * math.sqrt(residual.size)

    def weighted(weights) -> float:
        length = np.linalg.norm(outputs(mechanism, joined * weights))
        return float(_normal(np.array((along @ weights).sum() / max(length, 1e-300)), slack))

    sizes = np.array([len(members) for members in batches])
    counts = np.square(joined).sum(axis=0)
    lengths = np.sqrt(counts * np.cumsum(np.pad(column**2, (0, len(counts) - len(column))))[::-1])
    each = _normal(along.sum(axis=0) / np.maximum(lengths, 1e-300), slack)
    return {
        "canary: amplitude": weighted(np.ones(len(sizes))),
        "canary: amplitude at each step": len(sizes) * float(each.min()),
        "canary: amplitude against batch size": weighted(sizes - expected),
    }


def _batches(scheme: Scheme, batches: Sequence[np.ndarray], dataset_size: int) -> dict[str, float]:
    """P-values of batch sizes and participations, for independent examples."""
    sizes = np.array([len(members) for members in batches])
    exact = scipy.stats.binom(dataset_size, np.clip(scheme.participation_probabilities(), 0, 1))
    tails = np.minimum(exact.cdf(sizes), exact.sf(sizes - 1))
    apart, last = True, np.full(dataset_size, -scheme.min_separation)
    for step, members in enumerate(batches):
        apart &= len(np.unique(members)) == len(members)
        apart &= bool((step - last[members] >= scheme.min_separation).all())
        last[members] = step
    return {
        "batches: size at each step": 2 * len(sizes) * float(tails.min()),
        "batches: participations in all": _total(scheme, int(sizes.sum()), dataset_size),
        "batches: separation of participations": float(apart),
    }


def _total(scheme: Scheme, total: int, dataset_size: int) -> float:
    """By Chernoff bounds on both sides."""
    exponents = dataset_size * _log_means(scheme) - _RATES * total
    return 2 * math.exp(min(0.0, float(exponents.min())))


@functools.lru_cache(maxsize=8)
def _log_means(scheme: Scheme) -> np.ndarray:
    """Log of the mean of e^(r participations): the likelihood ratio of log-ratios r at every step."""
    with jax.enable_x64(True):
        equal = jnp.broadcast_to(jnp.asarray(_RATES)[:, None], (len(_RATES), scheme.iterations))
        return np.asarray(jax.jit(scheme.log_likelihood_ratios)(equal))
