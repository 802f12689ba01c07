"""Bounds from tails of a participation law (arXiv 2212.05796, definitions 5.3 and 5.4).

A lower bound on T is a guarantee; an upper one only limits what can be proved, and only for the adversary who
sees the sampling. `l` must bound `P(c > cut)` and `u` must bound `P(c < cut)`: take them from
`ParticipationPMF.tail` and `.head` (the tails printed as Hoeffding's are not bounds; proofs/errata.md).
"""

import math

import numpy as np

from jaxacct.accountants.tradeoff.curves import arrays
from jaxacct.accountants.tradeoff.curves.arrays import bisect, library, plain
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_tradeoff
from jaxacct.common import validate as _validate


def tail_lower_tradeoff(alpha, mu, tail_mass, *, symmetrize: bool = True):
    """f_L: a guarantee, where c <= mu sigma but for a probability `tail_mass`.

    `G_mu(alpha) - l` up to the fixed point of that, then `G_mu(min(1, alpha + l))`; only the latter with
    `symmetrize=False`.

    Args:
      alpha: in [0, 1].
      mu: cut / sigma, at least 0.
      tail_mass: l in [0, 1].
    """
    arrays.check_level(alpha)
    arrays.check_mu(mu)
    arrays.check("tail_mass", tail_mass, "in [0, 1]", lambda t: (t >= 0) & (t <= 1))
    xp, _, (alpha, mu, lost) = library(alpha, mu, tail_mass)

    def G(level):
        return library(gdp_tradeoff(level, mu))[2][0]

    shifted = G(xp.minimum(1.0, alpha + lost))
    if not symmetrize:
        return plain(shifted)
    zero = 0.0 * (alpha + mu + lost)
    fixed, _ = bisect(lambda b: G(b) - lost > b, zero, zero + 1.0)
    return plain(xp.maximum(0.0, xp.where(alpha <= fixed, G(alpha) - lost, shifted)))


def tail_upper_tradeoff(alpha, mu, head_mass, *, symmetrize: bool = True):
    """f_U: no guarantee can exceed it when sampling is revealed, where c >= mu sigma but for `head_mass`.

    `u + (1-u) G_mu(alpha)`, symmetrised by double conjugate in closed form; `symmetrize=False` gives that
    line itself, which is no trade-off function (it ends at u, not 0).

    Args:
      alpha: in [0, 1].
      mu: cut / sigma, above 0.
      head_mass: u in [0, 1).
    """
    arrays.check_level(alpha)
    arrays.check("mu", mu, "above 0 and finite", lambda m: np.isfinite(m) & (m > 0))
    arrays.check("head_mass", head_mass, "in [0, 1)", lambda t: (t >= 0) & (t < 1))
    xp, special, (alpha, mu, u) = library(alpha, mu, head_mass)

    def G(level):
        return library(gdp_tradeoff(level, mu))[2][0]

    line = u + (1 - u) * G(alpha)
    if not symmetrize:
        return plain(line)
    left = special.ndtr(xp.log1p(-u) / mu - mu / 2)
    right = u + (1 - u) * special.ndtr(-mu / 2 - xp.log1p(-u) / mu)
    last = G(xp.clip((alpha - u) / (1 - u), 0.0, 1.0))
    return plain(xp.where(alpha <= left, line, xp.where(alpha <= right, left + right - alpha, last)))


def individual_subsampling_tail(
    dataset_size: int, num_microbatches: int, num_epochs: int, group_size: int, gamma: float = 1.0
) -> tuple[float, float]:
    """`(cut on c, tail mass)` of lemma E.4 for individual clipping with subsampling: sound, very loose.

    `cut^2 = beta min(m, g) g E`, `beta = e^(N / (N - g - m)) + gamma`, `l = e^(-gamma g E)`; any gamma > 0.
    """
    for name, value in (
        ("dataset_size", dataset_size),
        ("num_microbatches", num_microbatches),
        ("num_epochs", num_epochs),
        ("group_size", group_size),
    ):
        _validate.positive_integer(name, value)
    _validate.positive_number("gamma", gamma)
    rest = dataset_size - group_size - num_microbatches
    if rest <= 0:
        raise ValueError(
            f"dataset_size must be above group_size + num_microbatches = {group_size + num_microbatches}, "
            f"was {dataset_size}"
        )
    beta = math.exp(dataset_size / rest) + gamma
    cut = math.sqrt(beta * min(num_microbatches, group_size) * group_size * num_epochs)
    return cut, math.exp(-gamma * group_size * num_epochs)


def shuffled_batch_head(num_batches: int, group_size: int) -> tuple[float, float]:
    """`(cut on c, head mass)` of theorem F.1 for one epoch: `c = sqrt(g)` but for `g^2 / (R - g - g^2)`."""
    _validate.positive_integer("num_batches", num_batches)
    _validate.positive_integer("group_size", group_size)
    rest = num_batches - group_size - group_size**2
    if rest <= 0 or group_size**2 >= rest:
        raise ValueError(
            f"num_batches must be above g + 2 g^2 = {group_size + 2 * group_size**2}, was {num_batches}"
        )
    return math.sqrt(group_size), group_size**2 / rest


def chernoff_tail(trials: int, probability: float, cut: float) -> float:
    """`P(X > cut) <= exp(-trials KL(cut/trials || p))` for a binomial X: what Hoeffding's printed bound is
    not."""
    from jaxacct.statistics.bounds import kl

    _validate.positive_integer("trials", trials)
    _validate.probability("probability", probability)
    share = cut / trials
    if share <= probability:
        return 1.0
    return 0.0 if share >= 1 else math.exp(-trials * kl(share, probability))
