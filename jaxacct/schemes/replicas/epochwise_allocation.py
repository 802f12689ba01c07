"""Two replicas of epochwise allocation: exact weights epoch by epoch, exact draws.

With (s, s') the places of the two in one epoch, those of the next, (t, t'), have the weight

    K(s, t) K(s', t') (1 + a(s, t') + a(s', t)) X(t, t'),       1 + a(s, t') = E at the distance M - s + t',

X the attraction within the epoch times the weight of all later ones. Both a are above 0 for no pair of
places: C has at most b bands, and t would be both before and after t'. K depends on the first eligible place
alone, so that sums over t and t' are sums over suffixes, by which places are drawn
(proofs/fixed_counts.md, section 9).
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import epochs
from jaxacct.kernels.randomness import uniform_64
from jaxacct.schemes.replicas.base import (
    MIN_ENTRY,
    Attracting,
    drawn_together,
    fits_two,
    has_room,
    log_attractions,
    summary_of_two,
)

_MIN_LOG_SURVIVAL = -40.0  # of all places before the last ones, so that float32 has room


def table_bytes(mechanism: Attracting) -> float:
    """Return the bytes of the tables."""
    scheme = mechanism.scheme
    return 8.0 * scheme.max_participations * scheme.epoch_steps * (scheme.epoch_steps + scheme.min_separation)


def max_replicas(mechanism: Attracting) -> int:
    """Return 2 where the tables fit, columns b steps apart share no row and none repel; else 1."""
    M, b = mechanism.scheme.epoch_steps, mechanism.scheme.min_separation
    fits = fits_two(mechanism, table_bytes(mechanism))
    is_likely = (b - 1) * epochs.log_survival(M, b) >= _MIN_LOG_SURVIVAL
    return 2 if fits and is_likely and float(log_attractions(mechanism).min()) >= 0 else 1


def table_samples(mechanism: Attracting, m: int) -> float:
    """Return the number of samples drawn in the time of the tables: a number takes as long as a step."""
    del m
    return table_bytes(mechanism) / 8 / mechanism.scheme.iterations


def log_normalizer(mechanism: Attracting, m: int) -> float:
    """Ln Z_2, float64; inf where draws would be too inexact."""
    assert m == 2
    return _summary(mechanism)[0]


def errors(mechanism: Attracting, m: int) -> tuple[float, float]:
    """Return (relative, total variation) errors of the distribution that is drawn."""
    assert m == 2
    return _summary(mechanism)[1], 2.0**-39 * mechanism.scheme.max_participations


class _Epoch(NamedTuple):
    """Float64 tables of one epoch, all in one unit.

    Attributes:
      of_second: (M, M), sums of the weights of t from a place on, by that place and t'.
      of_first: (b, M), the same of t', by the first eligible place of t, without attraction between epochs.
      meeting: (c, c) of t' from a place on, attracted by a participation 1, 2, .. steps before the epoch.
      apart: (b, b), sums over all (t, t') without that attraction, by the first eligible places.
      met: (c, b), with that of t' alone, by the same steps and the first eligible place of t'.
    """

    of_second: np.ndarray
    of_first: np.ndarray
    meeting: np.ndarray
    apart: np.ndarray
    met: np.ndarray


@functools.lru_cache(maxsize=256)
def _summary(mechanism: Attracting) -> tuple[float, float]:
    """Return (ln Z_2, relative error of the drawn distribution)."""
    log_z, rarest, _ = _built(mechanism)
    return summary_of_two(log_z, rarest, 2 * mechanism.scheme.max_participations)


@functools.lru_cache(maxsize=1)
def _built(mechanism: Attracting) -> tuple[float, float, list[_Epoch]]:
    """Return (ln Z_2; the largest ratio of a sum over places to its first term; tables of the epochs).

    The ratio is inf where a number of the tables is out of range in the unit of its epoch.
    """
    scheme = mechanism.scheme
    M, b, count = scheme.epoch_steps, scheme.min_separation, scheme.max_participations
    log_attraction = log_attractions(mechanism)
    bands = mechanism.strategy.bands
    place = np.arange(M)
    later, lag = np.maximum.outer(place, place), np.abs(np.subtract.outer(place, place))
    # Participations before the epoch that may meet one of its first places: 1 .. c steps before it.
    corner = max(bands - 1, 1)
    before, early = np.arange(1, corner + 1)[:, None], np.arange(corner)[None]
    eligible = np.maximum(place - (M - b), 0)
    log_z, rarest, inside, found = 0.0, 1.0, True, []
    ahead = np.ones((M, M))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for epoch in range(count - 1, -1, -1):

            def attracted(steps, lags, of=epoch):
                steps = of * M + steps
                row = np.clip(scheme.iterations - 1 - steps, 0, len(log_attraction) - 1)
                return np.where(steps < scheme.iterations, log_attraction[row, np.minimum(lags, b)], 0.0)

            weights = np.exp(attracted(later, lag)) * ahead
            unit = weights.max()
            log_z += math.log(unit) if 0 < unit < math.inf else math.inf
            weights = weights / unit
            inside &= bool(weights.min() >= MIN_ENTRY)
            probabilities = _probabilities(M, b) if epoch else np.full(M, 1 / M)
            of_second, each = _suffix_sums(probabilities[:, None] * weights)
            rarest = max(rarest, each)
            by_place = of_second[:b] / _survival(M, b)[:, None] if epoch else of_second[:1].repeat(b, axis=0)
            of_first, each = _suffix_sums((by_place * probabilities).T)
            rarest = max(rarest, each)
            apart = of_first[:b].T / _survival(M, b) if epoch else np.full((b, b), of_first[0, 0])
            pull = np.expm1(attracted(early + 0 * before, before + early)) * (before + early < bands)
            known = by_place[eligible[M - before[:, 0]], :corner] * probabilities[:corner] * pull
            meeting, each = _suffix_sums(known.T)
            rarest = max(rarest, each)
            met = np.zeros((corner, b))
            met[:, : min(corner, b)] = meeting[:b].T / _survival(M, b)[: min(corner, b)]
            if not epoch:
                meeting, met = 0 * meeting, 0 * met
                log_z += math.log(apart[0, 0]) if apart[0, 0] > 0 else math.inf
            found.append(_Epoch(of_second, of_first.T, meeting.T, apart, met))
            inside &= all(map(has_room, found[-1]))
            ahead = apart[np.ix_(eligible, eligible)]
            close = M - before[:, 0]
            more = met[:, eligible]
            ahead[close] += more
            ahead[:, close] += more.T
    return log_z, rarest if inside else math.inf, found[::-1]


def _survival(epoch_steps: int, separation: int) -> np.ndarray:
    """Return (b,) rho^j: of no participation at the first j places."""
    return (
        np.exp(np.arange(separation) * epochs.log_survival(epoch_steps, separation))
        if separation > 1
        else np.ones(1)
    )


def _probabilities(epoch_steps: int, separation: int) -> np.ndarray:
    """Return (M,) K_0(t): from another first eligible place j on it is this over rho^j."""
    survival = _survival(epoch_steps, separation)
    last = np.minimum(np.arange(epoch_steps), separation - 1)
    return survival[last] / (epoch_steps - separation + 1)


def _suffix_sums(parts) -> tuple[np.ndarray, float]:
    """Return (sums over the first axis from each place on, largest ratio of one to its first term)."""
    sums = np.cumsum(parts[::-1], axis=0)[::-1]
    return sums, float(np.where(parts > 0, sums / parts, 0.0).max(initial=1.0))


@functools.lru_cache(maxsize=1)
def tables(mechanism: Attracting, m: int) -> dict:
    """Return the arrays that draws need, float32, with an axis of epochs first."""
    assert m == 2
    _, _, found = _built(mechanism)
    stacked = {name: np.stack([getattr(one, name) for one in found]) for name in _Epoch._fields}
    return {name: jax.device_put(np.asarray(part, np.float32)) for name, part in stacked.items()}


def draw_positions_with_one(key, scheme, arrays, num_samples: int):
    """Draw pairs; returns what `balanced_min_sep.draw_positions_with_one` does."""
    M, b, count = scheme.epoch_steps, scheme.min_separation, scheme.max_participations
    corner = arrays["meeting"].shape[1]
    uniforms = uniform_64(key, (count, 4, num_samples))

    def place_from(weights, level):
        """Return the last place whose sum, of `weights` at it, is not below `level`; sums fall."""

        def halve(_, between):
            low, high = between
            middle = (low + high) // 2
            reached = weights(middle) >= level
            return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

        start = jnp.zeros(num_samples, jnp.int32), jnp.full(num_samples, M, jnp.int32)
        return jax.lax.fori_loop(0, M.bit_length(), halve, start)[0]

    def one_epoch(places, given):
        tables, (met, which, first, second) = given
        one, two = (jnp.maximum(place - (M - b), 0) for place in places)
        # Steps before this epoch, less 1; those beyond the corner meet nothing.
        gaps = [M - 1 - place for place in places]

        def of_corner(gap, other):
            return jnp.where(gap < corner, tables["met"][jnp.minimum(gap, corner - 1), other], 0.0)

        by_one, by_two = of_corner(gaps[0], two), of_corner(gaps[1], one)
        both, apart = by_one + by_two, tables["apart"][one, two]
        meets = met * (both + apart) < both
        least = jnp.minimum(by_one, by_two)
        is_least = which * both < least
        first_meets = meets & (is_least == (by_one <= by_two))  # the place of the second attracts the first
        # `free` is the replica whose new place is drawn second.
        swap = meets & ~first_meets
        free, other = jnp.where(swap, two, one), jnp.where(swap, one, two)
        gap = jnp.minimum(jnp.where(swap, gaps[1], gaps[0]), corner - 1)

        def of_first(place):
            close = jnp.where(place < corner, tables["meeting"][gap, jnp.minimum(place, corner - 1)], 0.0)
            return jnp.where(meets, close, tables["of_first"][free, place])

        later = jnp.maximum(place_from(of_first, first * of_first(other)), other)

        def of_second(place):
            return tables["of_second"][place, later]

        earlier = jnp.maximum(place_from(of_second, second * of_second(free)), free)
        places = jnp.where(swap, later, earlier), jnp.where(swap, earlier, later)
        return places, jnp.stack(places)

    nothing = jnp.zeros(num_samples, jnp.int32)
    _, places = jax.lax.scan(one_epoch, (nothing, nothing), (arrays, uniforms))
    steps = places + M * jnp.arange(count, dtype=jnp.int32)[:, None, None]
    who = jnp.where(steps < scheme.iterations, jnp.array([1, 2])[None, :, None], 0)
    steps, who = (part.reshape(2 * count, num_samples).T for part in (steps, who))
    return drawn_together(steps, who, scheme.iterations)
