"""Two replicas of b-min-sep participation: exact weights by dynamic programming, draws by thinning.

Two participation vectors interact only where participations are less than `bands` apart, with the factor
`E_d = exp(a_d / sigma^2)`, `a` the autocorrelation of the coefficients. `U_i(s)` is the total weight from
step i on when one replica is free and the other is barred for s more steps because it took part b - s
steps ago (MATH.md section 9, PROPOSALS.md).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.mechanism import Mechanism
from jaxacct.randomness import exponential_32, uniform_32
from jaxacct.schemes.poisson import log_probabilities

MAX_TABLE_BYTES = 1e9


def most_replicas(mechanism: Mechanism) -> int:
    """2 where the float64 tables fit `MAX_TABLE_BYTES`, else 1."""
    scheme = mechanism.scheme
    fits = 3 * 8 * (scheme.iterations + scheme.min_separation) * scheme.min_separation
    return 2 if fits <= MAX_TABLE_BYTES else 1


@functools.lru_cache(maxsize=4)
def tables(mechanism: Mechanism, m: int):
    """(ln Z_2, arrays for `draw_counts`, (relative, total variation) errors of the drawn law)."""
    if m != 2:
        raise ValueError(f"m must be 2 for b-min-sep, was {m}")
    scheme = mechanism.scheme
    n, b, p = scheme.iterations, scheme.min_separation, scheme.sampling_probability
    q = -np.expm1(log_probabilities(p)[0]) if p < 1 else 0.0
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        attraction = attractions(mechanism)
        real, virtual = weights(n, b, p, q, attraction)
        start = start_weights(scheme, virtual)
        log_z = float(np.log(start.sum()))
        if not np.isfinite(log_z):
            return np.inf, None, (0.0, 0.0)
        arrays = _hazards(n, b, p, q, attraction, real, virtual) | _start_tables(start)
    # Waits as in `BMinSep.draw_error`, for either replica; every candidate is kept with a float32 ratio,
    # right to a few units in the last place, against a uniform of 2^-32 steps; and so are the two starts.
    events = 2 * (n + 2 * scheme.max_participations)
    return log_z, arrays, (float(np.expm1(8 * 2.0**-24 * events)), 2 * b * 2.0**-32)


def attractions(mechanism: Mechanism) -> np.ndarray:
    """(b + 1,) float64: `E_d = exp(a_d / sigma^2)` for participations d = 0..b steps apart."""
    c, b = mechanism.strategy.array, mechanism.scheme.min_separation
    autocorrelation = np.zeros(b + 1)
    autocorrelation[: c.size] = np.correlate(c, c, "full")[c.size - 1 :]
    return np.exp(autocorrelation / mechanism.noise_multiplier**2)


def weights(n: int, b: int, p: float, q: float, attraction: np.ndarray):
    """Tables U (n + b, b) and the twin W, (b + 1, b), for a barred past that does not interact.

    `U_i(0) = q^2 U_{i+1}(0) + 2pq U_{i+1}(b-1) + p^2 E_0 U_{i+b}(0)`,
    `U_i(s) = q U_{i+1}(s-1) + p E_{b-s} U_{i+s}(b-s)`, and W has E replaced by 1 in the second line.
    """
    real = np.ones((n + b, b))
    virtual = np.ones((b + 1, b))
    s = np.arange(1, b)
    pull = p * attraction[b - s]
    flat = real.reshape(-1)
    later = s * b + (b - s)
    for i in range(n - 1, -1, -1):
        ahead = flat[i * b + later]  # U_{i+s}(b-s)
        real[i, 1:] = q * real[i + 1, :-1] + pull * ahead
        real[i, 0] = (
            q * q * real[i + 1, 0] + 2 * p * q * real[i + 1, b - 1] + p * p * attraction[0] * real[i + b, 0]
        )
        if i < b:
            after = virtual[i + 1, :-1] if i + 1 < n else 1.0
            virtual[i, 1:] = q * after + p * ahead
            virtual[i, 0] = real[i, 0]
    return real, virtual


def start_weights(scheme, virtual: np.ndarray) -> np.ndarray:
    """(b, b) weights of the two replicas' initial barred steps; cold starts have only (0, 0)."""
    b = scheme.min_separation
    law = np.exp(scheme.start_log_weights()) if scheme.warm_start else np.eye(1, b)[0]
    s = np.arange(b)
    first = np.minimum.outer(s, s)
    gap = np.abs(np.subtract.outer(s, s))
    reach = np.where(first < scheme.iterations, virtual[first, gap], 1.0)
    return np.outer(law, law) * reach


def _hazards(n, b, p, q, attraction, real, virtual) -> dict:
    """Probabilities of the next event at each step and state, float32, and bounds on them."""
    i = np.arange(n)[:, None]
    s = np.arange(1, b)
    ahead = real[i + s, b - s]
    join = np.zeros((n, b))
    join[:, 1:] = p * attraction[b - s] * ahead / real[:n, 1:]
    early = min(b, n)
    join_virtual = np.zeros((b, b))
    join_virtual[:early, 1:] = p * ahead[:early] / virtual[:early, 1:]
    single = 2 * p * q * real[1 : n + 1, b - 1] / real[:n, 0]
    double = p * p * attraction[0] * real[b : n + b, 0] / real[:n, 0]
    free_bound = min(1.0, float((single + double).max()) * (1 + 1e-6))
    barred_bound = min(1.0, max(float(join.max()), float(join_virtual.max())) * (1 + 1e-6))
    return {
        "single": _float32(single / free_bound),
        "double": _float32(double / free_bound),
        "join": _float32(join / max(barred_bound, 1e-300)),
        "join_virtual": _float32(join_virtual / max(barred_bound, 1e-300)),
        "free_rate": _float32(-np.log1p(-free_bound)),
        "barred_rate": _float32(-np.log1p(-barred_bound)),
    }


def _float32(values):
    return jnp.asarray(values, jnp.float32)


def _start_tables(start: np.ndarray) -> dict:
    """Cumulative probabilities as 32-bit thresholds: of the first replica, and of the second given it."""
    first = start.sum(axis=1)
    second = start / np.where(first > 0, first, 1.0)[:, None]
    return {"first": _thresholds(first / first.sum()), "second": _thresholds(second)}


def _thresholds(law: np.ndarray):
    """uint32 `t` with index = number of `t` at or below 32 random bits; the last one is never reached."""
    cumulative = np.cumsum(law, axis=-1)[..., :-1]
    return jnp.asarray(np.minimum(np.round(cumulative * 2.0**32), 2.0**32 - 1), jnp.uint32)


def _draw_index(key, thresholds, num: int):
    bits = jax.random.bits(key, (num, 1), jnp.uint32)
    return jnp.sum(bits >= thresholds, axis=-1).astype(jnp.int32)


def draw_counts(key, scheme, arrays, num_samples: int):
    """Sums of two replicas' participation vectors, (num_samples, iterations) float32 of 0, 1, 2.

    Waits are drawn from the largest hazard of a state (a geometric law, exact) and then thinned to the
    hazard of the step at hand, so that no small difference of large numbers is ever taken in float32.
    """
    n, b = scheme.iterations, scheme.min_separation
    first_key, second_key, walk_key = jax.random.split(key, 3)
    one = _draw_index(first_key, arrays["first"], num_samples)
    two = _draw_index(second_key, arrays["second"][one], num_samples)
    step, barred = jnp.minimum(one, two), jnp.abs(one - two)
    counts = jnp.zeros((num_samples, n), jnp.float32)
    rows = jnp.arange(num_samples)

    def unfinished(state):
        return jnp.any(state[1] < n)

    def advance(state):
        turn, step, barred, virtual, counts = state
        wait_key, thin_key = jax.random.split(jax.random.fold_in(walk_key, turn))
        free = barred == 0
        rate = jnp.where(free, arrays["free_rate"], arrays["barred_rate"])
        exponential = exponential_32(wait_key, (num_samples,))
        wait = jnp.minimum(jnp.floor(exponential / rate), n).astype(jnp.int32)
        released = ~free & (wait >= barred)
        at = step + jnp.where(released, barred, wait)
        left = jnp.where(released | free, 0, barred - wait)
        here = jnp.minimum(at, n - 1)
        live = (at < n) & ~released
        u = uniform_32(thin_key, (num_samples,))
        early = jnp.minimum(at, b - 1)
        join = jnp.where(virtual, arrays["join_virtual"][early, left], arrays["join"][here, left])
        both = live & free & (u <= arrays["double"][here])
        alone = live & free & ~both & (u <= arrays["double"][here] + arrays["single"][here])
        joins = live & ~free & (u <= join)
        counts = counts.at[rows, here].add(2.0 * both + 1.0 * (alone | joins))
        # Both free again b steps on; or one barred; or time runs on to the release of the first.
        moved = jnp.where(both, at + b, jnp.where(joins, at + left, at + 1))
        state_after = jnp.where(alone, b - 1, jnp.where(joins, b - left, jnp.maximum(left - 1, 0)))
        state_after = jnp.where(both, 0, state_after)
        step = jnp.where(released, at, moved)
        barred = jnp.where(released, 0, state_after)
        virtual = virtual & ~(joins | alone | both) & (barred > 0)
        return turn + 1, jnp.minimum(step, n), barred, virtual, counts

    start = (jnp.uint32(0), step, barred, barred > 0, counts)
    return jax.lax.while_loop(unfinished, advance, start)[4]
