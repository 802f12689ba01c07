"""A proven bound on |float32 loss - exact loss|, for every scheme and proposal (proofs/rounding.md).

Every rounding of a loss `L = ln sum_x p(x) e^{<x, r>}` is a relative error of the summands of participation
vectors x that pass through it. Steps without participation cost next to nothing (`kernels.recurrence`), so a
vector of k participations is off by at most

    D(k) = k local + sqrt(k) joint + common,

and L by D(k) where k is so large that vectors of more participations carry a share `_SHARE` of the sum at
most, but for outputs of a probability that is booked. `local` are roundings of one score and its log-ratio,
`joint` are norm-wise errors of the normals and the Fourier transform, spread over the scores by Cauchy and
Schwarz.

Nothing is measured here, with one exception: schemes without `sums` (`IndependentAttribution`) have no such
bound yet. Their losses are off by eight times `measured_error`, and the line of the budget says so. What
their normals are off by is bounded as for all. Elsewhere `measured_error` is for tests, which compare.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import gammaln, ndtri

from jaxacct.kernels import randomness
from jaxacct.kernels.recurrence import SOFTPLUS_ROUNDINGS
from jaxacct.likelihood.loss import loss_of_scores
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics.direction import DIRECTIONS, Direction
from jaxacct.statistics.lines import BudgetLine, total
from jaxacct.strategies.stationary import adds_windows, circulant_length

_UNIT = 2.0**-24  # half a unit in the last place
_RARE = 2.0**-50  # probability of each event that is ruled out and booked as total variation
_FOURIER_ROUNDINGS = (4, 6)  # of a transform of length N, norm-wise: 4 log2 N + 6
_SPECTRUM_ROUNDINGS = 5
_NORMAL_ROUNDINGS = 15  # of a radius times a sine, relative to the radius
_RATIO_ROUNDINGS = 7  # sigma, its square, the difference, the quotient
_SHARE = 2.0**-20  # of a likelihood ratio that participation vectors beyond the count may carry
_DELTA_SHARE = 1e-3  # of delta_v that outputs with more may have
_SOURCE = "proofs/rounding.md, section "


@dataclass(frozen=True)
class Size:
    """What the bound depends on.

    Attributes:
      count: participations k of the vectors that count.
      beyond: probability under the target law of outputs at which more of them count.
      largest: ln of the likelihood ratio, exceeded with probability `above` under the target law.
      noise: largest |score of the noise| / sigma.
      score: largest |score|.
      ratio: largest |log-ratio of one participation|.
    """

    count: int
    beyond: float
    largest: float
    above: float
    noise: float
    score: float
    ratio: float


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


@functools.lru_cache(maxsize=512)
def _loss_lines(mechanism, delta_v, direction, replicas, push):
    if mechanism.scheme.sums is None:
        return _measured_lines(mechanism, replicas)
    most = mechanism.scheme.max_participations
    size = sizes(mechanism, delta_v, direction, replicas, push, _SHARE)
    parts = [_parts(mechanism, size, direction, replicas, k) for k in (size.count, most)]
    share = _SHARE
    if sum(parts[1]) > 1 and size.count < most:
        # Vectors beyond the count are off by more: then they may carry less.
        share = _SHARE * math.exp(-min(sum(parts[1]), 600.0))
        size = sizes(mechanism, delta_v, direction, replicas, push, share)
        parts = [_parts(mechanism, size, direction, replicas, k) for k in (size.count, most)]
    normals, transform, recurrence = parts[0]
    beyond = 0.0
    if size.count < most:
        beyond = share * math.exp(min(sum(parts[1]), 600.0)) if sum(parts[1]) < 600 else math.inf
    lines = [
        BudgetLine("rounding of the normals", "epsilon", normals, _SOURCE + "5"),
        BudgetLine("rounding of the scores", "epsilon", transform, _SOURCE + "4"),
        BudgetLine("rounding of the likelihood ratio", "epsilon", recurrence + beyond, _SOURCE + "3"),
        *_lines_of_normals(mechanism),
        BudgetLine("outputs of rare participations", "delta", size.beyond + size.above, _SOURCE + "3"),
    ]
    if size.count < most and direction == Direction.REMOVE:
        lines.append(BudgetLine("draws of rare participations", "relative", replicas * share, _SOURCE + "3"))
    return tuple(lines)


def _lines_of_normals(mechanism) -> tuple[BudgetLine, ...]:
    """Events under which the drawn normals are not as near to normal ones as their bound says."""
    rare = (_pairs(mechanism) * randomness.RARE_RADIUS_PROBABILITY) ** 2 / 2
    return (
        BudgetLine("two extreme radii in one sample", "total variation", rare, _SOURCE + "5"),
        BudgetLine("noise far outside its range", "total variation", 8 * _RARE, _SOURCE + "4"),
    )


def _measured_lines(mechanism, replicas) -> tuple[BudgetLine, ...]:
    """For schemes whose recurrence has no proven bound; only what normals are off by is proven.

    `|L(z + dz) - L(z)| <= max_x |C x| |dz| / sigma`, whatever the scheme.
    """
    length = math.sqrt(mechanism.scheme.squared_sensitivity(float(np.max(mechanism.cross_terms))))
    normals = length * _normal_error(_pairs(mechanism)) / mechanism.noise_multiplier
    error = measured_error(randomness.key_from_words([0, 0]), mechanism, replicas)
    name = "rounding of the loss (measured and multiplied by eight, not proven)"
    return (
        BudgetLine("rounding of the normals", "epsilon", normals, _SOURCE + "5"),
        BudgetLine(name, "epsilon", 8 * error + 1e-6, "no proof for this scheme"),
        *_lines_of_normals(mechanism),
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


def weight_line(mechanism: Mechanism, delta_v: float, replicas: int, log_normalizer: float) -> BudgetLine:
    """Float32 of `ln w = ln Z + (1 - m) L` where a term is positive."""
    size = sizes(mechanism, delta_v, Direction.REMOVE, replicas, 0.0, _SHARE)
    parts = abs(log_normalizer) + (replicas - 1) * size.largest
    return BudgetLine("float32 weights", "relative", math.expm1(3 * _UNIT * parts), _SOURCE + "3")


# --- How large the numbers are ---


def sizes(mechanism, delta_v, direction, replicas, push, share) -> Size:
    """See `Size`; `share` is what vectors of more participations may carry of a likelihood ratio."""
    scheme = mechanism.scheme
    sigma, n = mechanism.noise_multiplier, scheme.iterations
    count, beyond = _count(mechanism, delta_v, direction, share)
    noise = float(-ndtri(_RARE / (2 * n)))
    cross = float(np.max(mechanism.cross_terms))
    each = _most_each(scheme)
    signal = replicas * 2 * each * (1 + cross) if direction == Direction.REMOVE or _mixed(scheme) else 0.0
    score = sigma * (noise + push) + signal
    ratio = (score + 0.5 + cross) / sigma**2
    most = count * each * (ratio + each / sigma**2)
    largest, above = most, 0.0
    spent = _DELTA_SHARE * delta_v
    if direction == Direction.ADD and not _mixed(scheme):
        largest, above = -math.log(spent), spent
    elif scheme.replicas is not None and mechanism.is_stationary:
        # P(f > e^t) <= E_P f e^-t = Z_2 e^-t.
        if scheme.replicas.most_replicas(mechanism) >= 2:
            largest, above = scheme.replicas.log_normalizer(mechanism, 2) - math.log(spent), spent
    if not largest < most:
        largest, above = most, 0.0
    return Size(count, beyond, largest, above, noise, score, ratio)


def _mixed(scheme) -> bool:
    return scheme.side_information is not None


def _most_each(scheme) -> int:
    """The most that one participation counts."""
    return 1 + _mixed(scheme) if scheme.examples_per_unit == 1 else scheme.examples_per_unit


def log_count_tail(scheme, count: int) -> float:
    """ln of a bound on the probability of `count` participations or more: all sets of so many steps."""
    sums = scheme.sums
    if sums.probability == 1:
        return 0.0 if count <= scheme.max_participations else -math.inf
    places = sums.steps if sums.phases else scheme.iterations - (count - 1) * (scheme.min_separation - 1)
    if count > places:
        return -math.inf
    ways = gammaln(places + 1) - gammaln(count + 1) - gammaln(places - count + 1)
    return min(0.0, float(ways) + count * math.log(sums.probability))


def _count(mechanism, delta_v, direction, share) -> tuple[int, float]:
    """(k, probability): outputs at which vectors of more than k carry more than `share` have at most this.

    By Markov's inequality: `E_P P(x | y) = P(x)`. Under another law than P a likelihood ratio is at least
    P(x = 0), and the summands of x have mean p(x) at most.
    """
    scheme, most = mechanism.scheme, mechanism.scheme.max_participations
    if mechanism.is_upper_bound or share == 0:  # cross terms would have to be counted in
        return most, 0.0
    log_share = math.log(share)
    if direction == Direction.ADD or _mixed(scheme):
        log_share += scheme.sums.log_none
    allowed = math.log(_DELTA_SHARE * delta_v) + log_share - (math.log(2) if _mixed(scheme) else 0.0)
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if log_count_tail(scheme, middle + 1) <= allowed else (middle + 1, high)
    if low >= most:
        return most, 0.0
    return max(low, 1), _DELTA_SHARE * delta_v


# --- The three parts ---


def _parts(mechanism, size: Size, direction, replicas, count) -> tuple[float, float, float]:
    """(normals, scores, recurrence): errors of ln of the summand of a vector of `count` participations."""
    each = _most_each(mechanism.scheme) + _mixed(mechanism.scheme)  # ln P/R and ln Q/R together
    reach = each * math.sqrt(count)  # |x|
    length = reach * math.sqrt(1 + 2 * float(np.max(mechanism.cross_terms)))  # |C x|
    normals = length * _normal_error(_pairs(mechanism)) / mechanism.noise_multiplier
    transform = _score_error(mechanism, direction, replicas, size, each, count)
    return normals, transform, _recurrence_error(mechanism, size, each, count)


def _pairs(mechanism) -> int:
    """Pairs of normals in one sample."""
    n, strategy = mechanism.scheme.iterations, mechanism.strategy
    if not strategy.is_toeplitz or strategy.bands == 1:
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
        square += _most_of(pairs, below) * each**2
        index *= 4
    # u above 1/4: half a step of u moves -ln u by 2^-39 at most, and R by that over R, or by its square root.
    square += pairs * (2.0**-39 * 2**8) ** 2 + _most_of(pairs, 2.0**-16) * 2 * 2.0**-39
    return math.sqrt(square)


def _most_of(trials: int, probability: float) -> int:
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


def _score_error(mechanism, direction, replicas, size: Size, each, count) -> float:
    strategy, scheme, sigma = mechanism.strategy, mechanism.scheme, mechanism.noise_multiplier
    n, variance = scheme.iterations, sigma**2
    # Its share of a log-ratio: additions of noise, shift and windows.
    local = each * count * 4 * replicas * _UNIT * size.score / variance
    if not strategy.is_toeplitz:
        outputs = sigma * (math.sqrt(n) + math.sqrt(-2 * math.log(_RARE)))
        outputs += (
            2 * replicas * each * math.sqrt(size.count * (1 + 2 * float(np.max(mechanism.cross_terms))))
        )
        return local + each * count * 2 * (n + 4) * _UNIT * outputs / variance
    if strategy.bands == 1:
        return local
    transform = fourier_roundings(circulant_length(n, strategy.bands)) * _UNIT
    noise = (transform + _SPECTRUM_ROUNDINGS * _UNIT) * sigma * _noise_norm(strategy, n)
    error = each * math.sqrt(count) * noise
    windows = adds_windows(scheme, strategy, replicas)
    if not windows and (direction == Direction.REMOVE or _mixed(scheme)):
        window = _window_norm(strategy, n, scheme.min_separation)
        drawn = replicas * each * math.sqrt(size.count)
        # The participations' transform, seen through C^T C x, and their part of the inverse one.
        error += 2 * each * math.sqrt(count) * (transform + 2 * _UNIT) * window * drawn
    return local + error / variance


def _recurrence_error(mechanism, size: Size, each, count) -> float:
    scheme = mechanism.scheme
    sums = scheme.sums
    half = 0.5 / mechanism.noise_multiplier**2
    local = _RATIO_ROUNDINGS * size.ratio * each
    if scheme.examples_per_unit > 1:
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


# --- What tests compare with ---


def measured_error(key, mechanism: Mechanism, replicas: int = 1, shift=None) -> float:
    """The largest |float32 loss - float64 loss| of one block of draws from the same normals.

    Runs in float64 for a moment whatever the JAX configuration. Measured under P (the
    sum of `replicas` participation vectors, at least one participation each) and under Q; both with the
    normalised scores pushed down by `shift`, (iterations,) float32.
    """
    scheme, strategy = mechanism.scheme, mechanism.strategy
    seen = scheme.side_information
    tables = None if seen is None else seen.tables()
    normals, participations, batch_sizes = _probe(key, tables, scheme, strategy, replicas)
    worst = 0.0
    for participation in participations:
        sigma = mechanism.noise_multiplier
        single = np.asarray(_losses(scheme, strategy, sigma, normals, participation, shift, batch_sizes))
        with jax.enable_x64(True):
            exact = _losses(
                scheme,
                strategy,
                np.float64(mechanism.noise_multiplier),
                tuple(np.asarray(part, np.float64) for part in normals),
                np.asarray(participation, np.float64),
                None if shift is None else np.asarray(shift, np.float64),
                batch_sizes,
            )
            worst = float(np.maximum(worst, np.max(np.abs(single - np.asarray(exact)))))  # max() drops NaN
    return worst


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _probe(key, tables, scheme, strategy, replicas):
    """Normals, the participations under P and under Q, and batch sizes where there are any."""
    normals_key, counts_key, somewhere_key = jax.random.split(key, 3)
    n, size = scheme.iterations, randomness.BLOCK_SIZE
    normals = strategy.draw_normals(normals_key, n, size, jnp.float32)
    if scheme.side_information is None:
        batch_sizes = None
        drawn = [scheme.draw_participation(part, size) for part in jax.random.split(counts_key, replicas)]
        counts = jnp.stack(drawn).sum(axis=0)
        others = jnp.zeros_like(counts)
    else:
        batch_sizes = scheme.side_information.draw(jax.random.fold_in(key, 0), size, tables)
        counts, others = (scheme.draw_counts(counts_key, size, side, batch_sizes) for side in DIRECTIONS)
    # A sample without a participation has hardly a loss to round; where they are rare it would hide them.
    somewhere = jax.random.randint(somewhere_key, (size, 1), 0, n)
    one = (jnp.arange(n) == somewhere).astype(jnp.float32)
    counts = jnp.where(counts.any(axis=1, keepdims=True), counts, one)
    return normals, (counts, others), batch_sizes


@functools.partial(jax.jit, static_argnums=(0, 1))
def _losses(scheme, strategy, sigma, normals, participation, shift, batch_sizes):
    drawn = strategy.scores_from_normals(normals, scheme.iterations, sigma, participation)
    drawn = drawn if shift is None else drawn - sigma * shift
    return loss_of_scores(scheme, strategy, drawn, sigma, Direction.REMOVE, batch_sizes)
