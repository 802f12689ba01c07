"""Gaussian differential privacy: G_mu, its (epsilon, delta), and what follows from them in closed form.

`G_mu = T(N(0,1), N(mu,1))`, `delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)` (arXiv 1905.02383,
corollary 1). With the Mills ratio `m(x) = Phi(-x) / phi(x)` this is `phi(x_1) (m(x_1) - m(x_2))`,
`x = eps/mu -+ mu/2`, which holds its relative precision in the tails; for small mu the difference is the
integral of `-m'(x) = 1 - x m(x)`, computed without cancellation. Natural logs everywhere.
"""

import math

import jax
import numpy as np

from jaxacct.accountants.tradeoff.curves import arrays
from jaxacct.accountants.tradeoff.curves.arrays import bisect, library, plain

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_FAR = 3.0  # from here on 1 - x m(x) by its continued fraction
_LARGEST_MU = 1e150  # its epsilon is beyond 1e299; above it epsilon counts as infinite
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def gdp_tradeoff(alpha, mu):
    """`G_mu(alpha) = Phi(Phi^-1(1 - alpha) - mu)`: the least type II error at level `alpha`.

    Args:
      alpha: type I error in [0, 1], any shape.
      mu: at least 0; infinity gives 0.
    """
    arrays.check_level(alpha)
    arrays.check_mu(mu)
    xp, special, (alpha, mu) = library(alpha, mu)
    finite = xp.isfinite(mu)
    value = special.ndtr(-special.ndtri(alpha) - xp.where(finite, mu, 0.0))
    return plain(xp.where(finite, value, 0.0))


def gaussian_tradeoff(mu, alpha):
    """`gdp_tradeoff` with the arguments the other way round."""
    return gdp_tradeoff(alpha, mu)


def gdp_log_delta(epsilon, mu):
    """Natural log of `gdp_delta`; for epsilon of either sign. -inf where delta is 0.

    Relative precision of delta: about 1e-12 down to 1e-300 (the log itself does not underflow). `eps/mu` is
    rounded to the side of a larger delta, which is a relative error of `2^-52 (eps/mu)^2` in the far tail.
    """
    arrays.check_mu(mu)
    xp, special, (epsilon, mu) = library(epsilon, mu)
    size = xp.abs(epsilon)
    usable = (mu > 0) & xp.isfinite(mu) & xp.isfinite(size)
    m = xp.where(usable, mu, 1.0)
    e = xp.where(usable, size, 1.0)
    # The quotient's rounding is on the side of a larger delta: it decides where epsilon and mu are large.
    ratio = xp.minimum(e / m, 1e300)
    near = xp.clip(ratio * (1 - 2.0**-52) - m / 2, -1e150, 1e150)
    far = xp.minimum(ratio + m / 2, 1e150)
    thin = m <= 0.1
    # Small mu: the integral of -m'(x) between near and far, by quadrature. Elsewhere the difference itself.
    integral = m
    if arrays.is_placeholder(thin) or thin.any():
        points = near[..., None] + m[..., None] * (_NODES + 1) / 2
        slopes = _slope(xp, special, xp.where(thin[..., None], points, 1.0))
        integral = m / 2 * xp.sum(_WEIGHTS * slopes, axis=-1)
    right = near > 0
    x = xp.where(right, near, 1.0)
    difference = _mills(xp, special, x) - _mills(xp, special, xp.where(right, far, 2.0))
    kept = xp.where(thin, integral, difference)
    tail = -(near**2) / 2 - _LOG_SQRT_2PI + xp.log(xp.where(kept > 0, kept, 1e-320))
    body = special.ndtr(-near) - xp.exp(-(near**2) / 2 - _LOG_SQRT_2PI) * _mills(xp, special, xp.abs(far))
    value = xp.where(thin | right, tail, xp.log(xp.where(thin | right, 1.0, body)))
    value = xp.where(usable, value, xp.where((mu > 0) & xp.isfinite(size), 0.0, -xp.inf))
    value = xp.where(xp.isnan(mu) | xp.isnan(epsilon), xp.nan, value)
    # H(-eps) = 1 - e^-eps + e^-eps H(eps), for a pair that may be swapped.
    other = -xp.expm1(-size) + xp.exp(-size + value)
    negative = xp.where(other > 0, xp.log(xp.where(other > 0, other, 1.0)), -xp.inf)
    return plain(xp.where(epsilon < 0, negative, value))


def gdp_delta(epsilon, mu):
    """Exact `delta(epsilon)` of a mu-GDP mechanism.

    Args:
      epsilon: at least 0, natural log, any shape.
      mu: at least 0; 0 gives 0, infinity gives 1.
    """
    arrays.check_epsilon(epsilon)
    xp, _, (log_delta,) = library(gdp_log_delta(epsilon, mu))
    return plain(xp.exp(log_delta))


def gdp_to_delta(mu, epsilon):
    """`gdp_delta` with the arguments the other way round."""
    return gdp_delta(epsilon, mu)


def gdp_epsilon(delta, mu):
    """The least epsilon >= 0 with `gdp_delta(epsilon, mu) <= delta`, from above; 0 where delta(0) is enough.

    Args:
      delta: in (0, 1).
      mu: at least 0; infinity gives infinity.
    """
    arrays.check_delta(delta)
    arrays.check_mu(mu)
    xp, _, (delta, mu) = library(delta, mu)
    finite = xp.isfinite(mu)
    m = xp.where(finite, mu, 1.0)
    target = xp.log(delta)
    # delta(eps) <= Phi(-x), x = eps/mu - mu/2, and Phi(-x) <= e^(-x^2/2); with room for roundings.
    finite = finite & (m <= _LARGEST_MU)
    m = xp.where(finite, m, 1.0)
    most = (m**2 / 2 + m * xp.sqrt(-2 * target)) * (1 + 2.0**-49)
    zero = xp.zeros_like(most)
    _, high = bisect(lambda eps: library(gdp_log_delta(eps, m))[2][0] > target, zero, most)
    enough = library(gdp_log_delta(zero, m))[2][0] <= target
    return plain(xp.where(finite, xp.where(enough, 0.0, high), xp.inf))


def gdp_to_epsilon(mu, delta):
    """`gdp_epsilon` with the arguments the other way round."""
    return gdp_epsilon(delta, mu)


def gdp_mu(epsilon, delta):
    """The largest mu with `gdp_delta(epsilon, mu) <= delta`, from below.

    Args:
      epsilon: at least 0 and finite.
      delta: in (0, 1).
    """
    arrays.check("epsilon", epsilon, "finite and at least 0", lambda e: np.isfinite(e) & (e >= 0))
    arrays.check_delta(delta)
    xp, _, (epsilon, delta) = library(epsilon, delta)
    target = xp.log(delta)
    scale = xp.sqrt(-2 * target) + xp.sqrt(-2 * xp.log1p(-delta))
    high = 2 * scale + xp.sqrt(2 * epsilon) + 2.0
    low, _ = bisect(
        lambda log_mu: library(gdp_log_delta(epsilon, xp.exp(log_mu)))[2][0] <= target,
        xp.log(high) - 750.0,
        xp.log(high),
    )
    return plain(xp.exp(low))


def compose_gdp(mus):
    """The mu of the composition of mechanisms with these: `sqrt(sum mu_i^2)`, over the last axis."""
    arrays.check_mu(mus, "mus")
    xp, _, (mus,) = library(mus)
    return plain(xp.sqrt(xp.sum(mus**2, axis=-1)))


def group_gdp(mu, g):
    """The mu for groups of `g`: `g mu`."""
    arrays.check_mu(mu)
    arrays.check("g", g, "an integer of at least 1", lambda k: (k >= 1) & (k == np.floor(k)))
    _, _, (mu, g) = library(mu, g)
    return plain(mu * g)


def gdp_to_zcdp(mu):
    """The rho of zCDP: `mu^2 / 2`."""
    arrays.check_mu(mu)
    _, _, (mu,) = library(mu)
    return plain(mu**2 / 2)


def gdp_to_rdp(mu, order):
    """Renyi divergence of this order, above 1: `order mu^2 / 2`."""
    arrays.check_mu(mu)
    arrays.check("order", order, "above 1", lambda a: a > 1)
    _, _, (mu, order) = library(mu, order)
    return plain(order * mu**2 / 2)


def dp_tradeoff(alpha, epsilon, delta):
    """`f_{eps,delta}(alpha) = max(0, 1 - delta - e^eps alpha, e^-eps (1 - delta - alpha))`.

    arXiv 2212.05796 prints `min` for `max`, which is 0 or below everywhere (proofs/errata.md).
    """
    arrays.check_level(alpha)
    arrays.check_epsilon(epsilon)
    arrays.check("delta", delta, "in [0, 1]", lambda d: (d >= 0) & (d <= 1))
    xp, _, (alpha, epsilon, delta) = library(alpha, epsilon, delta)
    steep = 1 - delta - xp.where(alpha > 0, xp.exp(epsilon) * alpha, 0.0)
    flat = xp.exp(-epsilon) * (1 - delta - alpha)
    return plain(xp.maximum(0.0, xp.maximum(steep, flat)))


def _mills(xp, special, x):
    """`(1 - Phi(x)) / phi(x)`, where there is no `erfcx`, as in older JAX, by a continued fraction."""
    if hasattr(special, "erfcx"):
        return math.sqrt(math.pi / 2) * special.erfcx(x / math.sqrt(2))
    far = x > _FAR
    high, low = xp.where(far, x, _FAR), xp.where(far, 0.0, x)
    near = math.sqrt(math.pi / 2) * xp.exp(low * low / 2) * special.erfc(low / math.sqrt(2))
    return xp.where(far, 1 / (high + _fraction(high)), near)


def _slope(xp, special, x):
    """`1 - x m(x) = -m'(x)`, positive: m K with `m = 1 / (x + K)`, `K = 1/(x + 2/(x + 3/(x + ..`."""
    far = x > _FAR
    high = xp.where(far, x, _FAR)
    tail = _fraction(high)
    low = xp.where(far, 0.0, xp.maximum(x, -37.0))
    return xp.where(far, tail / (high + tail), 1 - low * _mills(xp, special, low))


def _fraction(x):
    """`1/(x + 2/(x + 3/(x + ..`, without its first 1: 60 terms."""

    def term(index, tail):
        return (60 - index) / (x + tail)

    if isinstance(x, jax.Array):
        return jax.lax.fori_loop(0, 60, term, 0.0 * x)
    tail = 0.0 * x
    for index in range(60):
        tail = term(index, tail)
    return tail
