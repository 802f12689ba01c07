"""Tempered pairs: half a replica more than one, for low noise (remove direction).

Where noise is so low that two replicas attract each other more than e^epsilon pays for, the best order of
the Renyi bound is below 2. `schemes.replicas.tempered` has a lower power: for s in (0, 1) and every
participation vector x some h(x, .) >= f_1^s, and draws of x and the output y from a law of density
`p(x) Q a_x h(x, .) / Z`. They have the weight `Z / h(x, y) <= Z f_1^-s`, so a term is at most

    Z c s^s (1 + s)^{-(1 + s)} e^{-s epsilon},   c = sup (f / f_1)^s, 1 for a cold start

(proofs/proposals.md, section 2.8). s is the one that makes this smallest, looked for before anything is
drawn.
"""

import functools
import math
import re
from collections.abc import Callable

import jax.numpy as jnp

from jaxacct.kernels import randomness, threefry
from jaxacct.likelihood import rounding
from jaxacct.likelihood.loss import loss_of_scores, lowered_norms
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import Draws, Proposal, plain
from jaxacct.proposals.replicas import log_scale, replica_candidates
from jaxacct.schemes.replicas import tempered
from jaxacct.statistics.direction import Direction
from jaxacct.strategies.stationary import adds_windows

_STEPS = 32  # powers that are looked at are multiples of one in so many
_MOST_OFF = 0.1  # relative, of the density of draws
_LOOKED_AT = 300.0  # numbers of a table that take as long as a sample, of all powers that are looked at
_TIMES = 2  # plain samples that take as long as one, about


def tempered_proposal(mechanism: Mechanism, steps: int, epsilon: float) -> Proposal:
    """A replica and the power `steps / 32` of another, with the scale at `epsilon` (natural log).

    Raises:
      ValueError: for a power that is not between 0 and 1, a mechanism that has none, or where Z overflows.
    """
    if not 0 < steps < _STEPS:
        raise ValueError(f"steps must be in 1..{_STEPS - 1}, was {steps}")
    power = steps / _STEPS
    found = _tempered(mechanism, power)
    if found is None:
        raise ValueError(
            "mechanism must have a Toeplitz matrix banded within a b-min-sep of p < 1, for a power"
        )
    cold, log_ahead = found
    log_z = tempered.log_normalizer(mechanism, power)
    if not math.isfinite(log_z):
        raise ValueError(f"the power {power:g} overflows at noise multiplier {mechanism.noise_multiplier:g}")
    relative_error, total_variation = tempered.errors(mechanism, power)

    def scale_at(other: float) -> float:
        return log_scale(log_z + log_ahead + 1e-9, 1 + power, other)

    def tables():
        return {"log_z": jnp.float32(log_z), "arrays": tempered.tables(mechanism, power)}

    def lines(delta_v):
        least = tempered.tempers(mechanism, power).log_coefficient
        log_p = math.log(cold.scheme.sums.probability)
        offset = max(abs(float(least.min()) - log_p), abs(float(least.max()) - log_p))
        return rounding.tempered_lines(mechanism, cold, float(delta_v), log_z, offset)

    return Proposal(
        name=f"a replica and the power {steps}/{_STEPS} of another",
        direction=Direction.REMOVE,
        mechanism=mechanism,
        log_scale=scale_at(epsilon),
        draw_block=_drawer(power),
        tables=tables,
        relative_error=relative_error,
        total_variation=total_variation,
        replicas=2,
        scale_at=scale_at,
        rounding_lines=lines,
        log_normalizer=log_z,
    )


def _tempered(mechanism: Mechanism, power: float) -> tuple[Mechanism, float] | None:
    """(the mechanism whose likelihood kernel has the power, ln c), None where there is none."""
    scheme, strategy = mechanism.scheme, mechanism.strategy
    # Few participations would be added as windows, for which another rounding is booked.
    if not (mechanism.is_stationary and tempered.fits(mechanism)) or adds_windows(scheme, strategy, 2):
        return None
    found = scheme.tempered(power)
    return None if found is None else (Mechanism(found[0], strategy, mechanism.noise_multiplier), found[1])


def tempered_candidates(
    mechanism: Mechanism, epsilon: float, samples_needed: Callable[[Proposal], float] | None = None
) -> list[Proposal]:
    """The one with the smallest scale, where neither plain draws nor other replicas are as cheap.

    Whole replicas are better where three of them are better than two, as scales are log-convex in the order.
    And no power has a scale below that of two replicas over their Z (proofs/proposals.md, section 2.8).
    """
    if _tempered(mechanism, 0.5) is None:
        return []
    best = math.inf
    if samples_needed is not None:
        ordinary = replica_candidates(mechanism, epsilon, samples_needed)
        best = min(map(samples_needed, [plain(mechanism, Direction.REMOVE), *ordinary]))
        scheme = mechanism.scheme
        looking = scheme.iterations * scheme.min_separation**2 / _LOOKED_AT
        if best <= looking or (len(ordinary) > 1 and ordinary[1].log_scale < ordinary[0].log_scale):
            return []
        if ordinary and ordinary[0].log_normalizer <= math.log(_TIMES):
            return []
    steps = _smallest(lambda steps: _log_scale(mechanism, steps, epsilon))
    if not steps or _log_scale(mechanism, steps, epsilon) >= 0:
        return []
    found = tempered_proposal(mechanism, steps, epsilon)
    return [found] if samples_needed is None or _TIMES * samples_needed(found) < best else []


def _log_scale(mechanism: Mechanism, steps: int, epsilon: float) -> float:
    """inf where Z overflows, or attraction is so strong that float32 tables do not tell outcomes apart."""
    power = steps / _STEPS
    log_z = tempered.log_normalizer(mechanism, power)
    drawn = math.isfinite(log_z) and tempered.errors(mechanism, power)[0] <= _MOST_OFF
    return log_scale(log_z, 1 + power, epsilon) if drawn else math.inf


def _smallest(scale: Callable[[int], float]) -> int:
    """Where a scale is smallest, 1.._STEPS - 1, by halving between neighbours; 0 where none is finite."""
    low, high = 1, _STEPS - 1
    while low < high:
        middle = (low + high) // 2
        one, next_ = scale(middle), scale(middle + 1)
        low, high = (low, middle) if one <= next_ or next_ == math.inf else (middle + 1, high)
    return low if math.isfinite(scale(low)) else 0


def tempered_called(mechanism: Mechanism, epsilon: float, name: str) -> Proposal | None:
    """The one of that name, None for a name of another kind; ValueError as `tempered_proposal`."""
    order = re.fullmatch(rf"a replica and the power ([0-9]{{1,2}})/{_STEPS} of another", name)
    return None if order is None else tempered_proposal(mechanism, int(order[1]), epsilon)


@functools.cache  # one function a power, so that nothing compiles twice
def _drawer(power: float) -> Callable[..., Draws]:
    def draw_block(key, scheme, strategy, sigma, tables, dtype) -> Draws:
        arrays = tables["arrays"]
        normals_key, pair_key = threefry.split(key)
        n, size = scheme.iterations, randomness.BLOCK_SIZE
        normals = strategy.draw_normals(normals_key, n, size, dtype)
        one, other = tempered.draw_pair(pair_key, scheme, arrays, size)
        kappa, log_coefficient = tempered.shifts(arrays, one)
        drawn = strategy.scores_from_normals(normals, n, sigma, (one + kappa * other).astype(dtype))
        loss = loss_of_scores(scheme, strategy, drawn, sigma)
        lowered = lowered_norms(scheme, strategy, Direction.REMOVE, dtype)
        log_ratios = (drawn - lowered) / jnp.asarray(sigma, dtype) ** 2
        cold, _ = scheme.tempered(power)
        log_ratios = kappa.astype(dtype) * log_ratios + log_coefficient.astype(dtype)
        log_h = cold.log_likelihood_ratios(log_ratios - math.log(cold.sampling_probability))
        return Draws(loss, tables["log_z"] - log_h)

    return draw_block
