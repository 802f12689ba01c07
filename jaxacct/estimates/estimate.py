"""Estimates of delta and epsilon: numbers with a confidence interval and no guarantee."""

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

from jaxacct import _validate
from jaxacct.accountants.composition import event_profile
from jaxacct.kernels import randomness
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals import sampling
from jaxacct.proposals.base import DIRECTIONS, Draws, Proposal
from jaxacct.proposals.candidates import candidates
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.bounds import Budget

# Only ranks proposals by scale; any small value gives the same order.
_RANKING = Budget.split(1e-9)


@dataclass(frozen=True)
class Estimate:
    """An estimate, not a guarantee.

    Attributes:
      quantity: "delta" or "epsilon" (natural log).
      value: the estimate, the larger of both directions.
      low, high: ends of the confidence interval.
      confidence: its coverage.
      directions: the estimate of each direction.
      proposals: the law each direction was drawn from.
      num_samples: draws a direction.
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
    num_samples: int = 100_000,
    key=None,
    confidence: float = 0.95,
    proposal: str | None = None,
    compose_with=None,
) -> Estimate:
    """Estimate delta(epsilon), the larger hockey-stick divergence of both directions.

    Args:
      mechanism: the mechanism.
      epsilon: natural log, at least 0.
      num_samples: draws a direction, at least 1.
      key: JAX key; from the operating system by default.
      confidence: of the interval, in (0, 1); the interval is valid at any sample size (betting bounds).
      proposal: "plain" to draw from the mechanism itself; by default the law with the smallest scale.
      compose_with: a dp-accounting `DpEvent` to compose with.
    """
    epsilon = _validate.nonnegative_number("epsilon", epsilon)
    num_samples = _validate.positive_integer("num_samples", num_samples)
    confidence = _validate.open_probability("confidence", confidence)
    key = randomness.fresh_key() if key is None else key
    profile = hockey_stick.hockey_stick if compose_with is None else event_profile(compose_with)
    values, lows, highs, names = {}, [], [], {}
    for direction in DIRECTIONS:
        chosen = best_proposal(mechanism, epsilon, direction, proposal, compose_with is not None)
        names[direction] = chosen.name
        scale = math.exp(chosen.log_scale)
        if scale == 0:
            values[direction] = 0.0
            continue
        counts = np.zeros(len(bounds.TERM_EDGES), np.int64)
        total = 0.0
        for draws in draw_samples(chosen, key, num_samples):
            weighted = hockey_stick.weighted_terms(draws, direction, epsilon, profile)
            total += math.fsum(weighted)
            counts += bounds.bin_terms(np.minimum(1.0, weighted / scale))
        values[direction] = total / num_samples
        low, high = bounds.mean_interval(counts, 1 - (1 - confidence) / 2)  # two directions share it
        lows.append(scale * low)
        highs.append(min(1.0, scale * high))
    value = max(values.values())
    return Estimate(
        quantity="delta",
        value=value,
        low=min(value, max(lows, default=0.0)),
        high=max(value, max(highs, default=0.0)),
        confidence=confidence,
        directions=values,
        proposals=names,
        num_samples=num_samples,
    )


def estimate_epsilon(
    mechanism: Mechanism,
    delta: float,
    *,
    num_samples: int = 100_000,
    key=None,
    confidence: float = 0.95,
) -> Estimate:
    """Estimate the smallest epsilon with delta(epsilon) <= delta, both directions.

    The interval solves `delta-hat(epsilon) +- z standard errors = delta`: asymptotic, for orientation.
    """
    delta = _validate.open_probability("delta", delta)
    num_samples = _validate.positive_integer("num_samples", num_samples)
    key = randomness.fresh_key() if key is None else key
    z = stats.norm.isf((1 - _validate.open_probability("confidence", confidence)) / 2)
    values, lows, highs, names = {}, [], [], {}
    guess = _guess_epsilon(mechanism, delta)
    for direction in DIRECTIONS:
        chosen = best_proposal(mechanism, guess, direction, None, False)
        if direction == "add":
            # A proposal of this direction serves its own epsilon only; plain draws serve them all.
            chosen = best_proposal(mechanism, guess, direction, "plain", False)
        names[direction] = chosen.name
        parts = list(draw_samples(chosen, key, num_samples))
        draws = Draws(*(np.concatenate(part) for part in zip(*parts, strict=True)))
        values[direction], low, high = (
            _solve_epsilon(draws, direction, delta, shift) for shift in (0.0, -z, z)
        )
        lows.append(low)
        highs.append(high)
    return Estimate(
        quantity="epsilon",
        value=max(values.values()),
        low=max(lows),
        high=max(highs),
        confidence=confidence,
        directions=values,
        proposals=names,
        num_samples=num_samples,
    )


def best_proposal(mechanism, epsilon, direction, name, composed) -> Proposal:
    """The proposal called `name`, or the one with the smallest scale; a name must exist for "remove"."""
    found = candidates(mechanism, epsilon, direction, _RANKING, composed=composed)
    if name is None:
        return min(found, key=lambda c: c.proposal.log_scale).proposal
    for candidate in found:
        if candidate.proposal.name == name:
            return candidate.proposal
    if direction == "add":
        return found[0].proposal
    allowed = ", ".join(c.proposal.name for c in found)
    raise ValueError(f"proposal must be one of {allowed}, was {name!r}")


def draw_samples(proposal: Proposal, key, num_samples: int):
    """Yield exactly `num_samples` draws of the proposal's direction, in batches."""
    stream = sampling.direction_key(key, proposal.direction)
    left = num_samples
    blocks = -(-num_samples // randomness.BLOCK_SIZE)
    for draws in sampling.draw_in_batches(proposal, stream, 0, blocks):
        yield Draws(*(part[:left] for part in draws))
        left -= len(draws.loss[:left])


def _solve_epsilon(draws: Draws, direction: str, delta: float, shift: float) -> float:
    def excess(epsilon):
        weighted = hockey_stick.weighted_terms(draws, direction, epsilon)
        error = weighted.std() / math.sqrt(weighted.size)
        return weighted.mean() + shift * error - delta

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-9))


def _guess_epsilon(mechanism: Mechanism, delta: float) -> float:
    """Where the remove direction's smallest scale is `delta`: the Renyi bound on epsilon, or 1."""

    def excess(epsilon):
        chosen = best_proposal(mechanism, epsilon, "remove", None, False)
        return chosen.log_scale - math.log(delta)

    low, high = 0.0, 1.0
    while excess(high) > 0:
        low, high = high, 2 * high
        if high > 1e4:
            return 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return 0.9 * high
