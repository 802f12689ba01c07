"""Third moments of b-min-sep and of Poisson sampling, to about 1e-4: for estimates, not for certificates.

`Z_3 = E_Q f^3` is the weight of three replicas that attract each other. Between events at least one of them
is free to participate; the states of the other two are those of `kernels.lockouts`.
"""

import functools
import math

import numpy as np
import scipy

from jaxacct.kernels.lockouts import moves, start_states
from jaxacct.kernels.recurrence import log_probabilities
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.schemes.replicas.base import attractions, stationary_lockouts

_M = 3


def log_third_moment(mechanism: Mechanism, extrapolate: bool) -> float:
    """Return ln Z_3 of b-min-sep or Poisson sampling; inf where it overflows.

    Backwards in time the growth of the weights soon becomes the same at every step, and may be extrapolated.
    """
    scheme = mechanism.scheme
    n, b, p = scheme.iterations, scheme.min_separation, scheme.sums.probability
    if b == 1:
        return n * _log_of_one_step(p, mechanism.noise_multiplier)
    q = -np.expm1(log_probabilities(p)[0]) if p < 1 else 0.0
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        attraction = attractions(mechanism)
        real, growth = _weights(n, b, p, q, attraction, extrapolate)
        rest = n + b - len(real)
        if not getattr(scheme, "warm_start", False):
            log_z = float(np.log(real[0, 0]))
        else:
            virtual = _virtual_weights(n - rest, b, p, q, attraction, real)
            earliest, number, chance = start_states(b, _M, stationary_lockouts(b, p))
            reach = np.where(earliest < n - rest, virtual[earliest, number], 1.0)
            log_z = float(np.log((chance * reach).sum()))
    return log_z + rest * growth if math.isfinite(log_z) else math.inf


def _log_of_one_step(p: float, sigma: float) -> float:
    k = np.arange(_M + 1)
    log_weights = np.log(scipy.special.comb(_M, k)) + scipy.special.xlogy(k, p)
    log_weights += scipy.special.xlog1py(_M - k, -p) + k * (k - 1) / 2 / sigma**2
    return float(scipy.special.logsumexp(log_weights))


@functools.lru_cache(maxsize=4)
def _moves(b: int, num_codes: int):
    return moves(b, _M, num_codes)


def _transitions(b: int, p: float, q: float, attraction, num_codes: int):
    """Return for j = 0..3 participations: (states, weight, places ahead of the next state)."""
    found = []
    for j, move in enumerate(_moves(b, num_codes)):
        pull = np.where(move.ago > 0, attraction[move.ago], 1.0).prod(axis=1)
        ways = np.array([math.comb(k, j) for k in range(_M + 1)], float)[move.free]
        weight = ways * p**j * q ** (move.free - j) * attraction[0] ** (j * (j - 1) // 2) * pull**j
        found.append((move.which, weight, move.delta, move.after))
    return found


def _weights(n, b: int, p: float, q: float, attraction, extrapolate: bool) -> tuple[np.ndarray, float]:
    """Return (U of the last steps, (.. + b, states) float64; growth of its log a step before them)."""
    last_row = len(attraction) - 1

    @functools.lru_cache(maxsize=1)
    def of_row(row):
        return _transitions(b, p, q, attraction[row], b)

    size = math.comb(b + _M - 2, _M - 1)
    weights = np.ones((n + b, size))
    flat, growths = weights.reshape(-1), np.zeros(1)
    for i in range(n - 1, -1, -1):
        row = np.zeros(size)
        for which, weight, delta, after in of_row(min(n - 1 - i, last_row)):
            row[which] += weight * flat[i * size :].take(delta * size + after)
        weights[i] = row
        if extrapolate and (n - i) % b == 0 and n - i >= max(2 * b, b + len(attraction)):
            growths = np.log(weights[i : i + b, 0] / weights[i + b : i + 2 * b, 0]) / b
            if i * np.ptp(growths) <= 3e-4 * n * growths.mean():
                return weights[i:], float(growths.mean())
    return weights, 0.0


def _virtual_weights(n: int, b: int, p: float, q: float, attraction, real) -> np.ndarray:
    """Return U of the first b steps with virtual histories, (2 b, states); from row b on those of `real`."""
    size, real_size = math.comb(2 * b + _M - 3, _M - 1), real.shape[1]
    weights = np.zeros((2 * b, size))
    weights[: len(real), :real_size] = real[: 2 * b]
    weights[min(b, n) : b] = 1.0
    flat = weights.reshape(-1)
    for i in range(min(b, n) - 1, -1, -1):
        row, codes = np.zeros(size), 2 * b - 1 - i
        part = _transitions(b, p, q, attraction[min(n - 1 - i, len(attraction) - 1)], 2 * b - 1)
        for j, (which, weight, delta, after) in enumerate(part):
            # A virtual lockout lasts b - 1 - i steps at most.
            others = _M - max(1, j)
            end = math.comb(codes + others - 1, others)
            row[which[:end]] += weight[:end] * flat[i * size :].take((delta * size + after)[:end])
        weights[i] = row
        weights[i, :real_size] = real[i]
    return weights
