"""Printed tails of participation distributions (arXiv 2212.05796): sound, far looser than the exact ones."""

import math

from jaxacct.statistics.bounds import kl


def individual_subsampling_tail(dataset_size, num_microbatches, num_epochs, group_size, gamma=1.0):
    """Return `(cut on c, tail mass)` of lemma E.4, individual clipping with subsampling.

    `cut^2 = beta min(m, g) g E`, `beta = e^(N / (N - g - m)) + gamma`, `l = e^(-gamma g E)`; any gamma > 0.
    """
    n, m, epochs, g = dataset_size, num_microbatches, num_epochs, group_size
    beta = math.exp(n / (n - g - m)) + gamma
    return math.sqrt(beta * min(m, g) * g * epochs), math.exp(-gamma * g * epochs)


def shuffled_batch_head(num_batches, group_size):
    """Return `(cut on c, head mass)` of theorem F.1, one epoch: `sqrt(g)` but for `g^2 / (R - g - g^2)`."""
    return math.sqrt(group_size), group_size**2 / (num_batches - group_size - group_size**2)


def chernoff_tail(trials, probability, cut):
    """Return a bound on `P(X > cut)` of a binomial X, in place of the printed one of Hoeffding's name."""
    share = cut / trials
    if share <= probability:
        return 1.0
    return 0.0 if share >= 1 else math.exp(-trials * kl(share, probability))
