"""Gaussian differential privacy: G_mu, its (epsilon, delta), and consequences in closed form.

`G_mu = T(N(0,1), N(mu,1))`, `delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)` (arXiv 1905.02383,
corollary 1). With the Mills ratio `m(x) = Phi(-x) / phi(x)` this is `phi(x_1) (m(x_1) - m(x_2))`,
`x = eps/mu -+ mu/2`, which keeps its relative precision in the tails; for small mu the difference is the
integral of `-m'(x) = 1 - x m(x)`, computed without cancellation. Natural logs; arrays broadcast, float64.
"""

import math

import numpy as np
from scipy import special

from jaxacct.accountants.tradeoff.curves import arrays
from jaxacct.accountants.tradeoff.curves.arrays import bisect, log_of_positive, plain

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_FAR = 3.0  # from here on 1 - x m(x) is computed by its continued fraction
_MAX_MU = 1e150  # its epsilon exceeds 1e299; for larger mu epsilon counts as infinite
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_ROUNDING = 2.0**-36  # of ln delta


def gdp_tradeoff(alpha, mu):
    """Return `G_mu(alpha) = Phi(Phi^-1(1 - alpha) - mu)`: the smallest type II error at level `alpha`."""
    alpha, mu = arrays.share("alpha", alpha), arrays.nonnegative("mu", mu)
    finite = np.isfinite(mu)
    value = special.ndtr(-special.ndtri(alpha) - np.where(finite, mu, 0.0))
    return plain(np.where(finite, value, 0.0))


def gdp_log_delta(epsilon, mu):
    """Return the natural log of `gdp_delta`, for epsilon of either sign, rounded up; -inf where delta is 0.

    Delta is computed to about 1e-12 of itself down to 1e-300 (its log does not underflow) and raised by
    2^-36 of itself. `eps/mu` is rounded towards a larger delta, a relative error of `2^-52 (eps/mu)^2` in the
    far tail.
    """
    epsilon, mu = np.asarray(epsilon, np.float64), arrays.nonnegative("mu", mu)
    size = np.abs(epsilon)
    usable = (mu > 0) & np.isfinite(mu) & np.isfinite(size)
    m, e = np.where(usable, mu, 1.0), np.where(usable, size, 1.0)
    # The quotient is rounded towards a larger delta: this matters where epsilon and mu are large.
    ratio = np.minimum(e / m, 1e300)
    near = np.clip(ratio * (1 - 2.0**-52) - m / 2, -1e150, 1e150)
    far = np.minimum(ratio + m / 2, 1e150)
    thin = m <= 0.1
    # Small mu: the integral of -m'(x) between near and far, by quadrature. Otherwise the difference itself.
    integral = m
    if thin.any():
        points = near[..., None] + m[..., None] * (_NODES + 1) / 2
        integral = m / 2 * np.sum(_WEIGHTS * _slope(np.where(thin[..., None], points, 1.0)), axis=-1)
    right = near > 0
    difference = _mills(np.where(right, near, 1.0)) - _mills(np.where(right, far, 2.0))
    kept = np.where(thin, integral, difference)
    tail = -(near**2) / 2 - _LOG_SQRT_2PI + np.log(np.where(kept > 0, kept, 1e-320))
    body = special.ndtr(-near) - np.exp(-(near**2) / 2 - _LOG_SQRT_2PI) * _mills(np.abs(far))
    value = np.where(thin | right, tail, np.log(np.where(thin | right, 1.0, body)))
    value = np.where(
        usable, np.minimum(value + _ROUNDING, 0.0), np.where((mu > 0) & np.isfinite(size), 0.0, -np.inf)
    )
    value = np.where(np.isnan(epsilon), np.nan, value)
    return plain(np.where(epsilon < 0, mirrored_log_delta(size, value), value))


def mirrored_log_delta(size, log_delta):
    """Return ln delta at `-size`, of a symmetric curve: `H(-eps) = 1 - e^-eps + e^-eps H(eps)`."""
    return log_of_positive(-np.expm1(-size) + np.exp(-size + log_delta))


def gdp_delta(epsilon, mu):
    """Return `delta(epsilon)` of a mu-GDP mechanism, rounded up; epsilon and mu at least 0."""
    return plain(np.exp(gdp_log_delta(arrays.nonnegative("epsilon", epsilon), mu)))


def gdp_epsilon(delta, mu):
    """Return the smallest epsilon >= 0 with `gdp_delta(epsilon, mu) <= delta`, rounded up; mu at least 0."""
    delta, mu = arrays.open_share("delta", delta), arrays.nonnegative("mu", mu)
    target = np.log(delta)
    # delta(eps) <= Phi(-x), x = eps/mu - mu/2, and Phi(-x) <= e^(-x^2/2); with a margin for rounding.
    finite = np.isfinite(mu) & (mu <= _MAX_MU)
    m = np.where(finite, mu, 1.0)
    most = (m**2 / 2 + m * np.sqrt(-2 * target)) * (1 + 2.0**-49)
    _, high = bisect(lambda eps: gdp_log_delta(eps, m) > target, np.zeros_like(most), most)
    enough = gdp_log_delta(0.0, m) <= target
    return plain(np.where(finite, np.where(enough, 0.0, high), np.inf))


def gdp_mu(epsilon, delta):
    """Return the largest mu with `gdp_delta(epsilon, mu) <= delta`, rounded down; epsilon at least 0."""
    epsilon = arrays.checked("epsilon", epsilon, "finite and at least 0", lambda e: np.isfinite(e) & (e >= 0))
    delta = arrays.open_share("delta", delta)
    target = np.log(delta)
    scale = np.sqrt(-2 * target) + np.sqrt(-2 * np.log1p(-delta))
    high = np.log(2 * scale + np.sqrt(2 * epsilon) + 2.0)
    low, _ = bisect(lambda log_mu: gdp_log_delta(epsilon, np.exp(log_mu)) <= target, high - 750.0, high)
    return plain(np.exp(low))


def compose_gdp(mus):
    """Return the mu of the composition of mechanisms with these: `sqrt(sum mu_i^2)`, over the last axis."""
    return plain(np.sqrt(np.sum(arrays.nonnegative("mus", mus) ** 2, axis=-1)))


def group_gdp(mu, g):
    """Return the mu for groups of `g`: `g mu`."""
    g = arrays.checked("g", g, "an integer of at least 1", lambda k: (k >= 1) & (k == np.floor(k)))
    return plain(arrays.nonnegative("mu", mu) * g)


def gdp_to_zcdp(mu):
    """Return the rho of zCDP: `mu^2 / 2`."""
    return plain(arrays.nonnegative("mu", mu) ** 2 / 2)


def gdp_to_rdp(mu, order):
    """Return the Renyi divergence of this order, above 1: `order mu^2 / 2`."""
    orders = arrays.checked("order", order, "above 1", lambda a: a > 1)
    return plain(orders * arrays.nonnegative("mu", mu) ** 2 / 2)


def dp_tradeoff(alpha, epsilon, delta):
    """Return `f_{eps,delta}(alpha) = max(0, 1 - delta - e^eps alpha, e^-eps (1 - delta - alpha))`.

    arXiv 2212.05796 prints `min` for `max`, which is 0 or below everywhere (proofs/errata.md).
    """
    alpha, epsilon = arrays.share("alpha", alpha), arrays.nonnegative("epsilon", epsilon)
    delta = arrays.share("delta", delta)
    steep = 1 - delta - np.where(alpha > 0, np.exp(epsilon) * np.where(alpha > 0, alpha, 1.0), 0.0)
    flat = np.exp(-epsilon) * (1 - delta - alpha)
    return plain(np.maximum(0.0, np.maximum(steep, flat)))


def _mills(x):
    """Return `(1 - Phi(x)) / phi(x)`."""
    return math.sqrt(math.pi / 2) * special.erfcx(x / math.sqrt(2))


def _slope(x):
    """Return `1 - x m(x) = -m'(x)`, positive: m K with `m = 1 / (x + K)`, `K = 1/(x + 2/(x + 3/(x + ..`."""
    far = x > _FAR
    high = np.where(far, x, _FAR)
    tail = 0.0 * high
    for index in range(60, 0, -1):
        tail = index / (high + tail)
    low = np.where(far, 0.0, np.maximum(x, -37.0))
    return np.where(far, tail / (high + tail), 1 - low * _mills(low))
