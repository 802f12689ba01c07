"""Curves of losses of pairs of Gaussian mixtures of one width.

The ratio of the two densities rises with the output, so the best events are half-lines, and an output that
ends one of them has a loss in closed form: no equation is solved (proofs/composed_losses.md, section 2).
"""

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from scipy import special

from jaxacct.statistics.loss_curves import TINY, ChordCurve
from jaxacct.statistics.tilted_sums import UNIT

# Standard deviations beyond which a Gaussian has less than 1e-300, and outputs around each mean, in them.
_REACH, _NODES = 38.0, 2**14
_PLACES = _REACH * np.sinh(np.linspace(-3.0, 3.0, _NODES)) / math.sinh(3.0)
_MAX_EXCESS = 1e-9  # of the sum of given weights over 1
_FEW = 1e-40


@dataclass(frozen=True)
class Mixture:
    """`sum_j weights_j N(shifts_j, 1)`.

    Attributes:
      shifts: (J,) ascending.
      weights: (J,) above 0.
      weight_error: bound on the relative error of each weight.
    """

    shifts: tuple[float, ...] = (0.0,)
    weights: tuple[float, ...] = (1.0,)
    weight_error: float = UNIT

    def beyond(self, z: np.ndarray, above: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the probabilities of outputs above z (or below), and bounds on their relative errors."""
        total, errors = np.zeros(z.size), np.zeros(z.size)
        for shift, weight in zip(self.shifts, self.weights, strict=True):
            inward = shift - z if above else z - shift
            far = np.clip(-inward, 0.0, _REACH)
            term = weight * special.ndtr(inward)
            total += term
            # Of the normal distribution function, measured, and of its argument.
            errors += term * (3 + far**2 + 2 * (abs(shift) + far) * (1 + far))
        errors = np.divide(errors, total, out=errors, where=total > 0)
        return total, (errors + len(self.weights) + 4) * UNIT + self.weight_error

    def log_beyond(self, z: np.ndarray, above: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return ln of `beyond`, which does not underflow, and bounds on the errors of its exponential."""
        logs = np.full(z.size, -np.inf)
        for shift, weight in zip(self.shifts, self.weights, strict=True):
            inward = shift - z if above else z - shift
            logs = np.logaddexp(logs, math.log(weight) + special.log_ndtr(inward))
        # Of the logarithm, measured, and of its argument.
        far = np.abs(z) + max(map(abs, self.shifts))
        sizes = 8 + 4 * np.abs(logs) + 2 * far * (1 + far) + len(self.weights)
        return logs, sizes * UNIT + self.weight_error

    def log_density(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ln of the density over that of N(0, 1), and bounds on its rounding."""
        total, sizes, top = np.zeros(z.size), np.zeros(z.size), np.full(z.size, -np.inf)
        for shift, weight in zip(self.shifts, self.weights, strict=True):
            log = math.log(weight)
            term = log + shift * (z - shift / 2)
            highest = np.maximum(top, term)
            old, new = np.exp(top - highest), np.exp(term - highest)
            size = 3 * abs(log) + 6 * shift**2 + 6 * abs(shift) * np.abs(z)
            total, sizes, top = total * old + new, sizes * old + size * new, highest
        log = top + np.log(total)
        rounding = (sizes / total + len(self.weights) + 8 + 2 * np.abs(log)) * UNIT
        return log, rounding + 2 * self.weight_error


@dataclass(frozen=True, eq=False)
class OfGaussians(ChordCurve):
    """Curve of a mixture against one Gaussian of its width.

    Attributes:
      sigma: where they are N(1, sigma^2) and N(0, sigma^2); None for other ones.
    """

    sigma: float | None = None


@np.errstate(over="ignore")
def _corners(p: Mixture, q: Mixture, remove: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return (losses, heights) of the curve of p against q, or of q against p; p is further up."""
    means = np.unique([*p.shifts, *q.shifts])
    if means.size > 3:
        means = np.linspace(means[0], means[-1], min(means.size, 8 + math.ceil(np.ptp(means))))
    z = np.unique(means[:, None] + (_PLACES if means.size <= 3 else _PLACES[::8]))
    (upper, first), (lower, second) = p.log_density(z), q.log_density(z)
    losses, rounding = upper - lower, first + second
    if not remove:
        losses, p, q = -losses, q, p
    losses = losses + rounding  # at least the true one: the event at z contains the best one at this loss
    tails, error = p.beyond(z, above=remove)
    logs, log_error = q.log_beyond(z, above=remove)
    error = error + log_error + (4 + np.abs(losses)) * UNIT
    # It is worse by the mass between the two, which is part of the tail, times their distance.
    error = error + np.expm1(np.minimum(2 * rounding, 700.0))
    heights = np.maximum(tails - np.exp(np.minimum(losses + logs, 0.0)), 0.0) + tails * error + TINY
    if not remove:
        losses, heights = losses[::-1], heights[::-1]
    losses = np.maximum.accumulate(losses)  # a corner further right is higher, too
    heights = np.minimum.accumulate(np.minimum(heights, 1.0))
    apart = np.append(np.diff(losses) > 1e-15 * (1e-3 + np.abs(losses[1:])), True)
    return losses[apart], heights[apart]


@functools.lru_cache(maxsize=64)
def sampled_gaussian(sigma: float, q: float = 1.0) -> tuple[ChordCurve, ChordCurve]:
    """Return (remove, add) of N(1, sigma^2), with probability q in (0, 1], and N(0, sigma^2)."""
    if q == 1:
        both = OfGaussians(*_corners(Mixture((1 / sigma,)), Mixture(), True), sigma)
        return both, both
    mixture = Mixture((0.0, 1 / sigma), (1 - q, q))
    return _both(mixture)


def _both(mixture: Mixture) -> tuple[ChordCurve, ChordCurve]:
    remove, add = (_corners(mixture, Mixture(), remove) for remove in (True, False))
    return OfGaussians(*remove), ChordCurve(*add)


@functools.lru_cache(maxsize=16)
def sampled_antipodal(sigma: float, q: float) -> ChordCurve:
    """Return the curve of replace-one: N(1, sigma^2) against N(-1, sigma^2) with probability q.

    Both are N(0, sigma^2) without (proofs/adjacency.md, section 3).
    """
    apart, weights = 1 / sigma, ((1 - q, q) if q < 1 else (1.0,))
    p, q_ = Mixture((0.0, apart)[-len(weights) :], weights), Mixture((0.0, -apart)[-len(weights) :], weights)
    return ChordCurve(*_corners(p, q_, True))


@functools.lru_cache(maxsize=16)
def both_directions_of_mixture(
    sigma: float, means: tuple[float, ...], weights: tuple[float, ...]
) -> tuple[ChordCurve, ChordCurve]:
    """Return (remove, add) of `sum_j weights_j N(means_j, sigma^2)` and N(0, sigma^2).

    Raises:
      ValueError: means that are no finite numbers of at least 0, or weights that are no probabilities.
    """
    joined: dict[float, float] = {}
    for mean, weight in zip(map(float, means), map(float, weights), strict=True):
        if not (0 <= mean < math.inf and 0 <= weight <= 1):
            raise ValueError(f"means must be at least 0 and weights in [0, 1], got {mean!r} and {weight!r}")
        if weight:
            joined[mean] = joined.get(mean, 0.0) + weight
    excess = abs(math.fsum(joined.values()) - 1)
    if not excess <= _MAX_EXCESS:
        raise ValueError(f"weights must add up to 1, got a sum that is {excess:.3g} off")
    error = excess + (1 + len(weights)) * UNIT
    places = sorted(joined)
    return _both(Mixture(tuple(mean / sigma for mean in places), tuple(joined[m] for m in places), error))


def binomial_curves(sigma: float, count: int, probability: float) -> tuple[ChordCurve, ChordCurve]:
    """Return (remove, add) of a step in which each of a unit's examples participates with a probability.

    Source: proofs/shared_examples.md, corollary of theorem 2.
    """
    return both_directions_of_mixture(sigma, *binomial(count, probability))


@functools.lru_cache(maxsize=16)
def binomial(count: int, probability: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return values and correctly rounded probabilities of a stochastically larger count.

    Counts of together less than `_FEW` are replaced: below the usual ones by the first of these, above by
    the largest.
    """
    share = Fraction(probability)
    join, idle, whole = share.numerator, share.denominator - share.numerator, share.denominator**count
    means, weights, waiting, above = [], [], 0, whole  # above: of this count or more
    for j in range(count + 1):
        if j < count and above / whole <= _FEW:
            return (*means, float(count)), (*weights, max((waiting + above) / whole, 1e-300))
        one = math.comb(count, j) * join**j * idle ** (count - j)
        mass = waiting + one
        if j == count or mass / whole > _FEW:
            means.append(float(j))
            weights.append(max(mass / whole, 1e-300))
            mass = 0
        waiting, above = mass, above - one
    return tuple(means), tuple(weights)
