"""Bounds on membership inference and reconstruction from a guarantee.

The adversary decides from everything released whether an example participated or was zeroed out. For every
test and every epsilon, `TPR <= e^epsilon FPR + delta(epsilon)`, and with the roles exchanged
`1 - FPR <= e^epsilon (1 - TPR) + delta(epsilon)`, delta being the larger one of both directions
(Wasserman and Zhou, JASA 2010; Kairouz, Oh and Viswanath, ICML 2015, theorem 2).
"""

import numpy as np

from jaxacct.accountants.tradeoff.curves import arrays
from jaxacct.estimates.profile import Profile
from jaxacct.statistics.hockey_stick import DIRECTIONS


def true_positive_rate(epsilons, deltas, false_positive_rate, name: str = "false_positive_rate"):
    """Return an upper bound on TPR at a false positive rate, given points of a privacy profile.

    Args:
      epsilons: () or (points,) at least 0, natural log.
      deltas: of the same shape, in [0, 1]: of both directions.
      false_positive_rate: () or (rates,) in [0, 1].
      name: of that argument, for messages.

    Returns:
      Float64 of the shape of `false_positive_rate`. A bound if the deltas are bounds, an estimate if they are
      estimates.

    Raises:
      ValueError: for numbers outside their ranges, NaN among them.
    """
    epsilons, deltas = _points(epsilons, deltas)
    rates = arrays.share(name, false_positive_rate)
    alpha = rates[..., None]
    with np.errstate(over="ignore", invalid="ignore"):
        low = np.exp(epsilons) * alpha + deltas
    high = 1 - np.exp(-epsilons) * (1 - deltas - alpha)
    # Where alpha is 0 and e^epsilon infinite the product is NaN: the bound there is delta.
    low = np.where(np.isnan(low), deltas, low)
    return np.maximum(rates, np.minimum(1.0, np.minimum(low, high).min(axis=-1)))


def interval_of_tests(bands: Profile, false_positive_rates) -> tuple[np.ndarray, np.ndarray]:
    """Return lower ends and estimates of the best test's true positive rates.

    The best test's curve is the least of its tangents, one for each epsilon of either sign; those between
    two points of the grid lie above the line with the slope of the left one and the delta of the right one.
    Upper ends are `true_positive_rate(bands.epsilons, bands.upper, ...)`.

    Args:
      bands: of `privacy_profile`, from epsilon 0.
      false_positive_rates: (rates,) in [0, 1].

    Returns:
      Two (rates,) float64, for the better one of tests for presence and for absence; the lower ends hold with
      the confidence of the bands.
    """
    at = np.asarray(false_positive_rates, np.float64)[:, None]
    slopes = np.exp(bands.epsilons)

    def least(one, other):
        lines = np.minimum(slopes * at + one, 1 - (1 - other - at) / slopes)
        return np.maximum(at[:, 0], np.clip(lines.min(axis=1), 0, 1))

    def best(row, shift):
        deltas = (bands.directions[direction][row] for direction in DIRECTIONS)
        remove, add = (np.append(delta[shift:], np.zeros(shift)) for delta in deltas)
        return np.maximum(least(remove, add), least(add, remove))

    return best(0, 1), best(1, 0)


def advantage(epsilons, deltas) -> float:
    """Return an upper bound on `TPR - FPR`: the minimum of `(e^epsilon - 1 + 2 delta) / (e^epsilon + 1)`.

    Raises:
      ValueError: for numbers outside their ranges, NaN among them.
    """
    epsilons, deltas = _points(epsilons, deltas)
    each = np.tanh(epsilons / 2) + deltas * (1 - np.tanh(epsilons / 2))
    return float(np.minimum(1.0, each.min()))


def reconstruction(epsilons, deltas, baseline):
    """Return an upper bound on the probability of reconstructing an example, given the prior probability.

    An attacker has everything but one example z, drawn from a public prior, and estimates z from the release,
    up to a tolerance. Without the release an estimate is right with probability at most `baseline`. With Q
    the distribution of the release with z zeroed out and E_z the releases with a correct estimate of z,

        P(right) = E_z P_z(E_z) <= E_z TPR(Q(E_z)) <= TPR(E_z Q(E_z)) <= TPR(baseline):

    `true_positive_rate` bounds every test, it is concave, a minimum of lines, and it does not fall, and under
    Q the release is independent of z. So the bound is the true positive rate at that false positive rate.

    Args:
      epsilons: as in `true_positive_rate`.
      deltas: as in `true_positive_rate`.
      baseline: () or (chances,) in [0, 1].

    Source: Hayes, Mahloujifar and Balle (arXiv 2302.07225), theorem 2.
    """
    return true_positive_rate(epsilons, deltas, baseline, "baseline")


def _points(epsilons, deltas) -> tuple[np.ndarray, np.ndarray]:
    found = np.atleast_1d(arrays.nonnegative("epsilons", epsilons), arrays.share("deltas", deltas))
    if found[0].shape != found[1].shape or found[0].ndim != 1:
        raise ValueError(f"epsilons and deltas must be equally many numbers, got {epsilons!r} and {deltas!r}")
    return found[0], found[1]


__all__ = ["advantage", "interval_of_tests", "reconstruction", "true_positive_rate"]
