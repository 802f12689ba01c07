"""A proven bound on |float32 loss - exact loss|, for every scheme and proposal (proofs/rounding.md).

Every rounding of a loss `L = ln sum_x p(x) e^{<x, r>}` is a relative error of the summands of participation
vectors x that pass through it. Steps without participation cost next to nothing (`kernels.recurrence`), so a
vector of k participations is off by at most

    D(k) = k local + sqrt(k) joint + common,

and L by D(k) where k is so large that vectors of more participations carry a share `_SHARE` of the sum at
most, but for outputs of a probability that is booked. `local` are roundings of one score and its log-ratio,
`joint` are norm-wise errors of the normals and the Fourier transform, spread over the scores by Cauchy and
Schwarz.

Nothing is measured here; what a draw is really off by is for tests (`tests/rounding_errors.py`).
"""

import dataclasses
import functools
import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import gammaln, ndtri

from jaxacct.kernels import randomness
from jaxacct.kernels.interacting_recurrence import compensates_all
from jaxacct.kernels.recurrence import SOFTPLUS_ROUNDINGS
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.lines import BudgetLine, total
from jaxacct.strategies.stationary import adds_windows, circulant_length

_UNIT = 2.0**-24  # half a unit in the last place
_RARE = 2.0**-50  # probability of each event that is ruled out and booked as total variation
_FOURIER_ROUNDINGS = (4, 6)  # of a transform of length N, norm-wise: 4 log2 N + 6
_SPECTRUM_ROUNDINGS = 5
_PRODUCT_ROUNDINGS = 4  # of a spectrum with that of C's column, rounded to float32: sqrt 5 + 1, and a little
_NORMAL_ROUNDINGS = 15  # of a radius times a sine, relative to the radius
_RATIO_ROUNDINGS = 7  # sigma, its square, the difference, the quotient
_SHARE = 2.0**-20  # of a likelihood ratio that participation vectors beyond the count may carry
_DELTA_SHARE = 1e-3  # of delta_v that outputs with more may have
_SOURCE = "proofs/rounding.md, section "


@dataclass(frozen=True)
class Size:
    """What the bound depends on.

    Attributes:
      count: participations k of the vectors that count; of independent examples those of all together.
      beyond: probability under the target law of outputs at which more of them count.
      drawn: norm of the drawn counts.
      largest: ln of the likelihood ratio, exceeded with probability `above` under the target law; of one
        example, where several are bounded by its power.
      noise: largest |score of the noise| / sigma.
      score: largest |score|.
      ratio: largest |log-ratio of one participation|.
      transformed: whether drawn participations are added by a Fourier transform, however few they are.
    """

    count: int
    beyond: float
    drawn: float
    largest: float
    above: float
    noise: float
    score: float
    ratio: float
    transformed: bool = False


def loss_lines(
    mechanism: Mechanism, delta_v: float, direction: str, replicas: int = 1, push: float = 0.0
) -> tuple[BudgetLine, ...]:
    """The lines for float32 losses of draws of one law.

    Args:
      mechanism: the mechanism.
      delta_v: what the divergence has to stay below; rare outputs are ruled out at its expense.
      direction: "remove" (draws have participations) or "add".
      replicas: participation vectors added up in the drawn outputs, m >= 1.
      push: by how many standard deviations the law moves normalised scores.
    """
    return _loss_lines(mechanism, float(delta_v), direction, int(replicas), float(push))


def coordinate_lines(
    mechanism: Mechanism, delta_v: float, push: float, relative_norm: float
) -> tuple[BudgetLine, ...]:
    """The lines for losses whose coordinate along `C m` was taken from the scores and replaced.

    An error e of the scores is in the old coordinate too, as `<m, e> / |C m|`, and comes back along
    `C^T C m / |C m|`. The loss looks along participations x', of which `|C x'| <= |x'|` where columns share
    no row, so it sees at most `relative_norm = |m| / |C m|` times what it sees of e itself
    (proofs/add_direction.md, section 3). Elsewhere C makes x' longer by its norm at most.
    """
    if mechanism.scheme.examples_overlap or float(np.max(mechanism.cross_terms)) > 0:
        relative_norm *= max(1.0, _largest_amplitude(mechanism.strategy, mechanism.scheme.iterations))
    normals, scores, *others = loss_lines(mechanism, delta_v, Direction.ADD, 1, push)
    again = relative_norm * (normals.amount + scores.amount)
    source = "proofs/add_direction.md, section 3"
    return normals, scores, BudgetLine("rounding of the coordinate", "epsilon", again, source), *others


@functools.lru_cache(maxsize=512)
def _loss_lines(mechanism, delta_v, direction, replicas, push):
    size, share, (normals, transform, recurrence) = _bounded(
        mechanism,
        direction,
        replicas,
        lambda share: sizes(mechanism, delta_v, direction, replicas, push, share),
    )
    lines = [
        BudgetLine("rounding of the normals", "epsilon", normals, _SOURCE + "5"),
        BudgetLine("rounding of the scores", "epsilon", transform, _SOURCE + "4"),
        BudgetLine("rounding of the likelihood ratio", "epsilon", recurrence, _SOURCE + "3"),
        *_lines_of_normals(mechanism),
        BudgetLine("outputs of rare participations", "delta", size.beyond + size.above, _SOURCE + "3"),
    ]
    # Under Q the example has no participation, except with truncated batches, where it may displace another.
    if share and (direction == Direction.REMOVE or _mixed(mechanism.scheme)):
        lines.append(BudgetLine("draws of rare participations", "relative", replicas * share, _SOURCE + "3"))
    return tuple(lines)


def _bounded(mechanism, direction, replicas, size_of) -> tuple[Size, float, tuple[float, float, float]]:
    """(sizes, share that vectors beyond the count carry, errors of `_error_parts` with what those add).

    Args:
      size_of: `Size` for a share.
    """
    most, share = _most_participations(mechanism.scheme), _SHARE
    size = size_of(share)
    parts = [_error_parts(mechanism, size, direction, replicas, k) for k in (size.count, most)]
    if sum(parts[1]) > 1 and size.count < most:
        # Vectors beyond the count are off by more: then they may carry less.
        share = _SHARE * math.exp(-min(sum(parts[1]), 600.0))
        size = size_of(share)
        parts = [_error_parts(mechanism, size, direction, replicas, k) for k in (size.count, most)]
    normals, transform, recurrence = parts[0]
    if size.count >= most:
        return size, 0.0, parts[0]
    beyond = share * math.exp(sum(parts[1])) if sum(parts[1]) < 600 else math.inf
    return size, share, (normals, transform, recurrence + beyond)


def _lines_of_normals(mechanism) -> tuple[BudgetLine, ...]:
    """Events under which the drawn normals are not as near to normal ones as their bound says."""
    rare = (_pairs(mechanism) * randomness.RARE_RADIUS_PROBABILITY) ** 2 / 2
    return (
        BudgetLine("two extreme radii in one sample", "total variation", rare, _SOURCE + "5"),
        BudgetLine("noise far outside its range", "total variation", 8 * _RARE, _SOURCE + "4"),
    )


def loss_margin(
    mechanism: Mechanism,
    epsilon: float,
    replicas: int = 1,
    shifts=(),
    *,
    delta_v: float = 1e-12,
    direction: str = Direction.REMOVE,
) -> float:
    """The nats of `loss_lines` together; `epsilon` has no part in it.

    Args:
      shifts: arrays of the moves of normalised scores, of shifted laws drawn from too.
    """
    del epsilon
    push = max((float(np.abs(shift).max()) for shift in shifts), default=0.0)
    return total(loss_lines(mechanism, delta_v, direction, replicas, push), "epsilon")


def weight_line(
    mechanism: Mechanism, delta_v: float, replicas: int, log_normalizer: float, lowest: float = 0.0
) -> BudgetLine:
    """Float32 of `ln w = ln Z + (1 - m) L` where a term is positive, at outputs that `loss_lines` keep.

    Args:
      lowest: such losses are at least minus this.
    """
    size, *_ = _bounded(
        mechanism,
        Direction.REMOVE,
        replicas,
        lambda share: sizes(mechanism, delta_v, Direction.REMOVE, replicas, 0.0, share),
    )
    parts = abs(log_normalizer) + (replicas - 1) * max(size.largest, lowest)
    return BudgetLine("float32 weights", "relative", math.expm1(3 * _UNIT * parts), _SOURCE + "3")


@functools.lru_cache(maxsize=512)
def power_lines(
    mechanism: Mechanism, delta_v: float, replicas: int, log_normalizer: float
) -> tuple[BudgetLine, ...]:
    """The lines for draws of so many replicas of one example, with weights `ln Z + L - replicas L_1`.

    Args:
      mechanism: of several independent examples; `L_1` is the loss of one of them.
    """
    assert mechanism.scheme.parts is not None  # of several examples
    scheme, number = mechanism.scheme.parts
    one = Mechanism(scheme, mechanism.strategy, mechanism.noise_multiplier)
    drawn = _bounded(
        one, Direction.REMOVE, replicas, lambda share: _sizes_of_one(mechanism, one, delta_v, replicas, share)
    )
    of = "7", "float32 weights, with the loss of one example"
    return _lines_of_two(mechanism, delta_v, replicas, log_normalizer, drawn, -(-replicas // number), of)


def pair_lines(
    mechanism: Mechanism, delta_v: float, replicas: int, log_normalizer: float
) -> tuple[BudgetLine, ...]:
    """The lines for draws of so many replicas in pairs, of weights `ln Z - (replicas - number) L_1` and less.

    Those of `power_lines`, whose weights have more of both losses. Given the outputs, a user's own vectors
    have another law here than there, so that outputs at which they are rare are booked besides.
    """
    own = (_DELTA_SHARE * delta_v) ** 2
    line = BudgetLine("outputs of rare participations of a user's own", "delta", own, _SOURCE + "7")
    return (*power_lines(mechanism, delta_v, replicas, log_normalizer), line)


def pair_lines_by_pairs(
    mechanism: Mechanism, delta_v: float, replicas: int, log_normalizer: float
) -> tuple[BudgetLine, ...]:
    """`pair_lines`, where losses are those of pairs of examples (shared_examples.md, theorem 10)."""
    assert mechanism.scheme.parts is not None
    lines = pair_lines(mechanism, delta_v, replicas, log_normalizer)
    return _by_pairs(mechanism, delta_v, lines, -(-replicas // mechanism.scheme.parts[1]))


def plain_lines_by_pairs(mechanism: Mechanism, delta_v: float) -> tuple[BudgetLine, ...]:
    """The lines for plain draws of the remove direction with such losses."""
    return _by_pairs(mechanism, delta_v, loss_lines(mechanism, delta_v, Direction.REMOVE), 1)


def _by_pairs(mechanism, delta_v, lines: tuple[BudgetLine, ...], as_units: int) -> tuple[BudgetLine, ...]:
    """`lines` of the loss of all examples by themselves, for that of pairs of them.

    Errors of scores move it no more than the other. The recurrence is that of two, whose likelihood ratio is
    at most the square of that of one.

    Args:
      as_units: how many of the unit's participation vectors are in the outputs.
    """
    scheme = mechanism.scheme
    pairs, left = divmod(scheme.parts[1], 2)
    size = sizes(mechanism, delta_v, Direction.REMOVE, as_units, 0.0, 0.0)
    size = dataclasses.replace(size, largest=2 * size.largest)
    # What two share is so many times as much.
    sharing = mechanism.noise_multiplier / math.sqrt(scheme.parts[1] - 1 + left)
    two = Mechanism(scheme.two, mechanism.strategy, sharing)
    amount = pairs * _interacting_error(two, size, _most_participations(two.scheme))
    name, source = "rounding of the likelihood ratio", _SOURCE + "7"
    alone = next(line.amount for line in lines if line.name == name)
    by_pairs = BudgetLine(name, "epsilon", amount + alone, source)
    return tuple(by_pairs if line.name == name else line for line in lines)


@functools.lru_cache(maxsize=512)
def busier_lines(
    mechanism: Mechanism,
    busier: Mechanism,
    delta_v: float,
    replicas: int,
    log_normalizer: float,
    log_least_ratio: float,
) -> tuple[BudgetLine, ...]:
    """The lines for draws of so many replicas of a busier example, with weights `ln Z' + L - replicas L'`.

    Args:
      log_least_ratio: at most ln of how many times likelier any participation vector is of the busier one.
    """
    drawn = _bounded(
        busier,
        Direction.REMOVE,
        replicas,
        lambda share: _sizes_of_busier(mechanism, busier, delta_v, replicas, log_least_ratio, share),
    )
    of = "3a", "float32 weights, with the loss of a busier example"
    return _lines_of_two(mechanism, delta_v, replicas, log_normalizer, drawn, replicas, of)


@functools.lru_cache(maxsize=512)
def cut_lines(
    mechanism: Mechanism,
    delta_v: float,
    direction: str,
    replicas: int,
    log_parts: float,
    beyond: float,
    mean: tuple[float, float] = (0.0, 0.0),
) -> tuple[BudgetLine, ...]:
    """The lines for draws of so many replicas with independent cuts, weights `ln Z + (1 - replicas) ln f`.

    f is P/R or Q/R alone; the nats booked hold for both together, so for either.

    Args:
      log_parts: sizes of what else is added up in the log of a weight.
      beyond: probability that the sizes of the others' batches are not covered.
      mean: sum and length of the mean participation, where draws are moved by it and weights have its scores.
    """
    added = replicas + (mean[0] > 0)
    size, share, (normals, transform, recurrence) = _bounded(
        mechanism,
        direction,
        added,
        lambda share: sizes(mechanism, delta_v, direction, added, 0.0, share),
    )
    logs = log_parts + replicas * size.largest
    # It counts for a replica in what is drawn; its scores are off as a vector's are, for its length and sum.
    times = replicas - 1 + max(mean[0] / size.count, mean[1])
    if mean[1] > 1.5 * _reach(mechanism.scheme, size.count):
        times = math.inf
    weight = times * (normals + transform + recurrence) + 4 * _UNIT * logs
    depth = math.ceil(math.log2(max(mechanism.scheme.iterations, 2))) + 20
    weight += depth * _UNIT * mean[0] * 2 * (size.ratio + 2 / mechanism.noise_multiplier**2)
    weight = math.expm1(weight) if weight < 600 else math.inf
    pair = "proofs/truncated_batches.md, section "
    lines = [
        BudgetLine("rounding of the normals", "epsilon", normals, _SOURCE + "5"),
        BudgetLine("rounding of the scores", "epsilon", transform, _SOURCE + "4"),
        BudgetLine("rounding of the likelihood ratio", "epsilon", recurrence, _SOURCE + "3"),
        *_lines_of_normals(mechanism),
        BudgetLine("outputs of rare participations", "delta", size.beyond + size.above, _SOURCE + "3"),
        BudgetLine("more examples eligible than allowed for", "delta", beyond, pair + "3"),
        BudgetLine("float32 weights", "relative", weight, pair + "5"),
    ]
    if share:
        lines.append(BudgetLine("draws of rare participations", "relative", replicas * share, _SOURCE + "3"))
    return tuple(lines)


def _lines_of_two(
    mechanism, delta_v, replicas: int, log_normalizer: float, drawn, as_units: int, of: tuple[str, str]
) -> tuple[BudgetLine, ...]:
    """The lines for draws of replicas of another example, whose loss is a part of the weights.

    Args:
      drawn: `_bounded` of that example.
      as_units: how many of the unit's participation vectors are in the outputs.
      of: (section, what the line of the weights is called).
    """
    of_other, share, parts = drawn

    def size_of(share):
        size = sizes(mechanism, delta_v, Direction.REMOVE, as_units, 0.0, share)
        return dataclasses.replace(size, drawn=of_other.drawn, transformed=True)

    size, _, (normals, transform, recurrence) = _bounded(mechanism, Direction.REMOVE, as_units, size_of)
    rare = size.beyond + size.above + of_other.beyond + of_other.above
    logs = abs(log_normalizer) + size.largest * mechanism.scheme.sums.times + replicas * of_other.largest
    weight = normals + transform + recurrence + replicas * sum(parts) + 4 * _UNIT * logs
    weight = math.expm1(weight) if weight < 600 else math.inf
    source = _SOURCE + of[0]
    lines = [
        BudgetLine("rounding of the normals", "epsilon", normals, _SOURCE + "5"),
        BudgetLine("rounding of the scores", "epsilon", transform, _SOURCE + "4"),
        BudgetLine("rounding of the likelihood ratio", "epsilon", recurrence, source),
        *_lines_of_normals(mechanism),
        BudgetLine("outputs of rare participations", "delta", rare, source),
        BudgetLine(of[1], "relative", weight, source),
    ]
    if share:
        lines.append(BudgetLine("draws of rare participations", "relative", replicas * share, source))
    return tuple(lines)


# --- How large the numbers are ---


def sizes(mechanism, delta_v, direction, replicas, push, share) -> Size:
    """See `Size`; `share` is what vectors of more participations may carry of a likelihood ratio."""
    scheme = mechanism.scheme
    count, beyond = _count(mechanism, delta_v, direction, share)
    noise, score, ratio = _magnitudes(mechanism, direction, replicas, push)
    own = _multiplicity(scheme)[0]
    most = count * own * (ratio + own / mechanism.noise_multiplier**2)
    largest, above = most, 0.0
    spent = _DELTA_SHARE * delta_v
    if direction == Direction.ADD and not _mixed(scheme):
        largest, above = -math.log(spent), spent
    elif scheme.parts is not None:
        # E_P f <= (Z_2 of one example at sigma / sqrt m)^m, and E_P f_1 <= that Z_2.
        number = scheme.parts[1]
        times = number if scheme.sums.times == 1 else 1
        largest, above = times * _log_coincidence(mechanism, number) - math.log(spent), spent
    elif scheme.replicas is not None and mechanism.strategy.is_toeplitz:
        # P(f > e^t) <= E_P f e^-t = Z_2 e^-t; where f is bounded by f+, E_P f+ <= E_Q f+^2, which Z_2 bounds.
        if scheme.replicas.most_replicas(mechanism) >= 2:
            largest, above = scheme.replicas.log_normalizer(mechanism, 2) - math.log(spent), spent
    if not largest < most:
        largest, above = most, 0.0
    drawn = replicas * _reach(scheme, count) * scheme.sums.times * (1.5 if _mixed(scheme) else 1)
    return Size(count, beyond, drawn, largest, above, noise, score, ratio)


def _sizes_of_one(mechanism, one, delta_v, replicas, share) -> Size:
    """Of the loss of one example where a user has several, and the target law is that of the user.

    `E_P f_1 <= Z_2` at sigma / sqrt m, and `E_P F_{>k} <= (P(> k) Z_2')^{1/2}`, Z_2' at sigma / sqrt(2 m).
    """
    number, most = mechanism.scheme.parts[1], one.scheme.max_participations
    spent = _DELTA_SHARE * delta_v
    count, beyond = most, 0.0
    if share > 0:
        allowed = 2 * (math.log(spent) + math.log(share) + one.scheme.sums.log_none)
        count = _fewest(one.scheme, allowed - _log_coincidence(mechanism, 2 * number))
        beyond = spent if count < most else 0.0
    noise, score, ratio = _magnitudes(one, Direction.REMOVE, replicas, 0.0)
    all_of_it = count * (ratio + 1 / mechanism.noise_multiplier**2)
    largest, above = _log_coincidence(mechanism, number) - math.log(spent), spent
    if not largest < all_of_it:
        largest, above = all_of_it, 0.0
    return Size(count, beyond, replicas * math.sqrt(count), largest, above, noise, score, ratio, True)


def _sizes_of_busier(mechanism, busier, delta_v, replicas, log_least_ratio, share) -> Size:
    """Of the loss of a busier example, where the target law is that of the mechanism's.

    With `g >= r f`, r the least ratio: `E_P G_{>k} / g <= P'(> k) / r`, and `E_P g <= Z'_2 / r`.
    """
    spent = _DELTA_SHARE * delta_v
    count, beyond = busier.scheme.max_participations, 0.0
    if share > 0:
        count = _fewest(busier.scheme, math.log(spent) + math.log(share) + log_least_ratio)
        beyond = spent if count < busier.scheme.max_participations else 0.0
    noise, score, ratio = _magnitudes(busier, Direction.REMOVE, replicas, 0.0)
    all_of_it = count * (ratio + 1 / mechanism.noise_multiplier**2)
    largest, above = math.inf, spent
    if busier.scheme.replicas.most_replicas(busier) >= 2:
        largest = busier.scheme.replicas.log_normalizer(busier, 2) - log_least_ratio - math.log(spent)
    if not largest < all_of_it:
        largest, above = all_of_it, 0.0
    return Size(count, beyond, replicas * math.sqrt(count), largest, above, noise, score, ratio, True)


def _log_coincidence(mechanism, power: int) -> float:
    """`ln E e^{power <C x, C x'> / sigma^2}`, of one example's vectors x, x'; inf without tables."""
    one, _ = mechanism.scheme.parts
    sharper = Mechanism(one, mechanism.strategy, mechanism.noise_multiplier / math.sqrt(power))
    if not sharper.is_stationary or one.replicas.most_replicas(sharper) < 2:
        return math.inf
    found = one.replicas.log_normalizer(sharper, 2)
    return found if found < math.inf else math.inf  # for nan as well


def _magnitudes(mechanism, direction, replicas, push) -> tuple[float, float, float]:
    """(noise, score, ratio) of `Size`."""
    scheme, sigma = mechanism.scheme, mechanism.noise_multiplier
    noise = float(-ndtri(_RARE / (2 * scheme.iterations)))
    cross = float(np.max(mechanism.cross_terms))
    at_once = _multiplicity(scheme)[1]
    signal = replicas * 2 * at_once * (1 + cross) if direction == Direction.REMOVE or _mixed(scheme) else 0.0
    score = sigma * (noise + push) + signal
    return noise, score, (score + 0.5 + cross) / sigma**2


def _mixed(scheme) -> bool:
    return scheme.side_information is not None


def _multiplicity(scheme) -> tuple[int, int]:
    """(the most that one participation counts, the most of a unit's at one step).

    Independent examples take part one by one.
    """
    each = 1 + _mixed(scheme) if scheme.examples_per_unit == 1 else scheme.examples_per_unit
    return (each, each) if scheme.parts is None else (1, each)


def _most_participations(scheme) -> int:
    """The most participations of one sum over vectors."""
    return scheme.max_participations * scheme.sums.processes


def _reach(scheme, count) -> float:
    """|x| of count vectors x of `count` participations, `|x|^2 <= max x sum x`."""
    own, at_once = _multiplicity(scheme)
    return math.sqrt(own * (1 if scheme.sums.times > 1 else at_once) * count)


def log_count_tail(scheme, count: int) -> float:
    """ln of a bound on the probability of `count` participations or more: all sets of so many steps.

    Of several processes: all ways to share the participations out, of which an even one is the likeliest.
    """
    sums = scheme.sums
    if sums.probability == 1:
        return 0.0 if count <= _most_participations(scheme) else -math.inf
    if sums.processes == 1:
        return min(0.0, _log_sets(scheme, count))
    each, more = divmod(count, sums.processes)
    even = (sums.processes - more) * _log_sets(scheme, each)
    even += more * _log_sets(scheme, each + 1) if more else 0.0
    ways = gammaln(count + sums.processes) - gammaln(count + 1) - gammaln(sums.processes)
    return min(0.0, float(ways) + even)


def _log_sets(scheme, count: int) -> float:
    """ln of `p^count` times the number of sets of so many steps, as far apart as participations are."""
    sums = scheme.sums
    places = sums.steps if sums.phases else scheme.iterations - (count - 1) * (scheme.min_separation - 1)
    if count > places:
        return 0.0 if count == 0 else -math.inf
    ways = gammaln(places + 1) - gammaln(count + 1) - gammaln(places - count + 1)
    return float(ways) + count * math.log(sums.probability)


def _count(mechanism, delta_v, direction, share) -> tuple[int, float]:
    """(k, probability): outputs at which vectors of more than k carry more than `share` have at most this.

    By Markov's inequality: `E_P P(x | y) = P(x)`. Under another law than P a likelihood ratio is at least
    P(x = 0), and the summands of x have mean p(x) at most.
    """
    scheme, most = mechanism.scheme, _most_participations(mechanism.scheme)
    if mechanism.is_upper_bound or scheme.sums.times > 1 or share == 0:
        return most, 0.0  # cross terms would have to be counted in, and the sum is not that of the law
    log_share = math.log(share)
    if direction == Direction.ADD or _mixed(scheme):
        log_share += scheme.sums.log_none
    allowed = math.log(_DELTA_SHARE * delta_v) + log_share - (math.log(2) if _mixed(scheme) else 0.0)
    count = _fewest(scheme, allowed)
    return count, 0.0 if count >= most else _DELTA_SHARE * delta_v


def _fewest(scheme, allowed: float) -> int:
    """The least k >= 1 for which more have a probability of `e^allowed` at most, or the most there can be."""
    low, high = 0, _most_participations(scheme)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if log_count_tail(scheme, middle + 1) <= allowed else (middle + 1, high)
    return max(low, 1)


# --- The three parts ---


def _error_parts(mechanism, size: Size, direction, replicas, count) -> tuple[float, float, float]:
    """(normals, scores, recurrence): errors of ln of the summand of a vector of `count` participations."""
    scheme, times = mechanism.scheme, mechanism.scheme.sums.times
    reach = _reach(scheme, count)
    if _mixed(scheme):  # ln P/R and ln Q/R together
        reach *= 1.5
    length = reach * math.sqrt(1 + 2 * float(np.max(mechanism.cross_terms)))  # |C x|
    normals = length * _normal_error(_pairs(mechanism)) / mechanism.noise_multiplier
    transform = _score_error(mechanism, direction, replicas, size, reach, count)
    return times * normals, times * transform, times * _recurrence_error(mechanism, size, count)


def _pairs(mechanism) -> int:
    """Pairs of normals in one sample."""
    n, strategy = mechanism.scheme.iterations, mechanism.strategy
    if strategy.rows(n) == n:
        return -(-n // 2)
    return circulant_length(n, strategy.bands) // 2 + 1


@functools.lru_cache(maxsize=64)
def _normal_error(pairs: int) -> float:
    """Norm of the error of one sample's normals, but for events of probability 3 `_RARE`."""
    norm = math.sqrt(2 * pairs) + math.sqrt(-2 * math.log(_RARE))
    square = (_NORMAL_ROUNDINGS * _UNIT * norm) ** 2
    # The grid of 2^-40 of u. A radius R = sqrt(-2 ln u) with index j is off by 1 / ((2 j + 1) R).
    index, steps = randomness.RARE_RADII, 2.0**40
    while index < steps / 4:
        below = min(1.0, 4 * index / steps)
        each = 1 / ((2 * index + 1) * math.sqrt(-2 * math.log(below)))
        square += _rarely_exceeded(pairs, below) * each**2
        index *= 4
    # u above 1/4: half a step of u moves -ln u by 2^-39 at most, and R by that over R, or by its square root.
    square += pairs * (2.0**-39 * 2**8) ** 2 + _rarely_exceeded(pairs, 2.0**-16) * 2 * 2.0**-39
    return math.sqrt(square)


def _rarely_exceeded(trials: int, probability: float) -> int:
    """A number of successes that is exceeded with probability `_RARE` / 16 at most."""
    mean = trials * probability
    if mean > 50:
        return trials  # such levels are fine anyway
    count = 0
    while gammaln(trials + 1) - gammaln(count + 2) - gammaln(trials - count) + (count + 1) * math.log(
        probability
    ) > math.log(_RARE / 16):
        count += 1
        if count >= trials:
            return trials
    return count


@functools.lru_cache(maxsize=64)
def _noise_norm(strategy, iterations: int) -> float:
    """|C^T z| on the circulant, exceeded with probability `_RARE` at most (Chernoff)."""
    length = circulant_length(iterations, strategy.bands)
    power = np.abs(np.fft.fft(strategy.array, length)) ** 2
    top = float(power.max())

    def square(log_rate):
        rate = math.exp(log_rate)
        return (-0.5 * np.log1p(-2 * rate * power).sum() - math.log(_RARE)) / rate

    ends = math.log(1e-9 / top), math.log(0.4999 / top)
    return math.sqrt(float(minimize_scalar(square, bounds=ends, method="bounded").fun) * (1 + 1e-9))


@functools.lru_cache(maxsize=64)
def _window_norm(strategy, iterations: int, separation: int) -> float:
    """`|C^T C x| <= this |x|` for 0/1 vectors x of the separation."""
    c = strategy.array
    if strategy.bands > separation:
        return float(np.square(np.abs(np.fft.fft(c, circulant_length(iterations, strategy.bands))).max()))
    window = np.correlate(c, c, "full")
    lags = np.correlate(window, window, "full")[window.size - 1 :]
    # A window of 2 bands - 1 meets that of one neighbour on either side.
    return math.sqrt(lags[0] + 2 * float(np.max(lags[separation:], initial=0.0)))


def fourier_roundings(length: int) -> float:
    """Relative norm-wise error of a transform of this length, in units of 2^-24."""
    return _FOURIER_ROUNDINGS[0] * math.log2(length) + _FOURIER_ROUNDINGS[1]


def _score_error(mechanism, direction, replicas, size: Size, reach, count) -> float:
    strategy, scheme, sigma = mechanism.strategy, mechanism.scheme, mechanism.noise_multiplier
    n, variance = scheme.iterations, sigma**2
    each = _multiplicity(scheme)[1] + _mixed(scheme)
    # Its share of a log-ratio: additions of noise, shift and windows.
    local = each * count * 4 * replicas * _UNIT * size.score / variance
    if not strategy.is_toeplitz:
        outputs = sigma * (math.sqrt(n) + math.sqrt(-2 * math.log(_RARE)))
        outputs += 2 * size.drawn * math.sqrt(1 + 2 * float(np.max(mechanism.cross_terms)))
        return local + each * count * 2 * (n + 4) * _UNIT * outputs / variance
    if strategy.bands == 1:
        return local
    transform = fourier_roundings(circulant_length(n, strategy.bands)) * _UNIT
    if strategy.rows(n) == n:
        drawn = size.drawn if direction == Direction.REMOVE or _mixed(scheme) else 0.0
        return local + reach * _error_of_outputs(mechanism, drawn, transform) / variance
    noise = (transform + _SPECTRUM_ROUNDINGS * _UNIT) * sigma * _noise_norm(strategy, n)
    error = reach * noise
    windows = adds_windows(scheme, strategy, replicas) and not size.transformed
    if not windows and (direction == Direction.REMOVE or _mixed(scheme)):
        window = _window_norm(strategy, n, scheme.min_separation)
        # The participations' transform, seen through C^T C x, and their part of the inverse one.
        error += 2 * reach * (transform + 2 * _UNIT) * window * size.drawn
    return local + error / variance


def _error_of_outputs(mechanism, drawn: float, transform: float) -> float:
    """Of the scores of n outputs, by two transforms each: what |x| = 1 sees of it, in the unit of the scores.

    Args:
      drawn: norm of the drawn counts.
      transform: relative error of one transform.
    """
    strategy, n, sigma = mechanism.strategy, mechanism.scheme.iterations, mechanism.noise_multiplier
    product = transform + _PRODUCT_ROUNDINGS * _UNIT
    signal = (transform * _largest_amplitude(strategy, n) + product) * drawn
    outputs = sigma * (math.sqrt(n) + math.sqrt(-2 * math.log(_RARE))) + drawn
    scores = (
        sigma * _noise_norm(strategy, n) + _window_norm(strategy, n, mechanism.scheme.min_separation) * drawn
    )
    # sigma, its product with the noise, the sum; errors of errors are below a thousandth.
    return (signal + (transform + 3 * _UNIT) * outputs + product * scores) * (1 + 1e-3)


@functools.lru_cache(maxsize=64)
def _largest_amplitude(strategy, iterations: int) -> float:
    """|c_hat| at most, on the circulant: what C makes of a vector without structure."""
    return float(np.abs(np.fft.rfft(strategy.array, circulant_length(iterations, strategy.bands))).max())


def _recurrence_error(mechanism, size: Size, count) -> float:
    scheme = mechanism.scheme
    sums, each = scheme.sums, _multiplicity(scheme)[0] + _mixed(scheme)
    if sums.processes > 1:
        return _interacting_error(mechanism, size, count)
    if sums.fixed_count:
        return _fixed_count_error(sums, size)
    half = 0.5 / mechanism.noise_multiplier**2
    local = _RATIO_ROUNDINGS * size.ratio * each
    if each > 1 and not _mixed(scheme):
        top = sums.log_weights + each * size.ratio + 2 * each**2 * half
        local += 4 * top + each * (top + SOFTPLUS_ROUNDINGS)
    if sums.most_sampled:
        top = 3 * math.log(sums.most_sampled + 1) + 2 * size.ratio + 6 * half
        local += 2 * (5 * top + SOFTPLUS_ROUNDINGS)
    together = math.log(sums.terms)
    if sums.probability == 1:
        depth = math.ceil(math.log2(max(count, 2))) + 2
        ratios = count * size.ratio * each
        return _UNIT * (count * local + depth * ratios + sums.terms + 20 + 4 * (ratios + together))
    log_q = -math.log1p(-sums.probability)
    growth = size.largest + sums.steps * log_q + (together if sums.phases else 0.0)
    shift = -math.log(sums.probability) + scheme.min_separation * log_q
    # One participation: c + r, what is ahead, and its part of g that is not carried along.
    local += 3 * (shift + size.ratio * each) + 4 * growth
    depth = math.ceil(math.log2(max(sums.steps, 2)))
    common = (SOFTPLUS_ROUNDINGS + 3 + depth) * growth + 3 * sums.steps * log_q + 3 * growth
    last = sums.terms + 20 + 4 * (growth + together + shift)
    twice = 2 if sums.most_sampled else 1
    return _UNIT * twice * (count * local + common + last)


def _fixed_count_error(sums, size: Size) -> float:
    """Of `kernels.fixed_counts` (proofs/fixed_counts.md, section 3)."""
    k, ratio = sums.fixed_count, size.ratio
    local = _RATIO_ROUNDINGS * ratio
    if sums.log_none > -math.inf:  # ln(1 - q + q e^r) in the place of r
        log_q = sums.log_none / k
        ratio += 1 - log_q - math.log(-math.expm1(log_q))
        local += (SOFTPLUS_ROUNDINGS + 4) * ratio
    largest = k * ratio + sums.log_patterns  # |ln of a sum over chains|
    local += 3 * ratio + 8 * largest
    blocks = 1 if sums.terms == 1 else 2
    increments = (SOFTPLUS_ROUNDINGS + 3) * blocks * 2 * k * largest
    last = math.ceil(math.log2(max(sums.terms, 2))) + 24 + 16 * largest
    return _UNIT * (k * local + increments + last)


def _interacting_error(mechanism, size: Size, count) -> float:
    """Of `kernels.interacting_recurrence`, for vectors of `count` participations (section 7)."""
    scheme, variance = mechanism.scheme, mechanism.noise_multiplier**2
    sums = scheme.sums
    number, together = sums.processes, math.log(sums.terms)
    depth = math.ceil(math.log2(max(sums.terms, 2))) + 20
    overlap = 1.5 * number / variance
    own = (_RATIO_ROUNDINGS + 1) * size.ratio + (number + 7) * overlap
    if sums.probability == 1:
        top = math.log(number) + size.ratio + overlap
        return _UNIT * (count * (own + 5 * top) + depth + 4 * (count * top + together))
    log_q = -math.log1p(-sums.probability)
    barred = math.log1p((scheme.min_separation - 1) * sums.probability)
    free = number * (sums.steps + 2 * scheme.min_separation) * log_q
    growth = size.largest + free + number * barred
    shift = -math.log(sums.probability) + scheme.min_separation * log_q
    top = shift + math.log(number) + size.ratio + overlap
    # One participation: its factor, differences of g, and the sum over how many take part at a step.
    local = own + 4 * top + 4 * growth
    local += (number - 1) * (3 * (number * top + growth) + SOFTPLUS_ROUNDINGS)
    # Steps at which some process is barred, where the recurrence is not compensated.
    barred_steps = 0 if compensates_all(scheme.min_separation) else scheme.min_separation + 1
    local += barred_steps * growth
    most = _most_participations(scheme)
    steps = SOFTPLUS_ROUNDINGS + 2  # of an increment
    ends = (steps + number * barred_steps) * growth + 2 * sums.steps * _UNIT * growth + 3 * free
    # Computed increments add up to a little more than exact ones: d grows with the d of all vectors.
    each = 4 + 3 * number + barred_steps
    slope = _UNIT * ((most + number) * each + steps * (2 * most + 1))
    if not slope < 0.5:
        return math.inf
    of_all = _UNIT * (most * local + ends) / (1 - slope)
    last = depth + 4 * (growth + together + number * shift)
    drift = (count + number) * each + steps * (2 * count + 1)
    return _UNIT * (count * local + drift * of_all + ends + last)
