"""Bounds from tails of a participation distribution (arXiv 2212.05796, definitions 5.3 and 5.4).

A lower bound on T is a guarantee; an upper one only limits what can be proved, and only against the adversary
who sees the sampling. `l` must bound `P(c > cut)` and `u` must bound `P(c < cut)`: take them from
`ParticipationPMF.tail` and `.head` (the tails printed as Hoeffding's are not bounds; proofs/errata.md).
"""

import math

import numpy as np
from scipy import special

from jaxacct.accountants.tradeoff.curves import arrays
from jaxacct.accountants.tradeoff.curves.arrays import bisect, plain
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_tradeoff
from jaxacct.common import validate as _validate
from jaxacct.statistics.bounds import kl


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


def individual_subsampling_tail(
    dataset_size: int, num_microbatches: int, num_epochs: int, group_size: int, gamma: float = 1.0
) -> tuple[float, float]:
    """Return `(cut on c, tail mass)` of lemma E.4, individual clipping with subsampling: sound, very loose.

    `cut^2 = beta min(m, g) g E`, `beta = e^(N / (N - g - m)) + gamma`, `l = e^(-gamma g E)`; any gamma > 0.

    Args:
      dataset_size: N.
      num_microbatches: m terms a round.
      num_epochs: E.
      group_size: g records.
      gamma: above 0.
    """
    n = _validate.positive_integer("dataset_size", dataset_size)
    m = _validate.positive_integer("num_microbatches", num_microbatches)
    epochs = _validate.positive_integer("num_epochs", num_epochs)
    g = _validate.positive_integer("group_size", group_size)
    _validate.positive_number("gamma", gamma)
    if n <= g + m:
        raise ValueError(f"dataset_size must be above group_size + num_microbatches = {g + m}, got {n}")
    beta = math.exp(n / (n - g - m)) + gamma
    return math.sqrt(beta * min(m, g) * g * epochs), math.exp(-gamma * g * epochs)


def shuffled_batch_head(num_batches: int, group_size: int) -> tuple[float, float]:
    """Return `(cut on c, head mass)` of theorem F.1, one epoch: `sqrt(g)` but for `g^2 / (R - g - g^2)`."""
    R = _validate.positive_integer("num_batches", num_batches)
    g = _validate.positive_integer("group_size", group_size)
    if R <= g + 2 * g**2:
        raise ValueError(f"num_batches must be above g + 2 g^2 = {g + 2 * g**2}, got {R}")
    return math.sqrt(g), g**2 / (R - g - g**2)


def chernoff_tail(trials: int, probability: float, cut: float) -> float:
    """Return a bound on `P(X > cut)` of a binomial X, `exp(-trials KL(cut/trials || p))`.

    It replaces the printed bound of Hoeffding's name, which is false.
    """
    _validate.positive_integer("trials", trials)
    _validate.probability("probability", probability)
    share = cut / trials
    if share <= probability:
        return 1.0
    return 0.0 if share >= 1 else math.exp(-trials * kl(share, probability))
