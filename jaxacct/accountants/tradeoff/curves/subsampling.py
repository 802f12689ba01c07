"""The subsampling operator C_p and the subsampled Gaussian in closed form.

`C_p(f) = (min{f_p, f_p^-1})**`, `f_p = p f + (1-p) Id` (arXiv 1905.02383, definition 6): fixed-size
sampling of a share p without replacement turns a mechanism with symmetric trade-off f into one with C_p(f),
replace-one adjacency. Its profile is `p delta_f(log(1 + (e^eps - 1) / p))` for eps >= 0, by symmetry for
the rest.
"""

import numpy as np

from jaxacct.accountants.tradeoff.curves import arrays
from jaxacct.accountants.tradeoff.curves.arrays import bisect, library, plain
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_log_delta


def check_share(p) -> None:
    """A sampled share is in [0, 1]."""
    arrays.check("sampling_prob", p, "in [0, 1]", lambda q: (q >= 0) & (q <= 1))


def amplified_epsilon(epsilon, sampling_prob):
    """`log(1 + (e^epsilon - 1) / p)` for epsilon >= 0, without overflow; p > 0."""
    xp, _, (epsilon, p) = library(epsilon, sampling_prob)
    small = xp.minimum(epsilon, 30.0)
    # Beyond e^30 the 1 - 1/p next to e^eps / p needs only first order.
    large = epsilon - xp.log(p) + xp.log1p((p - 1) * xp.exp(-xp.maximum(epsilon, 30.0)))
    return plain(xp.where(epsilon <= 30.0, xp.log1p(xp.expm1(small) / p), large))


def subsampled_gdp_tradeoff(alpha, mu, sampling_prob):
    """`C_p(G_mu)(alpha)`.

    `p Phi(Phi^-1(1-alpha) - mu) + (1-p)(1-alpha)` up to `Phi(-mu/2)`, then slope -1, then the inverse of the
    first piece, by bisection.

    Args:
      alpha: in [0, 1].
      mu: of the mechanism on the sample, at least 0 and finite.
      sampling_prob: p in [0, 1].
    """
    arrays.check_level(alpha)
    arrays.check("mu", mu, "finite and at least 0", lambda m: np.isfinite(m) & (m >= 0))
    check_share(sampling_prob)
    xp, special, (alpha, mu, p) = library(alpha, mu, sampling_prob)
    left = special.ndtr(-mu / 2)
    right = p * left + (1 - p) * special.ndtr(mu / 2)

    def first(a):
        return p * special.ndtr(-special.ndtri(a) - mu) + (1 - p) * (1 - a)

    # f_p falls from 1 to 0: its inverse at alpha, for alpha past the middle.
    zero = 0.0 * (alpha + mu + p)
    low, high = bisect(
        lambda z: p * special.ndtr(z - mu) + (1 - p) * special.ndtr(z) < alpha, zero - 40, zero + 40 + mu
    )
    inverse = special.ndtr(-(low + high) / 2)
    middle = left + right - alpha
    value = xp.where(alpha <= left, first(alpha), xp.where(alpha <= right, middle, inverse))
    value = xp.where(alpha >= 1, 0.0, value)
    return plain(xp.clip(value, 0.0, 1.0))


def subsampled_gaussian_tradeoff(p, mu, alpha):
    """`subsampled_gdp_tradeoff` with the arguments in the order (p, mu, alpha)."""
    return subsampled_gdp_tradeoff(alpha, mu, p)


def subsampled_gdp_delta(epsilon, mu, sampling_prob):
    """`delta(epsilon)` of C_p(G_mu): `p delta_{G_mu}(log(1 + (e^eps - 1)/p))`, epsilon >= 0."""
    arrays.check_epsilon(epsilon)
    arrays.check_mu(mu)
    check_share(sampling_prob)
    xp, _, (epsilon, mu, p) = library(epsilon, mu, sampling_prob)
    share = xp.where(p > 0, p, 1.0)
    log_delta = library(gdp_log_delta(library(amplified_epsilon(epsilon, share))[2][0], mu))[2][0]
    return plain(p * xp.exp(log_delta))


def subsampled_gdp_clt(p, steps, mu):
    """The mu to which `steps` compositions of C_p(G_mu) tend as p sqrt(steps) stays bounded. NOT a bound.

    `sqrt(2) p sqrt(steps kappa(mu))`, `kappa = e^(mu^2) Phi(1.5 mu) + 3 Phi(-mu/2) - 2` (arXiv 1905.02383,
    corollary 4; arXiv 2403.00278, lemma A.5). It may understate or overstate epsilon.
    """
    check_share(p)
    arrays.check_mu(mu)
    arrays.check("steps", steps, "at least 0", lambda k: k >= 0)
    xp, special, (p, steps, mu) = library(p, steps, mu)
    # e^(mu^2) Phi(1.5 mu) - Phi(1.5 mu) + [Phi(1.5 mu) - 3 Phi(mu/2) + 1]: both parts without cancellation
    # in the first; the bracket is O(mu^3), by its series where mu is small.
    small = mu < 1e-3
    m = xp.where(small, 1.0, mu)
    exact = xp.expm1(m**2) * special.ndtr(1.5 * m) + special.ndtr(1.5 * m) + 3 * special.ndtr(-m / 2) - 2
    phi0 = 0.3989422804014327
    series = xp.expm1(mu**2) * special.ndtr(1.5 * mu) - phi0 * mu**3 / 2
    kappa = xp.where((p > 0) & (steps > 0), xp.where(small, series, exact), 0.0)
    return plain(p * xp.sqrt(2 * steps * kappa))
