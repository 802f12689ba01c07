"""Renyi accounting of the Poisson-subsampled Gaussian at integer orders, and its conversion to epsilon."""

import numpy as np
from scipy import special

from jaxacct.common import validate as _validate

ORDERS = tuple(range(2, 65)) + (80, 96, 128, 192, 256, 384, 512, 1024)
_MAX_ORDER = 2**20  # larger ones would take gigabytes


def subsampled_gaussian_rdp(sampling_probability: float, sigma, orders=ORDERS) -> np.ndarray:
    """Return the Renyi divergence of one step, covering both directions: (..., len(orders)) float64.

    `1/(a-1) ln sum_k binom(a, k) (1-q)^(a-k) q^k e^{(k^2 - k) / (2 sigma^2)}` for whole orders a, rounded up.

    Args:
      sampling_probability: q in (0, 1].
      sigma: noise multipliers, above 0; infinity for a step of cost 0.
      orders: whole numbers of at least 2.

    Source: Mironov, Talwar and Zhang 2019 (whose section 3.1 shows that remove dominates add).
    """
    q = _validate.probability("sampling_probability", sampling_probability)
    sigma = np.asarray(sigma, float)
    if not np.all((sigma >= _validate.MIN_NOISE) & ((sigma <= _validate.MAX_NOISE) | np.isposinf(sigma))):
        raise ValueError("sigma must be in [1e-9, 1e9], or infinity")
    orders = checked_orders(orders)
    found = []
    for order in orders:
        # The terms add up to 1 without their exponentials: of positive terms, k >= 2, nothing cancels.
        k = np.arange(2, order + 1)
        log_binomial = special.gammaln(order + 1) - special.gammaln(k + 1) - special.gammaln(order - k + 1)
        log_terms = log_binomial + special.xlogy(k, q) + special.xlog1py(order - k, -q)
        exponents = (k * (k - 1)) / (2 * np.square(sigma[..., None]))
        with np.errstate(divide="ignore"):
            log_excess = special.logsumexp(log_terms + exponents + np.log(-np.expm1(-exponents)), axis=-1)
        # Relevant logarithms have at most this size for q of at least 2^-32, 1 or at most 1 - 2^-53.
        rounded = 8 * 2.0**-52 * order * (np.log(order) + 64)
        found.append(np.logaddexp(0.0, log_excess) / (order - 1) * (1 + rounded))
    return np.stack(found, axis=-1)


def checked_orders(orders) -> np.ndarray:
    """Return whole orders of at least 2 as integers; ValueError otherwise."""
    orders = np.asarray(orders)
    if orders.ndim != 1 or not orders.size or np.any(orders != np.round(orders)) or np.any(orders < 2):
        raise ValueError("orders must be whole numbers of at least 2")
    if np.any(orders > _MAX_ORDER):
        raise ValueError(f"orders must be at most {_MAX_ORDER}, got {orders.max():g}")
    return orders.astype(int)


def rdp_to_epsilon(rdp, orders, delta: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (epsilon, best order): arrays of the leading shape of `rdp`, (..., len(orders)).

    `eps = rho + ln(1 - 1/a) - (ln delta + ln a) / (a - 1)`, at least 0.

    Source: Canonne, Kamath and Steinke 2020, proposition 12.
    """
    delta = _validate.open_probability("delta", delta)
    orders, rdp = np.asarray(orders, float), np.asarray(rdp, float)
    if rdp.shape[-1:] != orders.shape or not np.all((orders > 1) & np.isfinite(orders)):
        raise ValueError("orders must be finite and above 1, one for each entry of the last axis of rdp")
    if not np.all(rdp >= 0):
        raise ValueError("rdp must be at least 0")
    epsilon = rdp + np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / (orders - 1)
    best = np.argmin(epsilon, axis=-1)
    least = np.take_along_axis(epsilon, best[..., None], axis=-1)[..., 0]
    return np.maximum(0.0, least), orders[best]
