"""Bounds from tails of a participation distribution (arXiv 2212.05796, definitions 5.3 and 5.4).

A lower bound on T is a guarantee; an upper one only limits what can be proved, and only against the adversary
who sees the sampling. `l` must bound `P(c > cut)` and `u` must bound `P(c < cut)`: take them from
`ParticipationPMF.tail` and `.head` (the tails printed as Hoeffding's are not bounds; proofs/errata.md).
"""

import numpy as np
from scipy import special

from jaxacct.accountants.tradeoff.curves import arrays
from jaxacct.accountants.tradeoff.curves.arrays import bisect, plain
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_tradeoff


def tail_lower_tradeoff(alpha, mu, tail_mass, *, symmetrize: bool = True):
    """Return f_L: a guarantee, where c <= mu sigma except with probability `tail_mass`.

    `G_mu(alpha) - l` up to the fixed point of that, then `G_mu(min(1, alpha + l))`; only the latter with
    `symmetrize=False`.

    Args:
      alpha: in [0, 1].
      mu: cut / sigma, at least 0.
      tail_mass: l in [0, 1].
      symmetrize: see above.
    """
    alpha, lost = arrays.share("alpha", alpha), arrays.share("tail_mass", tail_mass)
    shifted = gdp_tradeoff(np.minimum(1.0, alpha + lost), mu)
    if not symmetrize:
        return plain(shifted)
    zero = 0.0 * (alpha + mu + lost)
    fixed, _ = bisect(lambda b: gdp_tradeoff(b, mu) - lost > b, zero, zero + 1.0)
    return plain(np.maximum(0.0, np.where(alpha <= fixed, gdp_tradeoff(alpha, mu) - lost, shifted)))


def tail_upper_tradeoff(alpha, mu, head_mass, *, symmetrize: bool = True):
    """Return f_U, above any guarantee with revealed sampling, where c >= mu sigma except with `head_mass`.

    `u + (1-u) G_mu(alpha)`, symmetrised by double conjugate in closed form; `symmetrize=False` gives that
    line itself, which is no trade-off function (it ends at u, not 0).

    Args:
      alpha: in [0, 1].
      mu: cut / sigma, above 0.
      head_mass: u in [0, 1).
      symmetrize: see above.
    """
    alpha = arrays.share("alpha", alpha)
    mu = arrays.checked("mu", mu, "above 0 and finite", lambda m: np.isfinite(m) & (m > 0))
    u = arrays.checked("head_mass", head_mass, "in [0, 1)", lambda t: (t >= 0) & (t < 1))
    line = u + (1 - u) * gdp_tradeoff(alpha, mu)
    if not symmetrize:
        return plain(line)
    left = special.ndtr(np.log1p(-u) / mu - mu / 2)
    right = u + (1 - u) * special.ndtr(-mu / 2 - np.log1p(-u) / mu)
    last = gdp_tradeoff(np.clip((alpha - u) / (1 - u), 0.0, 1.0), mu)
    return plain(np.where(alpha <= left, line, np.where(alpha <= right, left + right - alpha, last)))
