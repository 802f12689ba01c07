"""A pair of b-min-sep replicas of which one counts for less, by when the other takes part (low noise).

With `q = 1 - p`, f_i the likelihood ratio from step i on and `r_i` the log-ratios, for a power s in (0, 1)

    f_i^s <= q^s f_{i+1}^s + c p^kappa q^{-b (kappa - s)} e^{kappa r_i} f_{i+b}^s,   kappa in [s, 1],
    c = sup over y > 0 of ((1 + y)^s - 1) / y^kappa,

and kappa, the *temper*, may be another at every step. Here that of step i depends on x alone: on its *lag*,
the steps since x last took part, and on its *lead*, the steps until it next does (b where that is b or more;
lead 0 where x takes part at i). The recurrence with = for <=, and 1 past the end, gives h(x, .) >= f_1^s, a
sum over vectors x' of exponentials. So `p(x) Q a_x h(x, .)` is a mixture over pairs (x, x') of laws
`N(C (x + kappa x'), sigma^2 I)` (proofs/proposals.md, section 2.8).

A state is x's lag while x' may take part (b: both may), or, r steps after x' took part, x's lag then and r:
what x' attracts is settled when x takes part next, or b steps later. Its weight is that of all that may
still happen.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import threefry
from jaxacct.kernels.randomness import uniform_64
from jaxacct.schemes.replicas.b_min_sep import log_attractions
from jaxacct.schemes.replicas.base import (
    Attracting,
    begins_barred,
    draw_indices,
    start_law,
    thresholds_of,
)

_MOST_NUMBERS = 4e7  # of the tables: steps, and pairs of steps within the separation
_STEPS = 64  # tempers are multiples of one in so many, exact in float32
_RAISED = 1e-9  # relative, of every coefficient: far above what float64 rounds
_UNIT = 2.0**-24


def fits(mechanism: Attracting) -> bool:
    """Whether the tables are small enough."""
    return mechanism.scheme.iterations * float(mechanism.scheme.min_separation) ** 2 <= _MOST_NUMBERS


class Tempers(NamedTuple):
    """By lag 1..b and lead 0..b: (b, b + 1) float64, each temper with ln of its coefficient in h."""

    kappa: np.ndarray
    log_coefficient: np.ndarray


@functools.lru_cache(maxsize=64)
def tempers(mechanism: Attracting, power: float) -> Tempers:
    """Those with the least weight where x takes part so many steps before and after; any others are valid.

    Args:
      power: s, a multiple of 1 / 64 in (0, 1).
    """
    b, p = mechanism.scheme.min_separation, mechanism.scheme.sampling_probability
    kappas = np.arange(round(power * _STEPS), _STEPS + 1) / _STEPS
    log_coefficients = np.array([log_constant(power, kappa) for kappa in kappas]) + kappas * math.log(p)
    log_coefficients += -b * (kappas - power) * math.log1p(-p) + _RAISED
    shared = log_attractions(mechanism)[-1]
    pulls = shared[1:, None] + shared
    pulls[:, 0] = shared[0]
    weights = log_coefficients - kappas * (1 - kappas) * shared[0] / 2 + kappas * pulls[..., None]
    best = np.argmin(weights, axis=-1)
    return Tempers(kappas[best], log_coefficients[best])


def log_constant(power: float, kappa: float) -> float:
    """`ln sup over y > 0 of ((1 + y)^s - 1) / y^kappa`, s <= kappa <= 1.

    The slope of `ln((1 + y)^s - 1)` in ln y falls from 1 to s, so there is one place where it is kappa.
    """
    if kappa == 1:
        return math.log(power)
    if kappa == power:
        return 0.0

    def slope(t):  # at 1 + y = e^t
        return power * math.expm1(-t) / math.expm1(-power * t)

    low, high = 1e-9, 1.0
    while slope(high) > kappa:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > kappa else (low, middle)
    log_y = high + math.log(-math.expm1(-high))
    return power * high + math.log(-math.expm1(-power * high)) - kappa * log_y


class _Weights(NamedTuple):
    """Attributes:
    log_z: ln Z, inf on overflow.
    odds: the largest of anybody taking part at a step, and of one outcome against those added up before it.
    starts: (b,) law of the steps for which x is barred at first.
    hazards: (n, 3) of both free (x alone; or x' alone; or both, added up), (n, b) of x' at a lag of x, and
      (n, b, b) of x so many steps after x' took part at a lag; None where not asked for.
    """

    log_z: float
    odds: tuple[float, float]
    starts: np.ndarray
    hazards: tuple[np.ndarray, np.ndarray, np.ndarray] | None


@functools.lru_cache(maxsize=64)
def log_normalizer(mechanism: Attracting, power: float) -> float:
    """ln Z, `Z = E f h` under Q with f of the mechanism and h cold; float64, inf where it overflows."""
    return _summary(mechanism, power).log_z


@functools.lru_cache(maxsize=64)
def _summary(mechanism: Attracting, power: float) -> _Weights:
    return _backward(mechanism, power, False)


def errors(mechanism: Attracting, power: float) -> tuple[float, float]:
    """(relative, total variation) errors of the law that `draw_pair` draws from.

    Thresholds are float32 and compared with a float32 uniform that is as fine near 0: each is off by three
    roundings of itself, and by a step of the uniform's. What is between two thresholds, or above, is off by
    that over its own probability, and the log of it by a third more at most. x's start has thresholds of
    2^-32.
    """
    scheme, (nobody, somebody) = mechanism.scheme, _summary(mechanism, power).odds
    steps = scheme.iterations * nobody + 2 * scheme.max_participations * somebody
    relative = 4 * _UNIT * steps if 4 * _UNIT * max(nobody, somebody) <= 0.25 else math.inf
    return math.expm1(min(600.0, relative)), scheme.min_separation * 2.0**-32 + scheme.iterations * 2.0**-60


def _pulls(mechanism: Attracting, chosen: Tempers, shared: np.ndarray):
    """i -> (b, b) weights of a participation of x' that is settled at i, r = 1..b steps later.

    By the lags 1..b that x had then, and r.
    """
    n, b = mechanism.scheme.iterations, mechanism.scheme.min_separation
    lag, ago = np.arange(1, b + 1)[:, None], np.arange(1, b + 1)

    def at(i: int) -> np.ndarray:
        # x' before the first step never is: what stands there for it is never met.
        row = np.clip(n - 1 - i + ago, 0, len(shared) - 1)
        virtual = i - ago - lag < 0  # x took part in its history only, which nobody sees
        known = np.where(virtual, b, lag)
        lead = ago if i < n else b  # past the end x never takes part
        kappa, coefficient = chosen.kappa[known - 1, lead], chosen.log_coefficient[known - 1, lead]
        own = -(1 - kappa) / 2 * shared[row, 0]
        after = shared[np.clip(n - 1 - i, 0, len(shared) - 1), lead]
        return coefficient + kappa * (own + shared[row, known] + after)

    settled = {}

    def kept(i: int) -> np.ndarray:
        if not 2 * b <= i <= n - len(shared):
            return np.exp(at(i))
        if "alike" not in settled:
            settled["alike"] = np.exp(at(i))
        return settled["alike"]

    return kept


def _backward(mechanism: Attracting, power: float, with_hazards: bool) -> _Weights:
    scheme, shared = mechanism.scheme, log_attractions(mechanism)
    n, b, p = scheme.iterations, scheme.min_separation, scheme.sampling_probability
    q, waits = 1 - p, math.exp(power * math.log1p(-p))
    chosen = tempers(mechanism, power)
    equal, log_equal = chosen.kappa[-1, 0], chosen.log_coefficient[-1, 0]
    pulls, ago = _pulls(mechanism, chosen, shared), np.arange(1, b)
    lag = np.arange(1, b + 1)[:, None]
    free = (lag + ago >= b).astype(float)
    hazards = (np.zeros((n, 3)), np.zeros((n, b)), np.zeros((n, b, b))) if with_hazards else None
    odds = np.zeros(2)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        ahead = np.ones((n + b + 1, b))  # of x's lags 1..b while x' is free
        settling = pulls(n)  # of lags 1..b and x' 1..b steps ago
        for i in range(n - 1, -1, -1):
            alone = settling[:, 0]  # x' takes part at i, x being at its lag and, if free, waiting
            own = shared[min(n - 1 - i, len(shared) - 1), 0]
            both = p * np.exp(log_equal + equal * own * (1 - (1 - equal) / 2)) * ahead[i + b, -1]
            outcomes = np.array([waits * p * ahead[i + 1, 0], q * alone[-1], both])
            ahead[i, -1] = waits * q * ahead[i + 1, -1] + outcomes.sum()
            ahead[i, :-1] = waits * ahead[i + 1, 1:] + alone[:-1]
            weights, joins = pulls(i), np.zeros((b, b))
            if b > 1:
                stays = np.where(free > 0, q, 1.0) * settling[:, 1:]
                joins[:, :-1] = free * p * weights[:, :-1] * ahead[i + b - ago, b - ago - 1]
                settling = np.empty((b, b))
                settling[:, :-1] = stays + joins[:, :-1]
                odds[0] = max(odds[0], float((joins[:, :-1] / stays).max()))
            else:
                settling = np.empty((b, b))
            settling[:, -1] = weights[:, -1] * ahead[i, -1]
            together = outcomes.cumsum()
            barred = alone[:-1] / (ahead[i, :-1] - alone[:-1])
            nobody = together[-1] / (ahead[i, -1] - together[-1])
            odds[0] = max(odds[0], nobody, float(barred.max(initial=0.0)))
            between = (together[1:] + together[:-1]) / outcomes[1:]
            odds[1] = max(odds[1], 1.0, float(between.max()))
            if hazards is not None:
                hazards[0][i] = together / ahead[i, -1]
                hazards[1][i, :-1] = alone[:-1] / ahead[i, :-1]
                hazards[2][i] = joins / settling
        law = start_law(scheme) if begins_barred(scheme) else np.eye(b)[0]
        # Barred for j more steps is a lag of b - j, in x's history.
        starts = law * ahead[0, ::-1]
        log_z = float(np.log(starts.sum()))
    if not (math.isfinite(log_z) and np.isfinite(odds).all()):
        return _Weights(math.inf, (math.inf, math.inf), starts, None)
    return _Weights(log_z, (float(odds[0]), float(odds[1])), starts / starts.sum(), hazards)


@functools.lru_cache(maxsize=1)
def tables(mechanism: Attracting, power: float) -> dict:
    """The arrays that `draw_pair` and `shifts` need."""
    found, chosen = _backward(mechanism, power, True), tempers(mechanism, power)
    if found.hazards is None:
        raise OverflowError("the tables of a tempered pair overflow")
    names = "both_free", "partner_waits", "settling"
    steps = {name: jnp.asarray(part, jnp.float32) for name, part in zip(names, found.hazards, strict=True)}
    starts = [thresholds_of(found.starts)] if begins_barred(mechanism.scheme) else None
    return {
        "steps": steps,
        "starts": starts,
        "kappa": jnp.asarray(chosen.kappa, jnp.float32),
        "log_coefficient": jnp.asarray(chosen.log_coefficient, jnp.float32),
    }


def draw_pair(key, scheme, arrays, num_samples: int):
    """(x, x'), each (num_samples, iterations) float32 of 0 and 1."""
    n, b = scheme.iterations, scheme.min_separation
    start_key, walk_key = threefry.split(key)
    lag = jnp.full(num_samples, b, jnp.int32)
    if arrays["starts"] is not None:
        lag = b - draw_indices([start_key], arrays["starts"], num_samples)[0]
    levels = uniform_64(walk_key, (n, num_samples), bits=threefry.bits_32_at_once)

    def step(state, at):
        lag, ago, skip, (tables, level) = *state, at
        acts, settling = skip == 0, ago > 0
        both_free, either = acts & ~settling & (lag == b), tables["both_free"]
        first = both_free & (level <= either[0]) & (either[0] > 0)
        second = both_free & ~first & (level <= either[1]) & (either[1] > either[0])
        both = both_free & ~first & ~second & (level <= either[2]) & (either[2] > either[1])
        alone = tables["partner_waits"][lag - 1]
        second = second | (acts & ~settling & (lag < b) & (level <= alone) & (alone > 0))
        hazard = tables["settling"][lag - 1, jnp.maximum(ago, 1) - 1]
        settles = acts & settling & (level <= hazard) & (hazard > 0)
        # Both free again after b steps; or x' is, x having taken part b - ago steps before.
        freed = second & (b == 1) | acts & settling & ~settles & (ago + 1 >= b)
        new_lag = jnp.where(settles, b - ago, jnp.where(freed | both, b, lag))
        new_lag = jnp.where(first, 1, new_lag)
        waits = acts & ~settling & ~both & ~first & ~second
        new_lag = jnp.where(waits, jnp.minimum(lag + 1, b), new_lag)
        new_ago = jnp.where(second & (b > 1), 1, jnp.where(acts & settling, ago + 1, 0))
        new_ago = jnp.where(settles | freed, 0, new_ago)
        new_skip = jnp.where(both, b - 1, jnp.where(settles, b - ago - 1, jnp.maximum(skip - 1, 0)))
        return (new_lag, new_ago, new_skip), ((both | first | settles), (both | second))

    none = jnp.zeros(num_samples, jnp.int32)
    drawn = jax.lax.scan(step, (lag, none, none), (arrays["steps"], levels))[1]
    return tuple(part.T.astype(jnp.float32) for part in drawn)


def shifts(arrays, x):
    """(kappa, ln coefficient) of every step, each of the shape of x, (num_samples, iterations)."""
    b, n = arrays["kappa"].shape[0], x.shape[-1]
    steps = jnp.arange(n, dtype=jnp.int32)
    before = jax.lax.cummax(jnp.where(x > 0, steps, -b), axis=1)
    before = jnp.pad(before, [(0, 0), (1, 0)], constant_values=-b)[:, :-1]
    after = jax.lax.cummin(jnp.where(x > 0, steps, n + b), axis=1, reverse=True)
    lag, lead = jnp.minimum(steps - before, b), jnp.minimum(after - steps, b)
    place = (lag - 1) * (b + 1) + lead
    return tuple(arrays[name].reshape(-1)[place] for name in ("kappa", "log_coefficient"))
