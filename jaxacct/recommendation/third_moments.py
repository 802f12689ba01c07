"""Third moments of b-min-sep and of Poisson sampling, to about 1e-4: for estimates, not for certificates.

`Z_3 = E_Q f^3` is the weight of three replicas that attract each other. Between events at least one of them
is free to participate; states and weights are those of `schemes.replicas.joint`, without its draws.
"""

import math

import numpy as np
import scipy

from jaxacct.kernels.lockouts import moves
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.schemes.replicas import joint
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
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        weights_at, num_rows = joint.step_weights(mechanism, _M, p), len(attractions(mechanism))
        real, growth = _weights(n, b, num_rows, weights_at, extrapolate)
        rest, total = n + b - len(real), real[0, 0]
        if getattr(scheme, "warm_start", False):
            virtual, _ = joint.virtual_weights(n - rest, b, _M, weights_at, real)
            total, _ = joint.start_sum(n - rest, b, _M, stationary_lockouts(b, p), virtual)
        log_z = float(np.log(total))
    return log_z + rest * growth if math.isfinite(log_z) else math.inf


def _log_of_one_step(p: float, sigma: float) -> float:
    k = np.arange(_M + 1)
    log_weights = np.log(scipy.special.comb(_M, k)) + scipy.special.xlogy(k, p)
    log_weights += scipy.special.xlog1py(_M - k, -p) + k * (k - 1) / 2 / sigma**2
    return float(scipy.special.logsumexp(log_weights))


def _weights(n: int, b: int, num_rows: int, weights_at, extrapolate: bool) -> tuple[np.ndarray, float]:
    """Return (U of the last steps, (.. + b, states) float64; growth of its log a step before them)."""
    of_moves = moves(b, _M, b)
    size = len(of_moves[0].which)
    weights = np.ones((n + b, size))
    flat, growths = weights.reshape(-1), np.zeros(1)
    for i in range(n - 1, -1, -1):
        row = np.zeros(size)
        for move, weight in zip(of_moves, weights_at(n - 1 - i, b), strict=True):
            row[move.which] += weight * flat[i * size :].take(move.delta * size + move.after)
        weights[i] = row
        if extrapolate and (n - i) % b == 0 and n - i >= max(2 * b, b + num_rows):
            growths = np.log(weights[i : i + b, 0] / weights[i + b : i + 2 * b, 0]) / b
            if i * np.ptp(growths) <= 3e-4 * n * growths.mean():
                return weights[i:], float(growths.mean())
    return weights, 0.0
