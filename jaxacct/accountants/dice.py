"""DiceSGD (clipped error feedback): a valid bound on the whole released history.

Theorem 3.7 of arXiv 2311.14632 is false (proofs/errata.md has a counterexample). `dice_mu` is proven in
proofs/dice.md. Noise is given as in the paper: `noise_std` is the standard deviation added to the *mean*.
"""

import math

import numpy as np
from scipy import special

from jaxacct.accountants.tradeoff.curves import arrays
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_epsilon, gdp_mu
from jaxacct.common import validate as _validate

ADJACENCIES = {"add-remove": 1, "replace-one": 2}


def dice_mu(
    *,
    iterations: int,
    clip_norm: float,
    error_clip_norm: float,
    batch_size: int,
    noise_std: float,
    adjacency: str = "add-remove",
    reset_every: int | None = None,
    participations: int | None = None,
) -> float:
    """Return mu: the released history is mu-GDP, for any loss, data and sampling; no amplification.

    `mu = sqrt(K c^2 + (T - F)(2 C2)^2 + 2 min(K - 1, T - F) (2 C2) c) / sigma_1` with `c = s C1/B`, F first
    steps (one, or one after each reset) and s = 1 for add-remove, 2 for replace-one. It is
    `sqrt(F c^2 + (T - F)(2 C2 + c)^2) / sigma_1` where an example may be in every step.

    Args:
      iterations: T.
      clip_norm: C1, of each gradient.
      error_clip_norm: C2, of the fed-back error.
      batch_size: B, the fixed divisor.
      noise_std: sigma_1, on the mean.
      adjacency: "add-remove" or "replace-one".
      reset_every: the error is reset to 0 after so many steps, at times fixed beforehand.
      participations: K, the most steps that an example is in; all of them by default.

    Source: derived in proofs/dice.md; arXiv 2311.14632, algorithms 2 and 3.
    """
    steps = _validate.positive_integer("iterations", iterations)
    share = _gradient_share(clip_norm, batch_size, adjacency)
    c2 = _validate.scale("error_clip_norm", error_clip_norm)
    sigma = _validate.scale("noise_std", noise_std)
    first = 1 if reset_every is None else -(-steps // _validate.positive_integer("reset_every", reset_every))
    later, most = steps - first, steps
    if participations is not None:
        most = min(steps, _validate.positive_integer("participations", participations))
    both = 2 * min(most - 1, later) * (2 * c2 * share)
    return math.sqrt(most * share**2 + later * (2 * c2) ** 2 + both) / sigma


def _gradient_share(clip_norm, batch_size, adjacency: str) -> float:
    """Return the largest change of the mean of clipped gradients by one example."""
    c1 = _validate.scale("clip_norm", clip_norm)
    size = _validate.positive_integer("batch_size", batch_size)
    return ADJACENCIES[_validate.one_of("adjacency", adjacency, tuple(ADJACENCIES))] * c1 / size


def dice_epsilon(delta: float, **problem) -> float:
    """Return epsilon of `dice_mu(**problem)` at delta."""
    return float(gdp_epsilon(delta, dice_mu(**problem)))


def dice_noise_std(epsilon: float, delta: float, **problem) -> float:
    """Return the smallest `noise_std` for which `dice_mu(**problem)` is (epsilon, delta)-DP."""
    if "noise_std" in problem:
        raise ValueError("noise_std must not be given: it is what dice_noise_std finds")
    return dice_mu(**problem, noise_std=1.0) / gdp_mu(epsilon, delta)


def dice_rdp_subsampled(
    order,
    *,
    iterations: int,
    clip_norm: float,
    error_clip_norm: float,
    batch_size: int,
    noise_std: float,
    sampling_probability: float,
    residual_bound: float = math.inf,
):
    """Return the Renyi divergence of the history under Poisson sampling, add-remove: partial amplification.

    With K previous inclusions the two errors differ by at most `K G/B` and the fed-back errors by
    `m_K = min(2 C2, K G/B)`; the bound is `1/(a-1) ln E exp(a(a-1)/(2 sigma^2) sum_t h_t^2)` with
    `h_t = b_t C1/B + m_K`, by an exact recursion over K.

    `order` is a, above 1, a number or (orders,) float64; `residual_bound` is G, the maximum that clipping can
    remove from a gradient (clip raw gradients at C1 + G first). The other arguments are those of `dice_mu`.
    """
    orders = np.atleast_1d(np.asarray(order, np.float64))
    if not np.all((orders > 1) & np.isfinite(orders)):
        raise ValueError(f"order must be a finite number above 1, got {order!r}")
    steps = _validate.positive_integer("iterations", iterations)
    share = _gradient_share(clip_norm, batch_size, "add-remove")
    c2 = _validate.scale("error_clip_norm", error_clip_norm)
    sigma = _validate.scale("noise_std", noise_std)
    p = _validate.probability("sampling_probability", sampling_probability)
    residual_bound = float(arrays.nonnegative("residual_bound", residual_bound))
    counts = np.arange(steps + 1)
    with np.errstate(invalid="ignore"):
        jumps = np.where(counts == 0, 0.0, counts * (residual_bound / batch_size))
    fed_back = np.minimum(2 * c2, jumps)
    weight = (orders * (orders - 1) / (2 * sigma**2))[:, None]
    with np.errstate(divide="ignore"):
        log_p, log_q = math.log(p), float(np.log1p(-p))
    stay, take = log_q + weight * fed_back**2, log_p + weight * (share + fed_back) ** 2
    log_weights = np.full((orders.size, steps + 1), -np.inf)
    log_weights[:, 0] = 0.0
    for _ in range(steps):
        taken = np.concatenate([np.full((orders.size, 1), -np.inf), (log_weights + take)[:, :-1]], axis=1)
        log_weights = np.logaddexp(log_weights + stay, taken)
    # Every step has a few roundings of logs, none of which is larger than that of `steps` largest factors.
    largest = steps * (np.abs(take).max(axis=1) + abs(log_p) + (abs(log_q) if p < 1 else 0.0))
    rounded = 16 * (steps + 4) * 2.0**-53 * largest
    found = (special.logsumexp(log_weights, axis=1) + rounded) / (orders - 1)
    return float(found[0]) if np.ndim(order) == 0 else found


_MIN_LOG_DELTA = -690.0  # a smaller delta is not shown
_ORDERS = np.concatenate([1 + np.geomspace(0.02, 1, 12), np.geomspace(2.2, 64, 36), np.geomspace(80, 512, 8)])


def dice_delta_subsampled(epsilon: float, *, iterations: int, **problem) -> float:
    """Return delta at epsilon by `dice_rdp_subsampled`, the best of 56 orders, with its arguments.

    `ln delta = (a - 1)(rho - eps + ln(1 - 1/a)) - ln a` (Canonne, Kamath and Steinke 2020, proposition 12).
    """
    epsilon = _validate.epsilon(epsilon)
    rdp = dice_rdp_subsampled(_ORDERS, iterations=iterations, **problem)
    with np.errstate(over="ignore"):
        logs = (_ORDERS - 1) * (rdp - epsilon + np.log1p(-1 / _ORDERS)) - np.log(_ORDERS)
    # Raised for its rounding: differences of numbers of this size.
    logs += 1e-9 + 16 * 2.0**-53 * (_ORDERS - 1) * (rdp + epsilon)
    # Not 0, where it is smaller than a float64; NaN gives 1.
    return float(min(1.0, np.exp(np.clip(logs.min(), _MIN_LOG_DELTA, 0.0))))
