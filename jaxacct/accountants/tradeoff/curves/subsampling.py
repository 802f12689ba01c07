"""The subsampling operator C_p.

`C_p(f) = (min{f_p, f_p^-1})**`, `f_p = p f + (1-p) Id` (arXiv 1905.02383, definition 6): fixed-size
sampling of a share p without replacement turns a mechanism with symmetric trade-off f into one with C_p(f),
replace-one adjacency. Its profile is `p delta_f(log(1 + (e^eps - 1) / p))` for eps >= 0, by symmetry for
negative eps.
"""

import numpy as np
from scipy import special

from jaxacct.accountants.tradeoff.curves import arrays
from jaxacct.accountants.tradeoff.curves.arrays import plain


def amplified_epsilon(epsilon, sampling_prob):
    """Return `log(1 + (e^epsilon - 1) / p)` for epsilon >= 0, without overflow; p > 0."""
    epsilon, p = np.asarray(epsilon, np.float64), np.asarray(sampling_prob, np.float64)
    small = np.minimum(epsilon, 30.0)
    # Beyond e^30 the 1 - 1/p next to e^eps / p needs only first order.
    large = epsilon - np.log(p) + np.log1p((p - 1) * np.exp(-np.maximum(epsilon, 30.0)))
    return plain(np.where(epsilon <= 30.0, np.log1p(np.expm1(small) / p), large))


def subsampled_gdp_clt(p, steps, mu):
    """Return the mu to which `steps` compositions of C_p(G_mu) tend as p sqrt(steps) stays bounded.

    NOT a bound: it may understate or overstate epsilon. `sqrt(2) p sqrt(steps kappa(mu))`,
    `kappa = e^(mu^2) Phi(1.5 mu) + 3 Phi(-mu/2) - 2` (arXiv 1905.02383, corollary 4; arXiv 2403.00278,
    lemma A.5).
    """
    p, mu, steps = (
        arrays.share("sampling_prob", p),
        arrays.nonnegative("mu", mu),
        arrays.nonnegative("steps", steps),
    )
    # e^(mu^2) Phi(1.5 mu) - Phi(1.5 mu) + [Phi(1.5 mu) - 3 Phi(mu/2) + 1]: no cancellation in the first part;
    # the bracket is O(mu^3), by its series where mu is small.
    small = mu < 1e-3
    m = np.where(small, 1.0, mu)
    exact = np.expm1(m**2) * special.ndtr(1.5 * m) + special.ndtr(1.5 * m) + 3 * special.ndtr(-m / 2) - 2
    phi0 = 0.3989422804014327
    series = np.expm1(mu**2) * special.ndtr(1.5 * mu) - phi0 * mu**3 / 2
    kappa = np.where((p > 0) & (steps > 0), np.where(small, series, exact), 0.0)
    return plain(p * np.sqrt(2 * steps * kappa))
