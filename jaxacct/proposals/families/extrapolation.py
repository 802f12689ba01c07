"""Add direction with many participations: certify a small H(Q, P) by concavity from two common events.

Where noise of size 0 already has L <= -epsilon, no half-space excludes it and no bound M is known. Write
`H(Q, P) = M_0 E X(zeta)`, `X = (1 - e^{epsilon - ln M_0} (f - P0))_+` in [0, 1] (`add_direction`). Pushing
the noise down, along a fixed non-negative direction, makes the event common, and

    G(t) = Phi^{-1}( E X(zeta - t d) )  is concave in t                       (proofs/add_direction.md,
    theorem 4; proofs/composition.md, theorem 3, where another mechanism is composed in).

So for 0 < t_1 < t_2 the line through t_2 and t_1 lies above G at 0: an upper confidence bound at t_1 and a
lower one at t_2 bound H(Q, P) with no further assumption, whatever its size. The price is looseness where G
bends, never validity.
"""

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
from jaxacct.proposals.base import Draws, Proposal, ProposalSpec, plain
from jaxacct.proposals.families.plain_bounded import least_exponent, log_remainder_scale
from jaxacct.statistics import bounds
from jaxacct.statistics.composed import Composed, ConcaveTerms
from jaxacct.statistics.hockey_stick import Direction, exponent, finite_margin, hockey_stick
from jaxacct.statistics.lines import BudgetLine, total

_PILOT_BLOCKS = 16
_LITTLE = 1e-12  # the delta_v that rare outputs are ruled out by
_PILOT_DISTANCES = (*map(float, np.arange(0.5, 8, 0.5)), *map(float, np.arange(8, 41, 2)))
PLANNED_SAMPLES = (100_000, 250_000)
"""At each distance, few first: guides for the choice of distances. More of them stand nearer to 0."""


@dataclass(frozen=True, eq=False)
class Extrapolation:
    """Two shifted distributions and the line through them.

    Attributes:
      near, far: distributions of the outputs under Q, pushed down by `near_distance < far_distance` standard
        deviations along C m. **Not** proposals for H(Q, P): their means are E X at two points of G.
      log_scale: ln M_0; 0 where another mechanism is composed in.
      log_expected: ln of the bound that the pilot expects after as many draws as it was planned for; a guess,
        to choose with.
      planned_samples: at each distance, of that plan; 0 where there was none.
      composed_terms: X of the exponent where another mechanism is composed in, else None.
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
        """What X leaves out of the composed profile, as a part of H(Q, P)."""
        return 0.0 if self.composed_terms is None else self.composed_terms.left_out

    def log_bound(self, near_upper: float, far_lower: float) -> float:
        """`log_bound` of this extrapolation's distances and scale, what is unseen taken for the worst."""
        near_upper, far_lower = near_upper + self.unseen, far_lower - self.unseen
        return log_bound(self.near_distance, self.far_distance, self.log_scale, near_upper, far_lower)

    def bound(self, near_upper: float, far_lower: float) -> float:
        """At least H(Q, P), from what is at least the mean at `near` and at most that at `far`."""
        return math.exp(self.log_bound(near_upper, far_lower)) + self.left_out

    def terms(self, draws: Draws, margin: float) -> np.ndarray:
        """X in [0, 1] of draws, float64: rounded up for `margin > 0`, down for `margin < 0`."""
        t = exponent(draws.loss, Direction.ADD, self.epsilon - margin)
        if self.composed_terms is not None:
            return self.composed_terms(t)
        return np.minimum(1.0, hockey_stick(t) * math.exp(-self.log_scale))


def log_bound(near: float, far: float, log_scale: float, near_upper: float, far_lower: float) -> float:
    """ln of the bound on H(Q, P) from bounds on the two means of X (proofs/derivations.md section 9, mended).

    Args:
      near, far: distances of the two distributions.
      log_scale: ln M_0.
      near_upper: at least E X at `near`.
      far_lower: at most E X at `far`.
    """
    if near_upper >= 1 or far_lower <= 0:
        return log_scale
    ratio = near / far
    at_zero = (ndtri(near_upper) - ratio * ndtri(min(far_lower, 1 - 1e-16))) / (1 - ratio)
    # The relative 1e-9 covers the two special functions and the ratio in float64.
    return log_scale + float(log_ndtr(at_zero + 1e-9 * (1 + abs(at_zero))))


def shifted(mechanism: Mechanism, log_scale: float, distance: float, guard: float) -> Proposal:
    """Q with its noise pushed down by `distance` standard deviations along C mu, mu the mean participation.

    `guard` changes the distance by a relative 2^-20, up for a mean that may only come out larger and down
    for one that may only come out smaller: that covers the rounding of the shift to float32.
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
    """Whether theorem 4 covers the mechanism: Q is one Gaussian, and losses are exact."""
    return mechanism.is_stationary and mechanism.scheme.side_information is None


def cheaper_extrapolation(
    mechanism: Mechanism,
    epsilon: float,
    delta_v: float,
    composed: Composed | None,
    samples_otherwise: float,
    key,
) -> "Extrapolation | None":
    """Return an extrapolation that is expected to certify delta_v from fewer samples than otherwise.

    The choice rests on pilot samples of `key` alone, so it is independent of the samples that certify.
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
    """The extrapolation through two given distances, 0 < near < far, in standard deviations.

    Raises:
      ValueError: for other distances, where H(Q, P) is exactly zero, or next to nothing of what is composed
        is left.
    """
    if not supports(mechanism):
        raise ValueError("extrapolation does not cover this scheme and strategy")
    _validate.nonnegative_number("epsilon", epsilon)
    log_scale, terms = _terms_of(mechanism, epsilon, composed)
    if not 0 < near < far < math.inf:
        raise ValueError(f"distances must be 0 < near < far, were {near!r} and {far!r}")
    if log_scale == -math.inf:
        raise ValueError("H(Q, P) is exactly zero for this epsilon: nothing to extrapolate")
    lines = shifted(mechanism, log_scale, near, 1.0), shifted(mechanism, log_scale, far, -1.0)
    return Extrapolation(epsilon, *lines, near, far, log_scale, composed_terms=terms)


def _terms_of(
    mechanism: Mechanism, epsilon: float, composed: Composed | None
) -> tuple[float, ConcaveTerms | None]:
    """(ln M_0, X of the exponent where another mechanism is composed in); -inf where there is no such X."""
    if composed is None:
        return log_remainder_scale(mechanism, epsilon), None
    terms = composed.concave_terms(least_exponent(mechanism, epsilon))
    return (-math.inf if terms is None else 0.0), terms


def plan_extrapolations(
    mechanism: Mechanism,
    epsilon: float,
    key,
    composed: Composed | None = None,
    numbers: tuple[int, ...] = PLANNED_SAMPLES,
) -> list[Extrapolation]:
    """For each number of draws the two distances with the smallest bound expected after them, from one pilot.

    None where the event does not become common within 40 standard deviations. The pilot, and the parabola
    drawn through it, only choose: the bound is valid for any distances that do not depend on the draws that
    are certified with.

    Args:
      numbers: samples that may be drawn at each distance.
    """
    log_scale, terms = _terms_of(mechanism, epsilon, composed)
    if log_scale == -math.inf:
        return []
    seen, heights = [], []
    for index, distance in enumerate(_PILOT_DISTANCES):
        guess = at_distances(mechanism, epsilon, distance, 2 * distance, composed)
        stream = randomness.stream_key(key, index)
        draws = base.draw_in_batches(guess.near, stream, 0, _PILOT_BLOCKS)
        mean = float(np.mean(np.concatenate([guess.terms(d, 0.0) for d in draws])))
        if 0.005 < mean < 0.98:
            seen.append(distance)
            heights.append(ndtri(mean))
        if len(seen) == 8 or (mean > 0.5 and len(seen) > 2):
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
    """Standard error of `Phi^{-1}` of a mean estimated from so many coin flips; nan where one is certain."""
    deviation = np.sqrt(ndtr(height) * ndtr(-np.asarray(height)) / samples)
    with np.errstate(over="ignore", invalid="ignore"):
        return deviation * math.sqrt(2 * math.pi) * np.exp(np.square(height) / 2)


def _expected(near: np.ndarray, far: np.ndarray, ratios: np.ndarray, samples: int) -> np.ndarray:
    """Phi^{-1} of the bounds expected from pairs of distances, with about six standard errors at either end.

    Args:
      near, far: Phi^{-1} of the means at both, (pairs,) each.
      ratios: of the distances, (pairs,).
    """
    mean = ndtr(near)
    # With q = 1e-9 even a mean of 0 is only seen to be below ln(1 / q) / n.
    near = ndtri(np.minimum(mean + (6 * np.sqrt(mean * samples) + 20) / samples, 0.999))
    reached = (near - ratios * (far - 6 * _height_error(far, samples))) / (1 - ratios)
    return np.where(np.isnan(reached), np.inf, reached)


def margin_of_line(extrapolation: Extrapolation) -> float:
    """Return what is reserved for float32 losses of both distributions, natural log."""
    return finite_margin(total(extrapolation.lines, "epsilon"))


def count_terms(extrapolation: Extrapolation, key, margin: float, first: int, last: int):
    """Histograms (near, far) of the blocks first..last-1: rounded up at the near point and down at the far
    one, each the safe way."""
    counts = []
    for index, (distribution, rounded) in enumerate(
        ((extrapolation.near, margin), (extrapolation.far, -margin)),
    ):
        stream = randomness.stream_key(key, index)
        counts.append(np.zeros(len(bounds.TERM_EDGES), np.int64))
        for draws in base.draw_in_batches(distribution, stream, first, last - first):
            counts[-1] += bounds.bin_terms(extrapolation.terms(draws, rounded))
    return counts
