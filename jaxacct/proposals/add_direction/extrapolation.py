"""Add direction with many participations: bound a small H(Q, P) by concavity, from two common events.

Where noise of size 0 already has L <= -epsilon, no half-space excludes it and no bound M is known. Write
`H(Q, P) = M_0 E X(zeta)`, `X = (1 - e^{epsilon - ln M_0} (f - P0))_+` in [0, 1] (`half_space`). A shift of
the noise along a fixed non-negative direction makes the event common, and

    G(t) = Phi^{-1}( E X(zeta - t d) )  is concave in t                       (proofs/add_direction.md,
    theorem 4; proofs/composition.md, theorem 3, with a composed mechanism).

So for 0 < t_1 < t_2 the line through t_2 and t_1 lies above G at 0: an upper confidence bound at t_1 and a
lower one at t_2 bound H(Q, P) without further assumptions, whatever its size. The cost is looseness where G
bends, never validity.
"""

import bisect
import dataclasses
import functools
import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri

from jaxacct.common import validate as _validate
from jaxacct.kernels import randomness
from jaxacct.likelihood import rounding
from jaxacct.likelihood.loss import loss_of_scores
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals import base
from jaxacct.proposals.add_direction.plain_bounded import log_remainder_scale, min_exponent
from jaxacct.proposals.base import Draws, Proposal, ProposalSpec, plain
from jaxacct.statistics import bounds
from jaxacct.statistics.composed import Composed, ConcaveTerms
from jaxacct.statistics.hockey_stick import Direction, exponent, finite_margin, hockey_stick
from jaxacct.statistics.lines import BudgetLine, total

_PILOT_BLOCKS, _MIN_MEAN = 16, 0.005
_LITTLE = 1e-12  # delta_v at which rare outputs are excluded
_PILOT_DISTANCES = (*map(float, np.arange(0.5, 8, 0.5)), *map(float, np.arange(8, 41, 2)))
PLANNED_SAMPLES = (100_000, 250_000)
"""Candidate numbers of samples at each distance: more samples allow nearer distances."""


@dataclass(frozen=True, eq=False)
class Extrapolation:
    """Two shifted distributions and the line through them.

    Attributes:
      near: distribution of the outputs under Q, shifted down by `near_distance` standard deviations along C
        m. **Not** a proposal for H(Q, P): its mean is E X at a point of G.
      far: the same at `far_distance`, above `near_distance`.
      log_scale: ln M_0; 0 with a composed mechanism.
      log_expected: ln of the expected bound after the planned number of samples, for the choice only.
      planned_samples: at each distance; 0 without a plan.
      composed_terms: X of the exponent with a composed mechanism, else None.
    """

    epsilon: float
    near: Proposal
    far: Proposal
    near_distance: float
    far_distance: float
    log_scale: float
    log_expected: float = math.inf
    planned_samples: int = 0
    composed_terms: ConcaveTerms | None = None

    @property
    def expected_samples(self) -> int:
        """Samples of both distributions: a plan has six standard errors at either end, so half suffices."""
        return self.planned_samples

    @functools.cached_property
    def lines(self) -> tuple[BudgetLine, ...]:
        """Reserves for the draws of both distributions; no delta is shared out, so almost none is spent."""
        return rounding.loss_lines(self.near.mechanism, _LITTLE, Direction.ADD, push=1.01 * self.far_distance)

    @property
    def unseen(self) -> float:
        """Probability, under either distribution, of outputs whose loss error may exceed the margin."""
        return total(self.lines, "total variation") + total(self.lines, "delta")

    @property
    def left_out(self) -> float:
        """Part of H(Q, P) that X leaves out of the composed profile."""
        return 0.0 if self.composed_terms is None else self.composed_terms.left_out

    def log_bound(self, near_upper: float, far_lower: float) -> float:
        """Return `log_bound` of these distances and this scale, with the worst case for unseen outputs."""
        near_upper, far_lower = near_upper + self.unseen, far_lower - self.unseen
        return log_bound(self.near_distance, self.far_distance, self.log_scale, near_upper, far_lower)

    def bound(self, near_upper: float, far_lower: float) -> float:
        """Return an upper bound on H(Q, P), from an upper bound at `near` and a lower bound at `far`."""
        return math.exp(self.log_bound(near_upper, far_lower)) + self.left_out

    def terms(self, draws: Draws, margin: float) -> np.ndarray:
        """Return X in [0, 1] of samples, float64: rounded up for `margin > 0`, down for `margin < 0`."""
        t = exponent(draws.loss, Direction.ADD, self.epsilon - margin)
        if self.composed_terms is not None:
            return self.composed_terms(t)
        return np.minimum(1.0, hockey_stick(t) * math.exp(-self.log_scale))


def log_bound(near: float, far: float, log_scale: float, near_upper: float, far_lower: float) -> float:
    """Return ln of the bound on H(Q, P) from bounds on both means of X (proofs/add_direction.md, section 4).

    The mean is at most `near_upper` at the distance `near`, and at least `far_lower` at `far`.
    """
    if near_upper >= 1 or far_lower <= 0:
        return log_scale
    ratio = near / far
    at_zero = (ndtri(near_upper) - ratio * ndtri(min(far_lower, 1 - 1e-16))) / (1 - ratio)
    # The relative 1e-9 covers the two special functions and the ratio in float64.
    return log_scale + float(log_ndtr(at_zero + 1e-9 * (1 + abs(at_zero))))


def shifted(mechanism: Mechanism, log_scale: float, distance: float, guard: float) -> Proposal:
    """Return Q with its noise shifted down by `distance` standard deviations along C mu.

    mu is the mean participation. `guard` changes the distance by a relative 2^-20, up where the mean must not
    be underestimated and down where it must not be overestimated: that covers the rounding of the shift to
    float32.
    """
    weights = mechanism.scheme.participation_probabilities()
    signal = mechanism.strategy.gram(weights)
    along = signal / math.sqrt(weights @ signal)
    tables = {"shift": jnp.asarray((1 + guard * 2.0**-20) * distance * along, jnp.float32)}
    return dataclasses.replace(
        plain(mechanism, Direction.ADD),
        spec=ProposalSpec("shifted", ()),
        log_scale=log_scale,
        draw_block=_shifted,
        tables=lambda: tables,
    )


def _shifted(key, scheme, strategy, sigma, tables, dtype) -> Draws:
    noise = strategy.noise_scores(key, scheme.iterations, randomness.BLOCK_SIZE, dtype)
    pushed = sigma * (noise - tables["shift"].astype(dtype)[None])
    loss = loss_of_scores(scheme, strategy, pushed, sigma, Direction.ADD)
    return Draws(loss, jnp.zeros_like(loss))


def supports(mechanism: Mechanism) -> bool:
    """Return whether theorem 4 covers the mechanism: Q is one Gaussian, and losses are exact."""
    is_gaussian = mechanism.scheme.side_information is None and not mechanism.is_replace_one
    return mechanism.is_stationary and is_gaussian


def cheaper_extrapolation(
    mechanism: Mechanism,
    epsilon: float,
    delta_v: float,
    composed: Composed | None,
    samples_otherwise: float,
    key,
) -> "Extrapolation | None":
    """Return an extrapolation that is expected to certify delta_v from fewer samples than other proposals.

    The choice depends on pilot samples of `key` alone, so it is independent of the samples that certify.
    """
    numbers = tuple(samples for samples in PLANNED_SAMPLES if 2 * samples < samples_otherwise)
    if not numbers or not supports(mechanism):
        return None
    for planned in plan_extrapolations(mechanism, epsilon, key, composed, numbers):
        if planned.log_expected < math.log(delta_v):
            return planned
    return None


def at_distances(
    mechanism: Mechanism, epsilon: float, near: float, far: float, composed: Composed | None = None
) -> Extrapolation:
    """Return the extrapolation through two given distances, 0 < near < far, in standard deviations.

    ValueError for other distances, where H(Q, P) is exactly zero, and where almost nothing is left of the
    composed profile.
    """
    if not supports(mechanism):
        raise ValueError("extrapolation does not cover this scheme and strategy")
    _validate.epsilon(epsilon)
    log_scale, terms = _terms_of(mechanism, epsilon, composed)
    if not 0 < near < far < math.inf:
        raise ValueError(f"distances must be 0 < near < far, got {near!r} and {far!r}")
    if log_scale == -math.inf:
        raise ValueError("H(Q, P) is exactly zero for this epsilon: nothing to extrapolate")
    lines = shifted(mechanism, log_scale, near, 1.0), shifted(mechanism, log_scale, far, -1.0)
    return Extrapolation(epsilon, *lines, near, far, log_scale, composed_terms=terms)


def _terms_of(
    mechanism: Mechanism, epsilon: float, composed: Composed | None
) -> tuple[float, ConcaveTerms | None]:
    """Return (ln M_0, X of the exponent with a composed mechanism); -inf where there is no such X."""
    if composed is None:
        return log_remainder_scale(mechanism, epsilon), None
    terms = composed.concave_terms(min_exponent(mechanism, epsilon))
    return (-math.inf if terms is None else 0.0), terms


def plan_extrapolations(
    mechanism: Mechanism,
    epsilon: float,
    key,
    composed: Composed | None = None,
    numbers: tuple[int, ...] = PLANNED_SAMPLES,
) -> list[Extrapolation]:
    """Return, for each number of samples, the two distances with the smallest expected bound, from one pilot.

    Empty where the event is not common within 40 standard deviations. The pilot, with the key `key`, and the
    parabola fitted to it only choose: the bound is valid for any distances that are independent of the
    samples that certify.
    """
    log_scale, terms = _terms_of(mechanism, epsilon, composed)
    if log_scale == -math.inf:
        return []

    @functools.cache
    def mean(index: int) -> float:
        distance = _PILOT_DISTANCES[index]
        guess = at_distances(mechanism, epsilon, distance, 2 * distance, composed)
        stream = randomness.stream_key(key, index)
        draws = base.draw_in_batches(guess.near, stream, 0, _PILOT_BLOCKS)
        return float(np.mean(np.concatenate([guess.terms(d, 0.0) for d in draws])))

    seen, heights, places = [], [], range(len(_PILOT_DISTANCES))
    # The mean grows with the distance.
    for index in places[bisect.bisect_left(places, True, key=lambda index: mean(index) > _MIN_MEAN) :]:
        if _MIN_MEAN < mean(index) < 0.98:
            seen.append(_PILOT_DISTANCES[index])
            heights.append(ndtri(mean(index)))
        if len(seen) == 8 or (mean(index) > 0.5 and len(seen) > 2):
            break
    if len(seen) < 3:
        return []
    found = []
    for samples in numbers:
        precisions = [1 / _height_error(height, samples) for height in heights]
        curve = np.polynomial.Polynomial.fit(seen, heights, 2, w=precisions)
        grid = np.linspace(seen[-1] / 60, seen[-1], 60)
        found_at = curve(grid)
        near, far = np.triu_indices(grid.size, 1)
        common = (-4 < found_at[near]) & (found_at[near] < found_at[far])
        near, far = near[common], far[common]
        if not near.size:
            continue
        reached = _expected(found_at[near], found_at[far], grid[near] / grid[far], samples)
        best = int(np.argmin(reached))
        chosen = at_distances(mechanism, epsilon, float(grid[near[best]]), float(grid[far[best]]), composed)
        expected = log_scale + float(log_ndtr(reached[best]))
        if terms is not None:
            expected = float(np.logaddexp(expected, math.log(terms.left_out)))
        found.append(dataclasses.replace(chosen, log_expected=expected, planned_samples=samples))
    return found


def _height_error(height, samples: int):
    """Return the standard error of `Phi^{-1}` of a mean of so many coin flips; NaN where it is 0 or 1."""
    deviation = np.sqrt(ndtr(height) * ndtr(-np.asarray(height)) / samples)
    with np.errstate(over="ignore", invalid="ignore"):
        return deviation * math.sqrt(2 * math.pi) * np.exp(np.square(height) / 2)


def _expected(near: np.ndarray, far: np.ndarray, ratios: np.ndarray, samples: int) -> np.ndarray:
    """Return Phi^{-1} of the expected bounds of pairs of distances, with six standard errors at either end.

    `near` and `far` are Phi^{-1} of the means and `ratios` those of the distances, (pairs,) each; `samples`
    are drawn at each distance.
    """
    mean = ndtr(near)
    # With q = 1e-9 even a sample mean of 0 only shows a mean below ln(1 / q) / n.
    near = ndtri(np.minimum(mean + (6 * np.sqrt(mean * samples) + 20) / samples, 0.999))
    reached = (near - ratios * (far - 6 * _height_error(far, samples))) / (1 - ratios)
    return np.where(np.isnan(reached), np.inf, reached)


def margin_of_line(extrapolation: Extrapolation) -> float:
    """Return the reserve for float32 losses of both distributions, in nats."""
    return finite_margin(total(extrapolation.lines, "epsilon"))


def count_terms(extrapolation: Extrapolation, key, margin: float, first: int, last: int):
    """Return histograms (near, far) of the blocks first..last-1: near rounded up, far rounded down."""
    counts = []
    for index, (distribution, rounded) in enumerate(
        ((extrapolation.near, margin), (extrapolation.far, -margin)),
    ):
        stream = randomness.stream_key(key, index)
        counts.append(np.zeros(len(bounds.TERM_EDGES), np.int64))
        for draws in base.draw_in_batches(distribution, stream, first, last - first):
            counts[-1] += bounds.bin_terms(extrapolation.terms(draws, rounded))
    return counts
