"""Exact tests of noise, canaries and batches of the independent audit against the plan.

Where no example moves a coordinate, C times the releases is the mechanism's noise: independent standard
normals in units of its deviation, for each coordinate and step. Where a canary does, subtracting C times its
participations leaves the same. Both hold up to rounding, whose bound is subtracted from every statistic.
Batches are compared with the distribution of the plan's scheme. Proof that p-values are valid:
jaxacct/proofs/audits.md.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.schemes import Scheme

from .canaries import Observed, first_column, outputs

FALSE_ALARM = 1e-6
"""Probability that any check refutes an honest run; divided equally among the checks."""
_AT_A_TIME = 256
_RATES = np.concatenate([sign * np.geomspace(1e-5, 8, 64) for sign in (1, -1)])
"""Exponents of the Chernoff bound; each gives a valid bound, and the best of them is close to the optimum."""


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


def examine(
    mechanism: Mechanism, observed: Observed, canaries: int, dataset_size: int, amplitude: float
) -> tuple[Check, ...]:
    """Test a run in which the first `canaries` examples are canaries and all others are silent.

    Coordinates are observed in pairs; the first of each has the canary of the example of its number.
    `amplitude` is what one participation of a canary contributes, in clip norms.
    """
    present, silent = (observed.outputs[side::2] / mechanism.noise_multiplier for side in (0, 1))
    rounding = observed.rounding / mechanism.noise_multiplier
    joined = _participations(observed.batches, canaries)
    expected = mechanism.scheme.expected_batch_sizes(dataset_size)
    residual = present - outputs(mechanism, joined * (amplitude / mechanism.noise_multiplier))
    p_values = (
        _noise(silent, rounding)
        | _canary(mechanism, residual, joined, observed.batches, expected, rounding)
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
    column = first_column(mechanism)[: joined.shape[1]]
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
