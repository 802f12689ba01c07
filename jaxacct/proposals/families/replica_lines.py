"""Budget items for replicas whose weights are no function of the loss alone (`families.replicas`).

The weight has two losses: that of the mechanism, and that of what is drawn: one of a unit's examples, or the
same sampling at an inflated probability.
"""

import dataclasses
import functools
import math

from jaxacct.likelihood import rounding
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.families.pair_weights import one_of
from jaxacct.statistics.lines import BudgetLine, Item


@functools.lru_cache(maxsize=512)
def inflated_lines(
    mechanism: Mechanism, times: int, replicas: int, log_normalizer: float, delta_v: float
) -> tuple[BudgetLine, ...]:
    """Return the budget items for weights `ln Z' + L - replicas L'`, L' at the inflated probability.

    With `g >= r f`, r the least ratio of the probabilities of any vector: `E_P G_{>k} / g <= P'(> k) / r`,
    and `E_P g <= Z'_2 / r`.
    """
    inflated, _ = one_of(mechanism, times)
    assert inflated is not None
    scheme, log_ratio = mechanism.scheme.inflated(times)  # pyrefly: ignore[not-iterable]
    log_none, inflated_log_none = (each.log_probability_of_none() for each in (mechanism.scheme, scheme))
    log_min_ratio = min(log_ratio, inflated_log_none - log_none) - 1e-9
    rare, module = rounding.DELTA_SHARE * delta_v, scheme.replicas(inflated)

    def size_of(share):
        rarest = math.log(rare) + math.log(share) + log_min_ratio if share > 0 else -math.inf
        largest = math.inf
        if module is not None:
            largest = module.log_normalizer(inflated) - log_min_ratio - math.log(rare)
        return _drawn_sizes(inflated, replicas, rare, rarest, largest)

    drawn = rounding.bounded(inflated, replicas, size_of)
    return _lines_of_two(
        mechanism, delta_v, replicas, log_normalizer, drawn, replicas, "3a", Item.WEIGHTS_INFLATED
    )


@functools.lru_cache(maxsize=512)
def pair_lines(
    mechanism: Mechanism, replicas: int, log_normalizer: float, delta_v: float
) -> tuple[BudgetLine, ...]:
    """Return the budget items for weights `ln Z - (replicas - number) L_1` and less, L_1 that of one example.

    Those of weights `ln Z + L - replicas L_1`, which have more of both losses. Given the outputs, a user's
    own vectors have another distribution here than there, so outputs at which they are rare are reserved.
    """
    one, number = one_of(mechanism)
    assert one is not None
    rare = rounding.DELTA_SHARE * delta_v

    def size_of(share):
        # E_P f_1 <= Z_2 at sigma / sqrt m, and E_P F_{>k} <= (P(> k) Z_2')^{1/2}, Z_2' at sigma / sqrt(2 m).
        rarest = -math.inf
        if share > 0:
            rarest = 2 * (math.log(rare) + math.log(share) + one.scheme.sums.log_none)
            rarest -= rounding.log_coincidence(mechanism, 2 * number)
        largest = rounding.log_coincidence(mechanism, number) - math.log(rare)
        return _drawn_sizes(one, replicas, rare, rarest, largest)

    drawn, as_units = rounding.bounded(one, replicas, size_of), -(-replicas // number)
    lines = _lines_of_two(
        mechanism, delta_v, replicas, log_normalizer, drawn, as_units, "7", Item.WEIGHTS_OF_ONE
    )
    lines += (BudgetLine(Item.OWN_RARE_OUTPUTS, "delta", rare**2, rounding.SOURCE + "7"),)
    return lines if mechanism.scheme.pair_bound is None else _by_pairs(mechanism, delta_v, lines, as_units)


def plain_lines_by_pairs(mechanism: Mechanism, delta_v: float) -> tuple[BudgetLine, ...]:
    """Return the budget items for plain samples of the remove direction with losses of pairs of examples."""
    return _by_pairs(mechanism, delta_v, rounding.loss_lines(mechanism, delta_v), 1)


def _by_pairs(mechanism, delta_v, lines: tuple[BudgetLine, ...], as_units: int) -> tuple[BudgetLine, ...]:
    """Return the items of the loss by pairs of examples, from `lines`, those of the loss of all examples.

    Errors of scores change it at most as much. The recurrence is that of two examples, whose likelihood ratio
    is at most the square of that of one. The outputs contain `as_units` of the unit's participation vectors.
    """
    scheme = mechanism.scheme
    pairs, left = divmod(scheme.parts[1], 2)
    size = rounding.sizes(mechanism, delta_v, as_units, 0.0)
    size = dataclasses.replace(size, largest=2 * size.largest)
    # The overlap of two counts this many times.
    sharing = mechanism.noise_multiplier / math.sqrt(scheme.parts[1] - 1 + left)
    two = Mechanism(scheme.pair_bound, mechanism.strategy, sharing)
    amount = pairs * rounding.interacting_error(two, size, rounding.max_unit_participations(two.scheme))
    alone = next(line.amount for line in lines if line.item is Item.RATIO)
    by_pairs = BudgetLine(Item.RATIO, "epsilon", amount + alone, rounding.SOURCE + "7")
    return tuple(by_pairs if line.item is Item.RATIO else line for line in lines)


def _drawn_sizes(
    drawn: Mechanism, replicas: int, rare: float, log_rarest: float, log_max: float
) -> rounding.Size:
    """Return the sizes of the loss of `drawn`, whose replicas are drawn for the target of another mechanism.

    Two events are excluded, each of probability `rare` under the target distribution: more participations
    than are counted, of log probability `log_rarest` under `drawn` (-inf counts all), and a log-likelihood
    ratio above `log_max`.
    """
    count, most, beyond = drawn.scheme.max_participations, drawn.scheme.max_participations, 0.0
    if log_rarest > -math.inf:
        count = rounding.fewest_participations(drawn.scheme, log_rarest)
        beyond = rare if count < most else 0.0
    noise, score, ratio = rounding.magnitudes(drawn, replicas)
    of_all = count * (ratio + 1 / drawn.noise_multiplier**2)
    largest, above = (log_max, rare) if log_max < of_all else (of_all, 0.0)
    norm = replicas * math.sqrt(count)
    return rounding.Size(count, beyond, norm, largest, above, noise, score, ratio, transformed=True)


def _lines_of_two(
    mechanism: Mechanism,
    delta_v: float,
    replicas: int,
    log_normalizer: float,
    drawn: rounding.Bounded,
    as_units: int,
    section: str,
    item: Item,
) -> tuple[BudgetLine, ...]:
    """Return the budget items for weights `ln Z + L - replicas L'`, L' the loss of what is drawn.

    Args:
      mechanism: the mechanism of the loss L.
      delta_v: as for `rounding.loss_lines`.
      replicas: of the other mechanism.
      log_normalizer: ln Z.
      drawn: errors of L'.
      as_units: how many of the unit's participation vectors are in the outputs.
      section: of proofs/rounding.md.
      item: of the weights.
    """

    def size_of(share):
        size = rounding.sizes(mechanism, delta_v, as_units, share)
        return dataclasses.replace(size, drawn=drawn.size.drawn, transformed=True)

    size, _, errors = rounding.bounded(mechanism, as_units, size_of)
    rare = size.beyond + size.above + drawn.size.beyond + drawn.size.above
    logs = abs(log_normalizer) + size.largest * mechanism.scheme.sums.times + replicas * drawn.size.largest
    normals, transform, recurrence = errors
    weight = normals + transform + recurrence + replicas * sum(drawn.errors) + 4 * rounding.UNIT * logs
    return (
        *rounding.common_lines(mechanism, errors, rare, section),
        rounding.relative_line(item, weight, rounding.SOURCE + section),
        *rounding.draw_lines(replicas * drawn.share, section),
    )
