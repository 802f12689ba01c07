"""Renyi accounting of the Poisson-subsampled Gaussian at integer orders, and its conversion to epsilon."""

import numpy as np
from scipy import special

from jaxacct.common import validate as _validate

ORDERS = tuple(range(2, 65)) + (80, 96, 128, 192, 256, 384, 512, 1024)


def subsampled_gaussian_rdp(sampling_probability: float, sigma, orders=ORDERS) -> np.ndarray:
    """Return the Renyi divergence of one step, covering both directions: (..., len(orders)) float64.

    `1/(a-1) ln sum_k binom(a, k) (1-q)^(a-k) q^k e^{(k^2 - k) / (2 sigma^2)}` for whole orders a.

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
        k = np.arange(order + 1)
        log_binomial = special.gammaln(order + 1) - special.gammaln(k + 1) - special.gammaln(order - k + 1)
        log_terms = log_binomial + special.xlogy(k, q) + special.xlog1py(order - k, -q)
        exponents = log_terms + (k * (k - 1)) / (2 * np.square(sigma[..., None]))
        moment = np.maximum(0.0, special.logsumexp(exponents, axis=-1))
        found.append(np.where(np.isposinf(sigma), 0.0, moment / (order - 1)))
    return np.stack(found, axis=-1)


def checked_orders(orders) -> np.ndarray:
    """Return whole orders of at least 2 as integers; ValueError otherwise."""
    orders = np.asarray(orders)
    if orders.ndim != 1 or not orders.size or np.any(orders != np.round(orders)) or np.any(orders < 2):
        raise ValueError("orders must be whole numbers of at least 2")
    return orders.astype(int)


def rdp_to_epsilon(rdp, orders, delta: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (epsilon, best order): arrays of the leading shape of `rdp`, (..., len(orders)).

    `eps = rho + ln(1 - 1/a) - (ln delta + ln a) / (a - 1)`, at least 0.

    Source: Canonne, Kamath and Steinke 2020, proposition 12.
    """
    delta = _validate.delta(delta)
    orders, rdp = np.asarray(orders, float), np.asarray(rdp, float)
    if rdp.shape[-1:] != orders.shape or not np.all(orders > 1):
        raise ValueError("orders must be above 1, one for each entry of the last axis of rdp")
    if not np.all(rdp >= 0):
        raise ValueError("rdp must be at least 0")
    epsilon = rdp + np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / (orders - 1)
    best = np.argmin(epsilon, axis=-1)
    least = np.take_along_axis(epsilon, best[..., None], axis=-1)[..., 0]
    return np.maximum(0.0, least), orders[best]
