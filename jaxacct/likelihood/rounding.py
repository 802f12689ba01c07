"""Proven bound on |float32 loss - exact loss| for every scheme and proposal (proofs/rounding.md).

Every rounding of a loss `L = ln sum_x p(x) e^{<x, r>}` is a relative error of the summands of participation
vectors x that pass through it. Steps without participation add almost no error (`kernels.recurrence`), so a
vector of k participations has an error of at most

    D(k) = k local + sqrt(k) joint + common,

and L one of D(k) where k is so large that vectors of more participations carry at most a share `_SHARE` of
the sum, except for outputs of a probability that is reserved. `local` are roundings of one score and its
log-ratio, `joint` are norm-wise errors of the normals and the Fourier transform, spread over the scores by
Cauchy and Schwarz.

Nothing is measured here; tests measure the actual error (`tests/rounding_errors.py`).
"""

import functools
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln, ndtri

from jaxacct.kernels import randomness
from jaxacct.kernels.likelihoods import interacting_recurrence
from jaxacct.kernels.recurrence import SOFTPLUS_ROUNDINGS
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics.lines import BudgetLine, Item
from jaxacct.strategies import stationary

UNIT = 2.0**-24  # half a unit in the last place
RARE = 2.0**-50  # probability of each event that is excluded and reserved as total variation
_FOURIER_ROUNDINGS = (4, 6)  # of a transform of length N, norm-wise: 4 log2 N + 6
_SPECTRUM_ROUNDINGS = 5
_PRODUCT_ROUNDINGS = 4  # of a spectrum times that of C's column, rounded to float32: above sqrt 5 + 1
_RATIO_ROUNDINGS = 7  # sigma, its square, the difference, the quotient
_SHARE = 2.0**-20  # maximum share of a likelihood ratio of participation vectors beyond the count
DELTA_SHARE = 1e-3  # maximum share of delta_v of outputs with more
SOURCE = "proofs/rounding.md, section "


@dataclass(frozen=True)
class Size:
    """Quantities that determine the bound.

    Attributes:
      count: maximum number of participations k, in total over independent examples.
      beyond: probability under the target distribution of outputs at which vectors with more count.
      drawn: norm of the drawn counts.
      largest: ln of the likelihood ratio, exceeded with probability `above` under the target distribution; of
        one example, where several are bounded by its power.
      noise: largest |score of the noise| / sigma.
      score: largest |score|.
      ratio: largest |log-ratio of one participation|.
      transformed: whether drawn participations are added by a Fourier transform.
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


@functools.lru_cache(maxsize=512)
def loss_lines(mechanism: Mechanism, delta_v: float, replicas: int = 1) -> tuple[BudgetLine, ...]:
    """Return the budget items for float32 losses of samples of one distribution.

    Rare outputs are excluded at the expense of `delta_v`. The outputs have `replicas` participation vectors
    added up. The samples are of a direction that is drawn (`Mechanism.directions`): under Q, which is drawn
    for truncated batches only, the unit may displace another.
    """
    if mechanism.is_replace_one:
        raise ValueError("losses of replace-one are rounded twice: proposals.families.mirrored")
    bound = bounded(mechanism, replicas, lambda share: sizes(mechanism, delta_v, replicas, share))
    lines = common_lines(mechanism, bound.errors, bound.size.beyond + bound.size.above)
    return lines + draw_lines(replicas * bound.share)


def common_lines(mechanism, errors, rare: float, section: str = "3") -> tuple[BudgetLine, ...]:
    """Return the budget items that every proposal distribution has.

    `errors` are those of the normals, the scores and the likelihood ratio, in nats of the loss, which do not
    hold for outputs of probability `rare`; `section` is that of proofs/rounding.md for the latter two.
    """
    normals, scores, ratio = errors
    two_extreme = (_pairs(mechanism) * randomness.RARE_RADIUS_PROBABILITY) ** 2 / 2
    return (
        BudgetLine(Item.NORMALS, "epsilon", normals, SOURCE + "5"),
        BudgetLine(Item.SCORES, "epsilon", scores, SOURCE + "4"),
        BudgetLine(Item.RATIO, "epsilon", ratio, SOURCE + section),
        BudgetLine(Item.EXTREME_RADII, "total variation", two_extreme, SOURCE + "5"),
        BudgetLine(Item.FAR_NOISE, "total variation", 8 * RARE, SOURCE + "4"),
        BudgetLine(Item.RARE_OUTPUTS, "delta", rare, SOURCE + section),
    )


def draw_lines(share: float, section: str = "3") -> tuple[BudgetLine, ...]:
    """Return the budget item for samples with more participations than are counted, if there are any."""
    return (BudgetLine(Item.RARE_DRAWS, "relative", share, SOURCE + section),) if share else ()


class Bounded(NamedTuple):
    """Errors of the log-likelihood ratio of samples with limited numbers.

    Attributes:
      share: upper bound on the share of a likelihood ratio of vectors of more participations than
        `size.count`.
      errors: from the normals, the scores and the recurrence, in nats.
    """

    size: Size
    share: float
    errors: tuple[float, float, float]


def bounded(mechanism, replicas, size_of: Callable[[float], Size]) -> Bounded:
    """Return the errors of the log-likelihood ratio, including that of vectors beyond the count.

    `size_of` returns the `Size` for a share; the other arguments are those of `loss_lines`.
    """
    max_count = max_unit_participations(mechanism.scheme)

    def at(share):
        size = size_of(share)
        return size, *(_error_parts(mechanism, size, replicas, k) for k in (size.count, max_count))

    share = _SHARE
    size, parts, of_most = at(share)
    if sum(of_most) > 1 and size.count < max_count:
        # Vectors beyond the count have larger errors, so their share must be smaller.
        share = _SHARE * math.exp(-min(sum(of_most), 600.0))
        size, parts, of_most = at(share)
    if size.count >= max_count:
        return Bounded(size, 0.0, parts)
    normals, transform, recurrence = parts
    return Bounded(size, share, (normals, transform, recurrence + share * exp_or_inf(sum(of_most))))


def exp_or_inf(exponent: float) -> float:
    """Return e^exponent, infinity from 600 on."""
    return math.exp(exponent) if exponent < 600 else math.inf


def relative_line(item: Item, error: float, source: str) -> BudgetLine:
    """Return the budget item of weights whose log has an error of at most `error`; infinite from 600 on."""
    return BudgetLine(item, "relative", math.expm1(error) if error < 600 else math.inf, source)


def sizes(mechanism, delta_v, replicas, share) -> Size:
    """Return `Size`; vectors of more participations may have this `share` of a likelihood ratio."""
    scheme = mechanism.scheme
    count, beyond = _count(mechanism, delta_v, share)
    noise, score, ratio = magnitudes(mechanism, replicas)
    own = _multiplicity(scheme)[0]
    most = count * own * (ratio + own / mechanism.noise_multiplier**2)
    largest, above = most, 0.0
    reserve = DELTA_SHARE * delta_v
    if scheme.parts is not None:
        # E_P f <= (Z_2 of one example at sigma / sqrt m)^m, and E_P f_1 <= that Z_2.
        number = scheme.parts[1]
        times = number if scheme.sums.times == 1 else 1
        largest, above = times * log_coincidence(mechanism, number) - math.log(reserve), reserve
    elif (module := scheme.replicas(mechanism)) is not None:
        # P(f > e^t) <= E_P f e^-t = Z_2 e^-t; where f is bounded by f+, E_P f+ <= E_Q f+^2, which Z_2 bounds.
        largest, above = module.log_normalizer(mechanism) - math.log(reserve), reserve
    if not largest < most:
        largest, above = most, 0.0
    drawn = replicas * reach_of(scheme, count) * scheme.sums.times * (1.5 if _mixed(scheme) else 1)
    return Size(count, beyond, drawn, largest, above, noise, score, ratio)


def log_coincidence(mechanism, power: int) -> float:
    """Return `ln E e^{power <C x, C x'> / sigma^2}` of one example's vectors x, x'; inf without tables."""
    one, _ = mechanism.scheme.parts
    sharper = Mechanism(one, mechanism.strategy, mechanism.noise_multiplier / math.sqrt(power))
    module = one.replicas(sharper) if sharper.is_stationary else None
    if module is None:
        return math.inf
    log_moment = module.log_normalizer(sharper)
    return log_moment if log_moment < math.inf else math.inf  # for NaN, too


def magnitudes(mechanism, replicas) -> tuple[float, float, float]:
    """Return (noise, score, ratio) of `Size`."""
    scheme, sigma = mechanism.scheme, mechanism.noise_multiplier
    noise = float(-ndtri(RARE / (2 * scheme.iterations)))
    cross = float(np.max(mechanism.cross_terms))
    at_once = _multiplicity(scheme)[1]
    score = sigma * noise + replicas * 2 * at_once * (1 + cross)
    return noise, score, (score + 0.5 + cross) / sigma**2


def _mixed(scheme) -> bool:
    return scheme.side_information is not None


def _multiplicity(scheme) -> tuple[int, int]:
    """Return the maximum count of one participation (1 for independent examples), and of a unit at a step."""
    each = 1 + _mixed(scheme) if scheme.examples_per_unit == 1 else scheme.examples_per_unit
    return (each, each) if scheme.parts is None else (1, each)


def max_unit_participations(scheme) -> int:
    """Return the maximum number of participations of one sum over vectors."""
    return scheme.max_participations * scheme.sums.processes


def reach_of(scheme, count) -> float:
    """Return a bound on |x| of vectors x of `count` participations: `|x|^2 <= max x sum x`."""
    own, at_once = _multiplicity(scheme)
    return math.sqrt(own * (1 if scheme.sums.times > 1 else at_once) * count)


def log_count_tail(scheme, count: int) -> float:
    """Return ln of a bound on the probability of at least `count` participations: all sets of so many steps.

    With several processes these are all ways to divide the participations; an even division is likeliest.
    """
    sums = scheme.sums
    if sums.probability == 1:
        return 0.0 if count <= max_unit_participations(scheme) else -math.inf
    each, more = divmod(count, sums.processes)
    even = (sums.processes - more) * _log_sets(scheme, each)
    even += more * _log_sets(scheme, each + 1) if more else 0.0
    return min(0.0, _log_choose(count + sums.processes - 1, count) + even)


def _log_sets(scheme, count: int) -> float:
    """Return ln of `p^count` times the number of sets of so many admissible steps."""
    sums = scheme.sums
    places = sums.steps if sums.phases else scheme.iterations - (count - 1) * (scheme.min_separation - 1)
    if count > places:
        return 0.0 if count == 0 else -math.inf
    return _log_choose(places, count) + count * math.log(sums.probability)


def _log_choose(n: int, k: int) -> float:
    """Return ln C(n, k), rounded up: each of the three parts has an error of a few units of float64."""
    parts = [float(gammaln(size + 1)) for size in (n, k, n - k)]
    return parts[0] - parts[1] - parts[2] + 2.0**-49 * math.fsum(parts)


def _count(mechanism, delta_v, share) -> tuple[int, float]:
    """Return k, and a bound on the probability that vectors of more than k carry more than `share`.

    By Markov's inequality: `E_P P(x | y) = P(x)`. With truncated batches a likelihood ratio is at least
    P(x = 0), and the summands of x have mean p(x) at most.
    """
    scheme, max_count = mechanism.scheme, max_unit_participations(mechanism.scheme)
    if mechanism.is_upper_bound or scheme.sums.times > 1 or share == 0:
        return max_count, 0.0  # cross terms would count, too, and the sum is not that of the distribution
    log_share = math.log(share)
    if _mixed(scheme):
        log_share += scheme.sums.log_none
    allowed = math.log(DELTA_SHARE * delta_v) + log_share - (math.log(2) if _mixed(scheme) else 0.0)
    count = fewest_participations(scheme, allowed)
    return count, 0.0 if count >= max_count else DELTA_SHARE * delta_v


def fewest_participations(scheme, allowed: float) -> int:
    """Return the smallest k >= 1 that is exceeded with probability at most e^allowed, or the largest k."""
    count = bisect_left(
        range(max_unit_participations(scheme)), True, key=lambda k: log_count_tail(scheme, k + 1) <= allowed
    )
    return max(count, 1)


def _error_parts(mechanism, size: Size, replicas, count) -> tuple[float, float, float]:
    """Return errors of ln of the summand of a vector of `count` participations.

    They come from the normals, the scores and the recurrence.
    """
    scheme, times = mechanism.scheme, mechanism.scheme.sums.times
    reach = reach_of(scheme, count)
    if _mixed(scheme):  # ln P/R and ln Q/R together
        reach *= 1.5
    length = reach * math.sqrt(1 + 2 * float(np.max(mechanism.cross_terms)))  # |C x|
    normals = length * randomness.normals_error(_pairs(mechanism), RARE) / mechanism.noise_multiplier
    transform = _score_error(mechanism, replicas, size, reach, count)
    return times * normals, times * transform, times * _recurrence_error(mechanism, size, count)


def _pairs(mechanism) -> int:
    """Return the number of pairs of normals in one sample."""
    n, strategy = mechanism.scheme.iterations, mechanism.strategy
    if strategy.rows(n) == n:
        return -(-n // 2)
    return stationary.circulant_length(n, strategy.bands) // 2 + 1


def fourier_roundings(length: int) -> float:
    """Return the relative norm-wise error of a transform of this length, in units of 2^-24."""
    return _FOURIER_ROUNDINGS[0] * math.log2(length) + _FOURIER_ROUNDINGS[1]


def _score_error(mechanism, replicas, size: Size, reach, count) -> float:
    strategy, scheme, sigma = mechanism.strategy, mechanism.scheme, mechanism.noise_multiplier
    n, variance = scheme.iterations, sigma**2
    each = _multiplicity(scheme)[1] + _mixed(scheme)
    # Its share of a log-ratio: additions of noise, shift and windows.
    local = each * count * 4 * replicas * UNIT * size.score / variance
    if not strategy.is_toeplitz:
        outputs = sigma * (math.sqrt(n) + math.sqrt(-2 * math.log(RARE)))
        outputs += 2 * size.drawn * math.sqrt(1 + 2 * float(np.max(mechanism.cross_terms)))
        return local + each * count * 2 * (n + 4) * UNIT * outputs / variance
    if strategy.bands == 1:
        return local
    transform = fourier_roundings(stationary.circulant_length(n, strategy.bands)) * UNIT
    if strategy.rows(n) == n:
        return local + reach * _error_of_outputs(mechanism, size.drawn, transform) / variance
    noise = (transform + _SPECTRUM_ROUNDINGS * UNIT) * sigma * stationary.noise_norm(strategy, n, RARE)
    error = reach * noise
    windows = stationary.adds_windows(scheme, strategy, replicas) and not size.transformed
    if not windows:
        window = stationary.window_norm(strategy, n, scheme.min_separation)
        # The participations' transform, projected on C^T C x, and their part of the inverse one.
        error += 2 * reach * (transform + 2 * UNIT) * window * size.drawn
    return local + error / variance


def _error_of_outputs(mechanism, drawn: float, transform: float) -> float:
    """Return the error of scores of n outputs, by two transforms each, projected on |x| = 1."""
    strategy, n, sigma = mechanism.strategy, mechanism.scheme.iterations, mechanism.noise_multiplier
    product = transform + _PRODUCT_ROUNDINGS * UNIT
    signal = (transform * stationary.max_amplitude(strategy, n) + product) * drawn
    outputs = sigma * (math.sqrt(n) + math.sqrt(-2 * math.log(RARE))) + drawn
    scores = (
        sigma * stationary.noise_norm(strategy, n, RARE)
        + stationary.window_norm(strategy, n, mechanism.scheme.min_separation) * drawn
    )
    # sigma, its product with the noise, the sum; second-order errors are below a thousandth.
    return (signal + (transform + 3 * UNIT) * outputs + product * scores) * (1 + 1e-3)


def _recurrence_error(mechanism, size: Size, count) -> float:
    scheme = mechanism.scheme
    sums, each = scheme.sums, _multiplicity(scheme)[0] + _mixed(scheme)
    if sums.error is not None:
        return sums.error(size.ratio, _RATIO_ROUNDINGS * size.ratio)
    if sums.processes > 1:
        return interacting_error(mechanism, size, count)
    half = 0.5 / mechanism.noise_multiplier**2
    local = _RATIO_ROUNDINGS * size.ratio * each
    top, twice = size.ratio * each, 1
    if each > 1 and not _mixed(scheme):
        top += sums.log_weights + 2 * each**2 * half
        local += 4 * top + each * (top + SOFTPLUS_ROUNDINGS)
    if sums.max_sampled:
        top, twice = 3 * math.log(sums.max_sampled + 1) + 2 * size.ratio + 6 * half, 2
        local += 2 * (5 * top + SOFTPLUS_ROUNDINGS)
    if sums.table is not None:
        return twice * sums.table.rounding_bound(count, size.largest, top, local)
    together = math.log(sums.terms)
    if sums.probability == 1:
        depth = math.ceil(math.log2(max(count, 2))) + 2
        ratios = count * size.ratio * each
        return UNIT * (count * local + depth * ratios + sums.terms + 20 + 4 * (ratios + together))
    log_q = -math.log1p(-sums.probability)
    growth = size.largest + sums.steps * log_q + (together if sums.phases else 0.0)
    shift = -math.log(sums.probability) + scheme.min_separation * log_q
    # One participation: c + r, the value b steps ahead, and its uncompensated part of g.
    local += 4 * (shift + size.ratio * each) + 4 * growth
    depth = math.ceil(math.log2(max(sums.steps, 2)))
    common = (SOFTPLUS_ROUNDINGS + 3 + depth) * growth + 3 * sums.steps * log_q + 3 * growth
    last = sums.terms + 20 + 4 * (growth + together + shift)
    return UNIT * twice * (count * local + common + last)


def interacting_error(mechanism, size: Size, count: int) -> float:
    """Return the error of `interacting_recurrence` for vectors of `count` participations."""
    scheme, variance = mechanism.scheme, mechanism.noise_multiplier**2
    counts, ratio_error = (count, max_unit_participations(scheme)), (_RATIO_ROUNDINGS + 1) * size.ratio
    return interacting_recurrence.rounding_bound(
        scheme.sums, scheme.min_separation, variance, counts, size.ratio, ratio_error, size.largest
    )
