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
from jaxacct.statistics.tilted_sums import repeated

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
    steps, share, fed_back, sigma = _numbers(
        iterations, clip_norm, error_clip_norm, batch_size, noise_std, adjacency
    )
    first = 1 if reset_every is None else -(-steps // _validate.positive_integer("reset_every", reset_every))
    later, most = steps - first, steps
    if participations is not None:
        most = min(steps, _validate.positive_integer("participations", participations))
    both = 2 * min(most - 1, later) * (fed_back * share)
    return math.sqrt(most * share**2 + later * fed_back**2 + both) / sigma


def _numbers(iterations, clip_norm, error_clip_norm, batch_size, noise_std, adjacency: str = "add-remove"):
    """Return (T, largest change of the mean of clipped gradients and of the fed-back error, sigma_1)."""
    steps = _validate.positive_integer("iterations", iterations)
    c1, size = _validate.scale("clip_norm", clip_norm), _validate.positive_integer("batch_size", batch_size)
    share = ADJACENCIES[_validate.one_of("adjacency", adjacency, tuple(ADJACENCIES))] * c1 / size
    fed_back = 2 * _validate.scale("error_clip_norm", error_clip_norm)
    return steps, share, fed_back, _validate.scale("noise_std", noise_std)


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
    steps, share, most, sigma = _numbers(iterations, clip_norm, error_clip_norm, batch_size, noise_std)
    p = _validate.probability("sampling_probability", sampling_probability)
    residual_bound = float(arrays.nonnegative("residual_bound", residual_bound))
    counts = np.arange(steps + 1)
    with np.errstate(invalid="ignore"):
        jumps = np.where(counts == 0, 0.0, counts * (residual_bound / batch_size))
    fed_back = np.minimum(most, jumps)
    fed_back = fed_back[: 1 + np.searchsorted(fed_back, most)]  # the last number stands for all later ones
    weight = (orders * (orders - 1) / (2 * sigma**2))[:, None]
    with np.errstate(divide="ignore"):
        log_p, log_q = math.log(p), float(np.log1p(-p))
    stay, take = log_q + weight * fed_back**2, log_p + weight * (share + fed_back) ** 2
    log_weights = np.full((orders.size, fed_back.size), -np.inf)
    log_weights[:, 0] = 0.0
    for _ in range(steps):
        taken, log_weights = log_weights + take, log_weights + stay
        log_weights[:, 1:] = np.logaddexp(log_weights[:, 1:], taken[:, :-1])
        log_weights[:, -1] = np.logaddexp(log_weights[:, -1], taken[:, -1])
    # Every step has a few roundings of logs, none of which is larger than that of `steps` largest factors.
    largest = steps * (np.abs(take).max(axis=1) + abs(log_p) + (abs(log_q) if p < 1 else 0.0))
    rounded = 16 * (steps + 4) * 2.0**-53 * largest
    found = (special.logsumexp(log_weights, axis=1) + rounded) / (orders - 1)
    return float(found[0]) if np.ndim(order) == 0 else found


def dice_log_moment(
    order: int,
    *,
    iterations: int,
    clip_norm: float,
    error_clip_norm: float,
    batch_size: int,
    noise_std: float,
    sampling_probability: float,
    reset_every: int | None = None,
) -> float:
    """Return an upper bound on `ln E_Q (P/Q)^a` of the history under Poisson sampling, add-remove.

    It is that of the worst pair, in which all shifts point the same way: a replicas of the example's coins, j
    of which have had a first participation, by powers of the matrix of the weights of a step from j to j'.

    `order` is a, at least 2; the other arguments are those of `dice_mu`.

    Source: proofs/dice.md, section 2, theorem 1.
    """
    a = _validate.positive_integer("order", order, minimum=2)
    steps, c, f, sigma = _numbers(iterations, clip_norm, error_clip_norm, batch_size, noise_std)
    p = _validate.probability("sampling_probability", sampling_probability)
    run = steps if reset_every is None else min(steps, _validate.positive_integer("reset_every", reset_every))
    step = np.full((a + 1, a + 1), -np.inf)
    for j in range(a + 1):
        old, new = np.arange(j + 1)[:, None], np.arange(a + 1 - j)  # replicas in the batch, by their state
        both = old + new
        pairs = (j * f + both * c) ** 2 - (j * f**2 + both * c**2 + 2 * old * f * c)
        coins = special.xlogy(both, p) + special.xlog1py(a - both, -p)
        coins = coins + _log_binomial(j, old) + _log_binomial(a - j, new)
        step[j, j:] = special.logsumexp(coins + pairs / (2 * sigma**2), axis=0)
    # Of the sizes of all numbers that make an entry.
    largest = (a * (f + c) / sigma) ** 2 + 8 * special.gammaln(a + 2) - a * math.log(p)
    largest -= a * math.log1p(-p) if p < 1 else 0.0
    found = steps // run * _log_of_power(step, run) + _log_of_power(step, steps % run)
    # Each of 2 (log2(steps) + 1) products has about 2 a roundings of logs, none larger than `steps` of these.
    return found + 8 * (a + 4) * (math.log2(steps) + 2) * 2.0**-53 * steps * largest


def _log_binomial(n, k):
    return special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)


def _log_of_power(log_matrix: np.ndarray, times: int) -> float:
    """Return the log of the sum of the first row of the power of a matrix, given by its logs."""
    return float(special.logsumexp(repeated(log_matrix, times, _log_product)[0])) if times else 0.0


def _log_product(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.logaddexp.reduce(one[:, :, None] + other, axis=1)


_MIN_LOG_DELTA = -690.0  # a smaller delta is not shown
_ORDERS = np.concatenate([1 + np.geomspace(0.02, 1, 12), np.geomspace(2.2, 64, 36), np.geomspace(80, 512, 8)])
_WHOLE_ORDERS = (*range(2, 17), 18, 20, 22, 25, 28, 32, 36, 40, 45, 50, 57, 64, 80, 96, 128)


def dice_delta_subsampled(
    epsilon: float, *, residual_bound: float = math.inf, reset_every: int | None = None, **problem
) -> float:
    """Return delta at epsilon by `dice_log_moment` or, if that is smaller, by `dice_rdp_subsampled`.

    It is that of the best order; `problem` are the other arguments of both. The log of a moment is convex in
    the order, so between whole orders it is at most the chord. `dice_rdp_subsampled` has no resets.

    `ln delta = ln E_Q (P/Q)^a - (a - 1)(eps - ln(1 - 1/a)) - ln a` (Canonne, Kamath and Steinke 2020,
    proposition 12).
    """
    epsilon, best = _validate.nonnegative_number("epsilon", epsilon), 0.0
    if reset_every is None:
        rdp = dice_rdp_subsampled(_ORDERS, residual_bound=residual_bound, **problem)
        best = min(best, _log_delta(epsilon, _ORDERS, (_ORDERS - 1) * rdp))
    orders, moments, hidden = [1], [0.0], math.inf
    for order in _WHOLE_ORDERS:
        orders.append(order)
        moments.append(dice_log_moment(order, reset_every=reset_every, **problem))
        between = np.linspace(orders[-2], order, 17)[1:]
        found = _log_delta(epsilon, between, np.interp(between, orders[-2:], moments[-2:]))
        if found > hidden:  # larger orders have larger ones: this is convex in the order
            break
        hidden = found
    return math.exp(max(min(best, hidden), _MIN_LOG_DELTA))  # not 0, where it is smaller than a float64


def _log_delta(epsilon: float, orders: np.ndarray, moments: np.ndarray) -> float:
    """Return the smallest log of delta of these orders, raised for its rounding."""
    with np.errstate(over="ignore"):
        logs = moments - (orders - 1) * (epsilon - np.log1p(-1 / orders)) - np.log(orders)
        return float((logs + 1e-9 + 16 * 2.0**-53 * moments + 16 * 2.0**-53 * (orders - 1) * epsilon).min())
