"""The privacy profile that stored histograms of losses estimate."""

import numpy as np

from jaxacct.core.check import DirectionVerdict, Verdict
from jaxacct.core.evidence import Mean
from jaxacct.statistics import hockey_stick
from jaxacct.statistics.hockey_stick import Direction, dense_counts


def profile(verdict: Verdict, epsilons: np.ndarray) -> np.ndarray:
    """Return the estimated delta at each of `epsilons` (natural log), both directions where both were drawn.

    An estimate without a guarantee: binned losses rounded pessimistically, of the mechanism alone where
    another is composed in. NaN where no loss was stored.
    """
    nothing = np.full(epsilons.shape, np.nan)
    if verdict.remove is None or verdict.add is None:
        return nothing
    remove, add = (_of_direction(verdict, side, epsilons) for side in verdict.directions)
    # Samples whose weights are unknown leave the larger direction open.
    unknown = np.isnan(remove) & (verdict.remove.num_samples > 0)
    return np.where(unknown, np.nan, np.fmax(remove, add))


def _of_direction(verdict: Verdict, of: DirectionVerdict, epsilons: np.ndarray) -> np.ndarray:
    """The curve of one direction; NaN where its weights are not a function of the losses alone.

    Those of replicas where columns overlap have one more factor (`proposals.overlaps`).
    """
    if not isinstance(of.side, Mean):
        return np.full(epsilons.shape, np.nan)
    family, claim = of.side.proposal.family, verdict.claim
    of_losses = family in ("replicas", "composed-replicas") and not claim.mechanism.is_upper_bound
    if family != "plain" and not of_losses:
        return np.full(epsilons.shape, np.nan)
    losses = hockey_stick.loss_bounds(of.direction)
    counts = dense_counts(of.side.loss_counts, losses.size)
    losses, counts = losses[counts > 0], counts[counts > 0]
    # M = Z s e^{(1-m) target} gives Z back, s = (1/(m-1)) ((m-1)/m)^m or what is composed has in its place;
    # the weight of a sample is Z e^{(1-m) L}.
    m, log_weights = of.replicas, np.zeros(losses.size)
    if of.direction == Direction.REMOVE and m > 1:
        composed = claim.target.composition
        largest = m * np.log((m - 1) / m) - np.log(m - 1) if composed is None else composed.log_largest(m - 1)
        log_normalizer = np.log(of.scale) - largest + (m - 1) * claim.target.epsilon
        # Weights fall with L, so a binned loss weighs as its bin's lower edge: pessimistic again.
        log_weights = log_normalizer + (1 - m) * (losses - hockey_stick.LOSS_BIN_WIDTH)
    weights = np.exp(log_weights) * counts / of.num_samples
    sign = of.direction.sign
    return np.array([float(np.sum(weights * hockey_stick.hockey_stick(e - sign * losses))) for e in epsilons])
