"""Composition with another mechanism, given as a dp-accounting event.

For independent mechanisms with pairs (P1, Q1) and (P2, Q2),
`H(P1 x P2, Q1 x Q2) = E_{P1}[ g2(epsilon - L1) ]`, `g2` being the privacy profile of the second at `e^t`.
So composing replaces the term `(1 - e^t)_+` by a tabulated profile, and everything else is unchanged.

Events only name the composed steps: their losses are composed by `statistics.composed_losses`, since
dp-accounting does not bound the rounding of its transforms (proofs/errata.md). It takes half a second to
import, and most plans compose with no event: it is imported where used.
"""

import functools
import json
import math
from typing import TypeAlias

import numpy as np

from jaxacct.accountants import event_pairs
from jaxacct.common import validate as _validate
from jaxacct.statistics.composed import TabulatedProfile
from jaxacct.statistics.composed_losses import Part, divergence_bound, divergence_table, min_epsilon
from jaxacct.statistics.gaussian_mixtures import OfGaussians, both_directions_of_mixture, sampled_gaussian
from jaxacct.statistics.loss_curves import ChordCurve, dominating_curves
from jaxacct.statistics.tilted_sums import UNIT

# Points of the tabulated profile, natural log: dense near zero, out to +-60.
_GRID = 60 * np.sinh(np.linspace(-8, 8, 1601)) / np.sinh(8)
_POSITIVE = _GRID[_GRID.size // 2 :]
_REVEALED = (event_pairs.REVEALED, event_pairs.REVEALED)
_MAX_LOSS = 500.0  # of a distribution of dp-accounting: its exponential is finite
_PLD_INTERVAL, _MAX_PLD_POINTS = 1e-3, 2**17
_MIN_PLD_NOISE = 0.03
_MIN_MIXED_NOISE, _MAX_MIXED_NOISE = 1e-4, 1e6  # over the largest sensitivity

Steps: TypeAlias = tuple[tuple[tuple[ChordCurve, ChordCurve], int], ...]  # ((remove, add), count) of each


def composed_delta(steps: Steps, epsilon: float, compose_with=None) -> float:
    """Return an upper bound on delta(epsilon) of all steps and the event together, both directions.

    Cached, as a plan computes its bound again.
    """
    return _composed(steps, epsilon, None if compose_with is None else _key(compose_with))


def composed_epsilon(steps: Steps, delta: float) -> float:
    """Return an upper bound on epsilon at `delta`, as `composed_delta`; infinite where none is found."""
    return min_epsilon(functools.partial(composed_delta, steps), delta, _validate.MAX_EPSILON)


@functools.lru_cache(maxsize=64)
def _composed(steps: Steps, epsilon: float, event: str | None) -> float:
    return max(divergence_bound(parts, epsilon) for parts in _by_direction(steps + _steps_of(event)))


def event_profile(event) -> TabulatedProfile:
    """Return an upper bound on the privacy profile of a `DpEvent`, both directions at once.

    A function of float64 `t` (any shape) that returns `delta(t)`: the larger of the two directions'
    hockey-stick divergences at `e^t`, interpolated in `e^t`, in which it is convex, so an upper bound.
    ValueError for an event without a loss curve here.
    """
    return _tabulate(_key(event))


def _key(event) -> str:
    """Return an event as text, the key of tables and bounds."""
    from dp_accounting import dp_event

    if not isinstance(event, dp_event.DpEvent):
        raise ValueError(f"compose_with must be an event of dp-accounting, got {event!r}")
    return json.dumps(event_to_json(event))


@functools.lru_cache(maxsize=8)
def _tabulate(event: str) -> TabulatedProfile:
    positive, steps = _POSITIVE, _steps_of(event)
    tables = [divergence_table(parts, positive) for parts in _by_direction(steps)]
    found = np.maximum.reduce(tables)
    # H(P, Q) at -t is 1 - e^-t (1 - H(Q, P) at t).
    negative = np.minimum(1.0, -np.expm1(-positive) + np.exp(-positive) * found + 4 * UNIT)
    values = np.concatenate([negative[:0:-1], found])
    return TabulatedProfile(_GRID, np.minimum.accumulate(values), _are_of_gaussians(steps))


def _by_direction(steps: Steps) -> list[list[Part]]:
    """Return the parts of the remove and the add direction; the former alone where it is the larger one."""
    directions = [[Part(curves[side], count) for curves, count in steps] for side in (0, 1)]
    return directions[:1] if directions[0] == directions[1] or _are_of_gaussians(steps) else directions


def _are_of_gaussians(steps: Steps) -> bool:
    """Return whether Q of all steps is one Gaussian and P a mixture of others of its width.

    The add direction is then at most the remove direction (proofs/add_direction.md, theorem 1).
    """
    return all(isinstance(remove, OfGaussians) for (remove, _), _ in steps)


# -- Events ---------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _steps_of(event: str | None) -> Steps:
    if event is None:
        return ()
    return steps_of(event_from_json(json.loads(event)))


def steps_of(event, name: str = "compose_with") -> Steps:
    """Return the steps of a `DpEvent`; ValueError for one without a dominating pair here."""
    try:
        return tuple(_steps(event, 1))
    except (TypeError, ArithmeticError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"{name} must be an event that can be composed, got {event!r}: {error}") from None


def _steps(event, count: int) -> list:
    """Return the steps of an event that occurs `count` times; ValueError for another kind of event."""
    from dp_accounting import dp_event

    match event:
        case dp_event.NoOpDpEvent():
            return []
        case dp_event.NonPrivateDpEvent():
            return [(_REVEALED, count)]
        case dp_event.SelfComposedDpEvent():
            times = _validate.positive_integer("count", event.count, minimum=0)
            return _steps(event.event, count * times) if times else []
        case dp_event.ComposedDpEvent():
            return [step for one in event.events for step in _steps(one, count)]
        case dp_event.PoissonSampledDpEvent():
            q = event.sampling_probability
            return [] if q == 0 else _sampled(event.event, _validate.probability("probability", q), count)
        case dp_event.GaussianDpEvent():
            return _gaussian(event.noise_multiplier, count)
        case dp_event.SingleEpochTreeAggregationDpEvent():
            # A record is in one node of each level of one tree.
            levels = max(
                _validate.positive_integer("step_counts", n) for n in np.atleast_1d(event.step_counts)
            )
            return _gaussian(event.noise_multiplier, levels.bit_length() * count)
        case dp_event.LaplaceDpEvent():
            return _unsampled(event_pairs.laplace, event.noise_multiplier, count)
        case dp_event.DiscreteLaplaceDpEvent():
            shift = _validate.positive_integer("sensitivity", event.sensitivity)
            return _unsampled(lambda a: event_pairs.discrete_laplace(a, shift), event.noise_parameter, count)
        case dp_event.RepeatAndSelectDpEvent():
            return [(_selected(event), count)]
        case dp_event.MixtureOfGaussiansDpEvent():
            return _mixed(event, count)
        case dp_event.TruncatedSubsampledGaussianDpEvent():
            return _by_dp_accounting(event, count)
    return event_pairs.steps_of(event, count)


def _gaussian(noise, count: int) -> list:
    """Return the one step of many Gaussians."""
    return [
        (curves, 1) for curves, _ in _unsampled(lambda n: sampled_gaussian(n / math.sqrt(count)), noise, 1)
    ]


def _unsampled(curves, noise, count: int) -> list:
    if _validate.nonnegative_number("noise", noise) == 0:
        return [(_REVEALED, count)]
    return [(curves(noise), count)]


def _mixed(event, count: int) -> list:
    """Return the step of a mixture of Gaussians."""
    means = [_validate.nonnegative_number("sensitivities", mean) for mean in event.sensitivities]
    noise, largest = event.standard_deviation, max(means, default=0.0)
    if largest == 0:
        return []
    if noise == 0:
        return [(_REVEALED, count)]
    if (
        not _MIN_MIXED_NOISE
        <= _validate.positive_number("standard_deviation", noise) / largest
        <= _MAX_MIXED_NOISE
    ):
        allowed = f"{_MIN_MIXED_NOISE * largest:g} to {_MAX_MIXED_NOISE * largest:g}"
        raise ValueError(f"standard_deviation must be in {allowed} for these sensitivities, got {noise!r}")
    return [(both_directions_of_mixture(float(noise), tuple(means), tuple(event.sampling_probs)), count)]


def _sampled(event, q: float, count: int) -> list:
    """Return the step of an event on a Poisson sample (proofs/events.md, section 2)."""
    inner = _steps(event, 1)
    if not inner or _REVEALED in [curves for curves, _ in inner]:
        return [(_REVEALED, count)] if inner else []
    (remove, add), times = inner[0]
    if len(inner) > 1 or times > 1:
        parts = ([Part(curves[side], times) for curves, times in inner] for side in (0, 1))
        remove, add = dominating_curves(*((_POSITIVE, divergence_table(one, _POSITIVE)) for one in parts))
    if isinstance(remove, OfGaussians) and remove.sigma is not None:
        return [(sampled_gaussian(remove.sigma, q), count)]
    return [((remove.sampled(q, True), add.sampled(q, False)), count)]


def _selected(event) -> tuple[ChordCurve, ChordCurve]:
    """Return the curves of the best of a random number of runs, each with a largest loss (section 4)."""
    shape = event.shape
    if not (shape == math.inf or _validate.nonnegative_number("shape", shape) >= 0):
        raise ValueError(f"shape must be at least 0, got {shape!r}")
    mean = _validate.positive_number("mean", event.mean)
    largest = math.fsum(count * _max_loss(curves) for curves, count in _steps(event.event, 1))
    if largest == math.inf:
        raise ValueError("only runs with pure differential privacy have a dominating pair here")
    factor = mean * math.tanh(largest / 2) + largest if shape == math.inf else (2 + shape) * largest
    return event_pairs.pure(factor * (1 + 8 * UNIT))


def _max_loss(curves: tuple[ChordCurve, ChordCurve]) -> float:
    """Return an upper bound on both directions' losses, infinite where none is known."""
    return max(float(curve.losses[-1]) if curve.heights[-1] == 0 else math.inf for curve in curves)


def _by_dp_accounting(event, count: int) -> list:
    """Return one step by dp-accounting's distribution, which is not composed there."""
    from dp_accounting import pld

    if event.noise_multiplier == 0:
        return [(_REVEALED, count)]
    if not _validate.positive_number("noise_multiplier", event.noise_multiplier) >= _MIN_PLD_NOISE:
        # Its distribution of losses would take minutes and gigabytes.
        raise ValueError(
            f"noise_multiplier must be at least {_MIN_PLD_NOISE}, got {event.noise_multiplier!r}"
        )
    for name in ("dataset_size", "truncated_batch_size"):
        _validate.positive_integer(name, getattr(event, name))
    found = pld.privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
        event.dataset_size,
        event.sampling_probability,
        event.truncated_batch_size,
        event.noise_multiplier,
        value_discretization_interval=_PLD_INTERVAL,
    )
    curve = curve_of_pld(found, _PLD_INTERVAL)
    return [((curve, curve), count)]


def curve_of_pld(pld, interval: float, grid: float | None = None) -> ChordCurve:
    """Return an upper bound on both directions of a dp-accounting distribution, with rounding of its sums.

    Args:
      pld: `dp_accounting.pld.privacy_loss_distribution.PrivacyLossDistribution`, pessimistic;
        rounding inside its own composition is not covered.
      interval: its `value_discretization_interval`.
      grid: all losses of the curve are multiples of this, `interval` by default.
    """
    grid = interval if grid is None else grid
    end = 1.0
    while end < _MAX_LOSS and not pld.get_delta_for_epsilon(end) <= pld.get_delta_for_epsilon(2 * end):
        end *= 2
    thin = math.ceil(2 * end / grid / _MAX_PLD_POINTS)
    points, masses = math.ceil(end / grid / thin), max(1.0, thin * (grid / interval))
    losses = grid * thin * np.arange(-points, points + 1)
    deltas = np.clip(np.asarray(pld.get_delta_for_epsilon(losses.tolist()), np.float64), 0.0, 1.0)
    # Masses are second differences of deltas over the interval, and deltas again their sums.
    tails = np.cumsum(deltas[::-1])[::-1] * masses
    before = np.append(1.0, deltas[:-1]) / -np.expm1(-grid * thin)
    error = 16 * UNIT / interval * tails + 4 * losses.size * masses * UNIT * np.minimum(1.0, before)
    return ChordCurve.below(losses, np.minimum.accumulate(np.minimum(1.0, deltas + error)))


def event_to_json(event) -> dict | None:
    """Return a `DpEvent` as JSON values by its fields, None for None; ValueError for other values."""
    if event is None:
        return None
    import attrs

    fields = {field.name: _value_to_json(getattr(event, field.name)) for field in attrs.fields(type(event))}
    return {"kind": type(event).__name__, **fields}


def event_from_json(data: dict | None):
    """Return the inverse of `event_to_json`; ValueError for an unknown event or fields."""
    if data is None:
        return None
    from dp_accounting import dp_event

    fields = dict(data)
    kind = getattr(dp_event, str(fields.pop("kind", None)), None)
    if not (isinstance(kind, type) and issubclass(kind, dp_event.DpEvent)):
        raise ValueError(f"compose_with must be an event of dp-accounting, got {data.get('kind')!r}")
    try:
        return kind(**{name: _value_from_json(value) for name, value in fields.items()})
    except TypeError as error:
        raise ValueError(f"compose_with {data['kind']} has wrong fields: {error}") from None


def _value_to_json(value):
    from dp_accounting import dp_event

    if isinstance(value, dp_event.DpEvent):
        return event_to_json(value)
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_value_to_json(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"compose_with holds a {type(value).__name__}, which cannot be written as JSON")


def _value_from_json(value):
    if isinstance(value, dict):
        return event_from_json(value)
    return [_value_from_json(item) for item in value] if isinstance(value, list) else value
