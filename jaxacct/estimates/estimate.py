"""Estimates of delta and epsilon: numbers with a confidence interval and no guarantee."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.accountants import Accountant, analytic, unamplified
from jaxacct.accountants.composition import event_profile
from jaxacct.common import validate as _validate
from jaxacct.common.progress import Progress
from jaxacct.estimates import interval
from jaxacct.kernels import randomness
from jaxacct.mechanisms.mechanism import Mechanism, check_composition, checked
from jaxacct.proposals import base
from jaxacct.proposals.base import Draws, Proposal
from jaxacct.proposals.candidates import choose_proposal, proposals_at
from jaxacct.statistics.composed import Composed
from jaxacct.statistics.hockey_stick import DIRECTIONS, Direction

_NUM_SAMPLES = 100_000
_MIN_NOISE_OF_ACCOUNTANTS = 0.05  # privacy loss distributions take minutes below this noise multiplier
# For a target delta, proposals are searched until one has a scale far below it.
_SMALLEST_DELTA = 1e-12
# Nominal delta of `estimate_delta`: a thousandth of it may be left out of a composed profile.
_COMPOSED_DELTA = 1e-9
# `estimate_epsilon` draws up to this many pilots, in streams of their own, until epsilon changes by less than
# a fiftieth.
_PILOTS, _PILOT_SAMPLES, _COARSE = 5, 2048, 0.02
# Proposals of a bound are for divergences below this; plain draws of the mechanism resolve larger ones.
_BOUNDED_BELOW = 1e-3


@dataclass(frozen=True)
class Estimate:
    """Estimate with a confidence interval; not a guarantee.

    Attributes:
      quantity: "delta" or "epsilon" (nats).
      value: the estimate, the larger of both directions.
      low: lower end of the confidence interval; 0 without a lower bound (users whose examples' likelihood is
        too large to compute, a strategy that is not banded, independent cuts), where the value is that of the
        upper bound.
      high: upper end of the confidence interval.
      confidence: its coverage.
      directions: the estimate of each direction that is drawn (`Mechanism.directions`).
      proposals: the proposal distribution of each direction.
      num_samples: per direction; 0 where an accountant computes the quantity without sampling; `proposals`
        then names it.
    """

    quantity: str
    value: float
    low: float
    high: float
    confidence: float
    directions: dict[str, float]
    proposals: dict[str, str]
    num_samples: int


def estimate_delta(
    mechanism: Mechanism,
    epsilon: float,
    *,
    num_samples: int | None = None,
    key=None,
    confidence: float = 0.95,
    proposal: str | None = None,
    compose_with=None,
    progress: Progress | None = None,
) -> Estimate:
    """Estimate delta(epsilon), the larger hockey-stick divergence of both directions.

    Args:
      mechanism: the mechanism.
      epsilon: natural log, at least 0.
      num_samples: per direction, at least 1; 100,000 by default, or none where an accountant is exact up to
        its grid (Poisson sampling with C = I).
      key: JAX key; from the operating system by default.
      confidence: of the interval, in (0, 1); the interval is valid at any sample size (betting bounds).
      proposal: "plain" to draw from the mechanism itself; by default the proposal with the smallest scale.
      compose_with: a dp-accounting `DpEvent`, for delta of both together; low is then 0, as the event's own
        profile is an upper bound.
      progress: called with (what, samples done, samples expected).

    Returns:
      The estimate with its confidence interval; not a guarantee.

    Raises:
      ValueError: bad arguments, or an unknown proposal.
      NonFiniteLossError: a privacy loss was not finite.
    """
    check_composition(checked(mechanism), compose_with)
    grid = np.array([_validate.nonnegative_number("epsilon", epsilon)])

    def distributions(direction, composed):
        return [(best_proposal(mechanism, epsilon, direction, proposal, composed), grid)]

    options: dict[str, Any] = dict(num_samples=num_samples, confidence=confidence, compose_with=compose_with)
    options |= dict(key=key, progress=progress, is_drawn=proposal is not None)
    bands, names, num_samples = bands_at(mechanism, grid, distributions, **options)
    return _estimate("delta", bands, names, confidence, num_samples)


def bands_at(
    mechanism: Mechanism,
    grid: np.ndarray,
    distributions: Callable[[Direction, Composed | None], list],
    *,
    num_samples: int | None,
    confidence: float,
    compose_with,
    key,
    progress: Progress | None,
    is_drawn=False,
) -> tuple[dict[Direction, np.ndarray], dict[str, str], int]:
    """Return ((3, points) lower, estimate and upper divergence of each direction, names by it, samples).

    By an accountant that is exact up to its grid, if there is one and nothing else asks for draws. All
    intervals hold together with the confidence. `distributions` are the proposals of a direction with this
    composed mechanism, each with the points of the ascending grid that it serves. With a composed mechanism
    the upper ends hold for the add direction, too.
    """
    known, num_samples = known_or_samples(mechanism, num_samples, compose_with)
    q = (1 - _validate.open_probability("confidence", confidence)) / (len(grid) * len(mechanism.directions))
    if known is not None and not is_drawn:
        upper = np.array([known.bound_at(mechanism, epsilon, compose_with) for epsilon in grid.tolist()])
        upper = np.minimum.accumulate(upper)  # the divergence decreases in epsilon
        known_bands = dict.fromkeys(DIRECTIONS, np.stack([0 * upper, upper, upper]))
        return known_bands, dict.fromkeys(DIRECTIONS, known.name), 0
    composed, key = composition_of(compose_with), randomness.checked_key(key)
    draw = functools.partial(draw_samples, key=key, num_samples=num_samples, progress=progress)
    both: dict[Direction, np.ndarray] = {}
    names: dict[str, str] = {}
    for direction in mechanism.directions:
        parts = distributions(direction, composed)
        names[direction] = ", ".join(dict.fromkeys(chosen.name for chosen, _ in parts))
        bands = [_bands(chosen, points, q, draw, composed) for chosen, points in parts]
        both[direction] = np.concatenate(bands, axis=1)
    return both, names, num_samples


def known_or_samples(
    mechanism: Mechanism, num_samples: int | None, compose_with=None
) -> tuple[Accountant | None, int]:
    """Return the accountant in place of samples, if there is one, and the number of samples."""
    if num_samples is None:
        is_quick = mechanism.noise_multiplier >= _MIN_NOISE_OF_ACCOUNTANTS
        return analytic.exact(mechanism, None, compose_with) if is_quick else None, _NUM_SAMPLES
    return analytic.close(mechanism, compose_with=compose_with), _validate.positive_integer(
        "num_samples", num_samples
    )


def _bands(chosen: Proposal, grid: np.ndarray, q: float, draw, composed: Composed | None) -> np.ndarray:
    """Return (3, points) of one proposal: lower, estimate and upper."""
    if composed is None:
        return interval.bands_of_both(chosen, grid, draw, q)
    bands = interval.bands(interval.Drawn(chosen, draw(chosen), composed), grid, q)
    scheme, included = chosen.mechanism.scheme, chosen.left_out
    included -= 0.0 if chosen.profile is None else composed.left_out
    exchanged = np.array([composed.exchanged(float(epsilon), scheme) for epsilon in grid])
    bands[2] = np.minimum(1.0, bands[2] + np.maximum(exchanged - included, 0.0))
    bands[0] = 0.0  # its profile is an upper bound
    return bands


def _estimate(
    quantity: str, bands: dict, names: dict[str, str], confidence: float, num_samples: int
) -> Estimate:
    """Return the estimate of (3, 1) or (3,) lower, estimate and upper of each direction."""
    bands = {direction: np.ravel(band) for direction, band in bands.items()}
    low, value, high = map(float, np.max(list(bands.values()), axis=0))
    values = {direction: float(band[1]) for direction, band in bands.items()}
    return Estimate(quantity, value, low, high, confidence, values, names, num_samples)


def estimate_epsilon(
    mechanism: Mechanism,
    delta: float,
    *,
    num_samples: int | None = None,
    key=None,
    confidence: float = 0.95,
    compose_with=None,
    progress: Progress | None = None,
) -> Estimate:
    """Estimate the smallest epsilon with delta(epsilon) <= delta, both directions.

    The interval inverts that of `estimate_delta`, on samples of a proposal that small pilot runs make for an
    epsilon near the answer. It is valid at any sample size. Its upper end is at most the bound without
    samples (the scale of a proposal, or the participation pattern revealed; with a composed event the best
    accountant's); where the samples do not resolve delta, that bound is both the upper end and the value.

    Args:
      mechanism: the mechanism.
      delta: in (0, 1).
      num_samples: per direction, at least 1; 100,000 by default, or none where an accountant is exact up to
        its grid (Poisson sampling with C = I).
      key: JAX key; from the operating system by default.
      confidence: of the interval, in (0, 1).
      compose_with: a dp-accounting `DpEvent`, for epsilon of both together; low is then 0, as the event's own
        profile is an upper bound. `history.joined` makes one event of a list.
      progress: called with (what, samples done, samples expected).

    Returns:
      The estimate, in nats, with its confidence interval; not a guarantee.

    Raises:
      ValueError: bad arguments, or an event that cannot be composed.
      NonFiniteLossError: a privacy loss was not finite.
    """
    check_composition(checked(mechanism), compose_with)
    delta = _validate.open_probability("delta", delta)
    known, num_samples = known_or_samples(mechanism, num_samples, compose_with)
    risk = (1 - _validate.open_probability("confidence", confidence)) / len(mechanism.directions)
    if known is not None:
        most = unamplified.epsilon_at(mechanism, delta) if compose_with is None else _validate.MAX_EPSILON
        upper = min(most, analytic.epsilon_at(mechanism, delta, compose_with, most)[0])
        ends = dict.fromkeys(DIRECTIONS, np.array([0.0, upper, upper]))
        return _estimate("epsilon", ends, dict.fromkeys(ends, known.name), confidence, 0)
    key = randomness.checked_key(key)
    composed = composition_of(compose_with, delta)
    bound = math.inf if composed is None else analytic.epsilon_at(mechanism, delta, compose_with)[0]
    ends, names = {}, {}
    for direction in mechanism.directions:
        max_epsilon = proven_epsilon(mechanism, direction, delta) if composed is None else bound
        chosen, anchor = _distribution_near(mechanism, direction, delta, max_epsilon, key, composed)
        names[direction] = chosen.name
        drawn = interval.Drawn(chosen, draw_samples(chosen, key, num_samples, progress), composed)
        lower, side = None, interval.for_lower_ends(chosen) if composed is None else None
        if side is not None:
            same = side is chosen
            lower = drawn if same else interval.Drawn(side, draw_samples(side, key, num_samples, progress))
        low, high = interval.crossing(drawn, anchor, delta, risk, lower)
        is_resolved, high = high < math.inf, min(high, max_epsilon)
        value = interval.mean_crossing(drawn, delta) if is_resolved else high
        ends[direction] = np.array([min(low, high), min(max(value, low), high), high])
    return _estimate("epsilon", ends, names, confidence, num_samples)


@functools.lru_cache(maxsize=64)
def proven_epsilon(mechanism: Mechanism, direction: str, delta: float) -> float:
    """Return an epsilon at which one direction's divergence is at most `delta` without sampling; else inf.

    With the participation pattern revealed, or where the scale of a proposal is below `delta`.
    """
    most = unamplified.epsilon_at(mechanism, delta)

    def is_below(epsilon):
        chosen = _distribution_at(mechanism, epsilon, direction, delta)
        return math.exp(min(chosen.log_scale, 0.0)) + chosen.left_out <= delta

    if most == 0 or not is_below(most):
        return most
    return interval.last_true(lambda epsilon: not is_below(epsilon), 0.0, most, _COARSE)[1]


def _distribution_near(
    mechanism: Mechanism, direction: str, delta: float, most: float, key, composed: Composed | None
) -> tuple[Proposal, float]:
    """Return a proposal for this direction's answer, and its epsilon, somewhat below the answer.

    Small pilots find it: only the width of the interval depends on them.
    """
    anchor = 0.95 * most if most < math.inf else 1.0
    for pilot in range(_PILOTS):
        chosen = _distribution_at(mechanism, anchor, direction, delta, composed)
        pilot_key = randomness.stream_key(key, randomness.Stream.ESTIMATE_PILOT + pilot)
        drawn = interval.Drawn(chosen, draw_samples(chosen, pilot_key, _PILOT_SAMPLES), composed)
        before, anchor = anchor, min(interval.mean_crossing(drawn, 2 * delta), most)
        if abs(anchor - before) <= _COARSE * before:
            break
    return _distribution_at(mechanism, anchor, direction, delta, composed), anchor


def _distribution_at(
    mechanism: Mechanism, epsilon: float, direction: str, delta: float, composed: Composed | None = None
) -> Proposal:
    """Return the proposal with the smallest scale at `epsilon`, of those that resolve `delta`."""
    offered = proposals_at(mechanism, epsilon, direction, _samples_for(delta), composed=composed)
    # In logs: a scale may exceed float64.
    most = math.log(delta / 8) if delta / 8 > 0 else -math.inf
    resolving = [
        p for p in offered if p.total_variation <= 0 or p.log_scale + math.log(p.total_variation) <= most
    ]
    return min(resolving or offered[:1], key=_preferred)


def _samples_for(delta: float):
    """Return a cost function: samples that distinguish `delta` from 0; 0 where the scale is far below."""

    def samples_needed(proposal: Proposal) -> float:
        ratio = proposal.log_scale - math.log(delta)
        return 0.0 if ratio < -3 else 100 * math.exp(min(ratio, 100.0))

    return samples_needed


def composition_of(compose_with, delta: float = _COMPOSED_DELTA) -> Composed | None:
    """Return the composed mechanism for proposals that resolve `delta`; None for None."""
    return None if compose_with is None else Composed(event_profile(compose_with), delta)


def best_proposal(
    mechanism: Mechanism, epsilon: float, direction: str, name: str | None, composed: Composed | None
) -> Proposal:
    """Return the proposal called `name`, or the one with the smallest scale; for "remove" it must exist."""
    offered = proposals_at(mechanism, epsilon, direction, _samples_for(_SMALLEST_DELTA), composed=composed)
    exact = [p for p in offered if not p.of_a_bound or p.log_scale <= math.log(_BOUNDED_BELOW)]
    return choose_proposal(offered, direction, name, min(exact, key=_preferred))


def _preferred(proposal: Proposal):
    """Sort by scale and time; of equal ones plain draws come last."""
    return proposal.log_scale + math.log(proposal.cost), proposal.name == "plain"


def draw_samples(proposal: Proposal, key, num_samples: int, progress: Progress | None = None) -> Draws:
    """Return exactly `num_samples` draws of the proposal's direction."""
    stream, parts = base.direction_key(key, proposal.direction), []
    for draws in base.draw_in_batches(proposal, stream, 0, -(-num_samples // randomness.BLOCK_SIZE)):
        parts.append(draws)
        if progress:
            done = min(num_samples, sum(part.loss.size for part in parts))
            progress(f"estimate {proposal.direction}", done, num_samples)
    return Draws(*(np.concatenate(part)[:num_samples] for part in zip(*parts, strict=True)))
