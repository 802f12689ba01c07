"""The budget items of float32 draws, recomputed from proofs/rounding.md, for all families of proposals.

Does not import `likelihood`. Each function returns `{name: (kind, amount)}`. Of a scheme it takes public
facts alone: `sums`, how many participations there are, and Z_2 of its replicas where the proof bounds a
likelihood ratio by it.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from jaxacct import Mechanism
from jaxacct.strategies.stationary import adds_windows, circulant_length

U = 2.0**-24
RARE = 2.0**-50
TAU = 2.0**-20
SPENT = 1e-3  # of delta_v, for each kind of rare output
NORMALS, SCORES, RATIO = (f"rounding of the {what}" for what in ("normals", "scores", "likelihood ratio"))
RARE_OUTPUTS, RARE_DRAWS = (f"{what} of rare participations" for what in ("outputs", "draws"))
Items = dict[str, tuple[str, float]]


class Distribution(NamedTuple):
    """What one loss is computed of: how many participations count, and how large its numbers are."""

    count: int
    beyond: float  # probability of outputs at which more count
    drawn: float  # norm of the drawn counts
    largest: float  # ln f, exceeded with probability `above`
    above: float
    score: float
    ratio: float
    by_transform: bool = False


def has_truncation(mechanism) -> bool:
    return mechanism.scheme.side_information is not None


def at_one_step(scheme) -> tuple[int, int]:
    """(how often one participation counts, the most counts of the unit at one step)."""
    number = scheme.examples_per_unit
    if scheme.parts is not None:
        return 1, number
    number = 2 if number == 1 and scheme.side_information is not None else number
    return number, number


def most(scheme) -> int:
    return scheme.max_participations * scheme.sums.processes


def norm_of(scheme, count: int) -> float:
    """|x| of vectors of so many participations: their sum times their largest entry, at most."""
    own, together = at_one_step(scheme)
    return math.sqrt(count * own * (together if scheme.sums.times == 1 else 1))


# --- How many participations count (section 3) ---


def log_tail(scheme, count: int) -> float:
    """ln P(so many or more), by sets of steps; of several processes the even split, times all splits."""
    sums = scheme.sums
    if sums.probability == 1:
        return 0.0 if count <= most(scheme) else -math.inf

    def sets(k: int) -> float:
        if k == 0:
            return 0.0
        places = sums.steps if sums.phases else scheme.iterations - (k - 1) * (scheme.min_separation - 1)
        if k > places:
            return -math.inf
        return math.log(math.comb(places, k)) + k * math.log(sums.probability)

    shares = [len(part) for part in np.array_split(np.empty(count), sums.processes)]
    splits = math.comb(count + sums.processes - 1, sums.processes - 1)
    return min(0.0, math.log(splits) + math.fsum(map(sets, shares)))


def fewest(scheme, log_allowed: float) -> int:
    """The least k >= 1 with P(more than k) at most e^log_allowed."""
    return next((k for k in range(1, most(scheme)) if log_tail(scheme, k + 1) <= log_allowed), most(scheme))


def counted(mechanism, delta_v: float, tau: float) -> tuple[int, float]:
    scheme, truncation = mechanism.scheme, has_truncation(mechanism)
    if mechanism.is_upper_bound or scheme.sums.times > 1 or tau == 0:
        return most(scheme), 0.0
    log_allowed = math.log(SPENT * delta_v * tau)
    if truncation:  # f is only known to be at least P(x = 0)
        untruncated = scheme.independent_truncation.untruncated if truncation else scheme
        log_allowed += untruncated.log_probability_of_none()
    if truncation:  # two likelihoods share it
        log_allowed -= math.log(2)
    k = fewest(scheme, log_allowed)
    return k, SPENT * delta_v if k < most(scheme) else 0.0


# --- How large scores and ratios are ---


def numbers(mechanism, m: int) -> tuple[float, float]:
    """(largest score, largest log-ratio of one participation)."""
    sigma, cross = mechanism.noise_multiplier, float(np.max(mechanism.cross_terms))
    score = sigma * stats.norm.isf(RARE / (2 * mechanism.scheme.iterations))
    score += 2 * m * at_one_step(mechanism.scheme)[1] * (1 + cross)
    return score, (score + cross + 0.5) / sigma**2


def log_z2(one, strategy, sigma: float) -> float:
    """ln Z_2 of one example; infinite without tables."""
    mechanism = Mechanism(one, strategy, sigma)
    module = one.replicas(mechanism) if mechanism.is_stationary else None
    found = math.inf if module is None else module.log_normalizer(mechanism)
    return found if math.isfinite(found) else math.inf


def distribution_of(mechanism, delta_v: float, m: int, tau: float) -> Distribution:
    scheme, strategy, sigma = mechanism.scheme, mechanism.strategy, mechanism.noise_multiplier
    count, beyond = counted(mechanism, delta_v, tau)
    score, ratio = numbers(mechanism, m)
    own, spent = at_one_step(scheme)[0], SPENT * delta_v
    everything, by_chance = count * own * (ratio + own / sigma**2), math.inf
    if scheme.parts is not None:
        one, k = scheme.parts
        by_chance = (k if scheme.sums.times == 1 else 1) * log_z2(one, strategy, sigma / math.sqrt(k))
        by_chance -= math.log(spent)
    elif (module := scheme.replicas(mechanism)) is not None:
        by_chance = module.log_normalizer(mechanism) - math.log(spent)
    largest, above = (by_chance, spent) if by_chance < everything else (everything, 0.0)
    drawn = m * norm_of(scheme, count) * scheme.sums.times * (1.5 if has_truncation(mechanism) else 1.0)
    return Distribution(count, beyond, drawn, largest, above, score, ratio)


# --- Errors of the summand of a vector of `count` participations ---


def normal_pairs(mechanism) -> int:
    n, strategy = mechanism.scheme.iterations, mechanism.strategy
    whole = strategy.rows(n) == n
    return math.ceil(n / 2) if whole else circulant_length(n, strategy.bands) // 2 + 1


def normals_norm(pairs: int) -> float:
    """Section 5: 15 u of each radius, and the grid of 40 bits of U."""

    def exceeded(chance: float) -> int:
        if pairs * chance > 50:
            return pairs
        for number in range(pairs):
            log_union = math.log(math.comb(pairs, number + 1)) + (number + 1) * math.log(chance)
            if log_union <= math.log(RARE / 16):
                return number
        return pairs

    square = (15 * U * (math.sqrt(2 * pairs) + math.sqrt(-2 * math.log(RARE)))) ** 2
    level = 4096
    while level < 2**38:
        top = min(1.0, level * 2.0**-38)
        square += exceeded(top) / ((2 * level + 1) ** 2 * -2 * math.log(top))
        level *= 4
    square += pairs * 2.0**-62 + exceeded(2.0**-16) * 2.0**-38
    return math.sqrt(square)


def scores_norm(strategy, n: int) -> float:
    """|C^T z| on the circulant by Chernoff at 2^-50, the best rate on a grid, refined."""
    power = np.abs(np.fft.fft(strategy.array, circulant_length(n, strategy.bands))) ** 2

    def bound(rate):
        return (math.log(1 / RARE) - np.log(1 - 2 * rate * power).sum() / 2) / rate

    rates = np.geomspace(1e-7, 0.4998, 400) / power.max()
    at = int(np.argmin([bound(rate) for rate in rates]))
    ends = rates[max(at - 1, 0)], rates[min(at + 1, 399)]
    best = optimize.minimize_scalar(bound, bounds=ends, method="bounded", options={"xatol": 1e-12})
    return math.sqrt(float(best.fun))


def window_norm(strategy, n: int, b: int) -> float:
    """|C^T C x| over |x|."""
    c = strategy.array
    if strategy.bands > b:
        return float((np.abs(np.fft.fft(c, circulant_length(n, strategy.bands))) ** 2).max())
    window = np.convolve(c, c[::-1])
    lags = np.convolve(window, window[::-1])[window.size - 1 :]
    return math.sqrt(lags[0] + 2 * max([0.0, *lags[b:]]))


def amplitude(strategy, n: int) -> float:
    return float(np.abs(np.fft.fft(strategy.array, circulant_length(n, strategy.bands))).max())


def transform_error(strategy, n: int) -> float:
    return U * (4 * math.log2(circulant_length(n, strategy.bands)) + 6)


def scores_error(mechanism, distribution: Distribution, m: int, count: int) -> float:
    scheme, strategy, sigma = mechanism.scheme, mechanism.strategy, mechanism.noise_multiplier
    n, truncation = scheme.iterations, has_truncation(mechanism)
    reach = norm_of(scheme, count) * (1.5 if truncation else 1.0)
    each = (at_one_step(scheme)[1] + truncation) * count
    error = each * 4 * m * U * distribution.score
    outputs = sigma * (math.sqrt(n) + math.sqrt(2 * math.log(1 / RARE)))
    if not strategy.is_toeplitz:
        cross = float(np.max(mechanism.cross_terms))
        error += each * 2 * (n + 4) * U * (outputs + 2 * distribution.drawn * math.sqrt(1 + 2 * cross))
    elif strategy.bands > 1:
        tau = transform_error(strategy, n)
        if strategy.rows(n) == n:
            drawn = distribution.drawn
            of_c = tau + 4 * U
            seen = sigma * scores_norm(strategy, n) + window_norm(strategy, n, scheme.min_separation) * drawn
            moved = (tau * amplitude(strategy, n) + of_c) * drawn
            error += reach * 1.001 * (moved + (tau + 3 * U) * (outputs + drawn) + of_c * seen)
        else:
            error += reach * (tau + 5 * U) * sigma * scores_norm(strategy, n)
            if distribution.by_transform or not adds_windows(scheme, strategy, m):
                window = window_norm(strategy, n, scheme.min_separation)
                error += 2 * reach * (tau + 2 * U) * window * distribution.drawn
    return error / sigma**2


def b_min_sep_error(scheme, distribution: Distribution, count: int, of_ratio: float) -> float:
    """Section 3 of sampling_table.md, for one probability p below 1 and one separation b above 1."""
    n, b, p = scheme.iterations, scheme.min_separation, scheme.sums.probability
    log_q = -math.log1p(-p)
    weight = max(abs(math.log(p) + waits * log_q) for waits in range(1, min(b, n) + 1))
    chances = [1.0, *[p] * (b - 1)] if scheme.warm_start else [1.0]
    starts = [chance / sum(chances) for chance in chances]
    ends = max((n - i) * log_q - math.log(start) for i, start in enumerate(starts[:n]))
    if n < len(starts):
        ends -= math.log(sum(starts[n:]))
    growth = min(most(scheme) * distribution.ratio + n * log_q, max(distribution.largest, 0.0) + ends)
    local = of_ratio + 4 * (weight + distribution.ratio) + 4 * growth
    last = len(starts[:n]) + 21 + 4 * (growth + ends)
    return U * (count * local + 11 * growth + n * U * growth + last)


def ratio_error(mechanism, distribution: Distribution, count: int) -> float:
    scheme, sums = mechanism.scheme, mechanism.scheme.sums
    if sums.processes > 1:
        return interacting_error(mechanism, distribution, count)
    half, truncation = 0.5 / mechanism.noise_multiplier**2, has_truncation(mechanism)
    each = at_one_step(scheme)[0] + truncation
    each_ratio = distribution.ratio * each
    local, exponent = 7 * each_ratio, each_ratio
    if each > 1 and not truncation:  # a mixture of several counts
        exponent += sums.log_weights + 2 * each**2 * half
        local += 4 * exponent + each * (exponent + 8)
    if sums.max_sampled:
        exponent = 3 * math.log(1 + sums.max_sampled) + 2 * distribution.ratio + 6 * half
        local += 10 * exponent + 16
    if sums.table is not None:
        return (1 + truncation) * b_min_sep_error(scheme, distribution._replace(ratio=exponent), count, local)
    if sums.probability == 1:
        tree = math.ceil(math.log2(max(count, 2))) + 2 + 4
        fixed = sums.terms + 20 + 4 * math.log(sums.terms)
        return U * (count * (local + tree * each_ratio) + fixed)
    log_q = -math.log1p(-sums.probability)
    growth = distribution.largest + sums.steps * log_q + (math.log(sums.terms) if sums.phases else 0.0)
    shift = scheme.min_separation * log_q - math.log(sums.probability)
    local += 4 * (shift + each_ratio) + 4 * growth
    tree = math.ceil(math.log2(max(sums.steps, 2)))
    steps = (8 + 3 + tree + 3) * growth + 3 * sums.steps * log_q
    last = sums.terms + 20 + 4 * (growth + math.log(sums.terms) + shift)
    return U * (2 if sums.max_sampled else 1) * (count * local + steps + last)


def interacting_error(mechanism, distribution: Distribution, count: int) -> float:
    """Section 7."""
    scheme, sums, variance = mechanism.scheme, mechanism.scheme.sums, mechanism.noise_multiplier**2
    m, b, tree = sums.processes, scheme.min_separation, math.ceil(math.log2(max(sums.terms, 2))) + 20
    shared = 1.5 * m / variance
    own = 8 * distribution.ratio + (m + 7) * shared
    if sums.probability == 1:
        top = math.log(m) + distribution.ratio + shared
        return U * (count * (own + 9 * top) + tree + 4 * math.log(sums.terms))
    log_q = -math.log1p(-sums.probability)
    free = m * (sums.steps + 2 * b) * log_q
    growth = distribution.largest + free + m * math.log1p((b - 1) * sums.probability)
    shift = b * log_q - math.log(sums.probability)
    top = shift + math.log(m) + distribution.ratio + shared
    local = own + 4 * top + 4 * growth + (m - 1) * (3 * (m * top + growth) + 8)
    fixed = 10 * growth + 2 * sums.steps * U * growth + 3 * free

    def slope(k: int) -> float:
        return (k + m) * (4 + 3 * m) + 10 * (2 * k + 1)

    total = most(scheme)
    if U * slope(total) >= 0.5:
        return math.inf
    of_all = U * (total * local + fixed) / (1 - U * slope(total))
    last = tree + 4 * (growth + math.log(sums.terms) + m * shift)
    return U * (count * local + slope(count) * of_all + fixed + last)


def errors(mechanism, distribution: Distribution, m: int, count: int) -> tuple[float, float, float]:
    scheme = mechanism.scheme
    length = norm_of(scheme, count) * (1.5 if has_truncation(mechanism) else 1.0)
    length *= math.sqrt(1 + 2 * float(np.max(mechanism.cross_terms)))
    normals = length * normals_norm(normal_pairs(mechanism)) / mechanism.noise_multiplier
    parts = (
        normals,
        scores_error(mechanism, distribution, m, count),
        ratio_error(mechanism, distribution, count),
    )
    return tuple(scheme.sums.times * part for part in parts)  # pyrefly: ignore[bad-return]


def bounded(mechanism, m: int, make) -> tuple[Distribution, float, tuple[float, float, float]]:
    """(distribution, share tau that more participations carry, errors) of `make(tau)`."""
    distribution, tau, total = make(TAU), TAU, most(mechanism.scheme)
    of_all = sum(errors(mechanism, distribution, m, total))
    if of_all > 1 and distribution.count < total:
        tau = TAU * math.exp(-min(of_all, 600.0))
        distribution = make(tau)
        of_all = sum(errors(mechanism, distribution, m, total))
    found = errors(mechanism, distribution, m, distribution.count)
    if distribution.count >= total:
        return distribution, 0.0, found
    return distribution, tau, (*found[:2], found[2] + (tau * math.exp(of_all) if of_all < 600 else math.inf))


def relative(log_error: float) -> tuple[str, float]:
    return "relative", math.expm1(log_error) if log_error < 600 else math.inf


def items(mechanism, found, rare: float) -> Items:
    """What all families have: three errors, two events of the normals, rare outputs."""
    pairs = normal_pairs(mechanism)
    named = zip((NORMALS, SCORES, RATIO), found, strict=True)
    return {name: ("epsilon", amount) for name, amount in named} | {
        "two extreme radii in one sample": ("total variation", (pairs * 4096 * 2.0**-40) ** 2 / 2),
        "noise far outside its range": ("total variation", 2.0**-47),
        RARE_OUTPUTS: ("delta", rare),
    }


def loss_items(mechanism, delta_v: float, m: int = 1) -> Items:
    """Draws whose weights are a function of the loss alone."""
    distribution, tau, found = bounded(mechanism, m, lambda tau: distribution_of(mechanism, delta_v, m, tau))
    made = items(mechanism, found, distribution.beyond + distribution.above)
    return made | ({RARE_DRAWS: ("relative", m * tau)} if tau else {})


def weight_items(mechanism, delta_v: float, m: int, log_z: float, lowest: float = 0.0) -> Items:
    """Of `ln Z + (1 - m) L`: three roundings of its parts, at outputs that `loss_items` keep."""
    distribution, *_ = bounded(mechanism, m, lambda tau: distribution_of(mechanism, delta_v, m, tau))
    largest = max(distribution.largest, lowest)
    return {"float32 weights": relative(3 * U * (abs(log_z) + (m - 1) * largest))}


def two_losses(mechanism, delta_v: float, m: int, log_z: float, drawn, as_units: int, name: str) -> Items:
    """Weights `ln Z + L - m L'`: both losses are off, and both may be rare."""
    other, other_tau, of_other = drawn

    def make(tau):
        distribution = distribution_of(mechanism, delta_v, as_units, tau)
        return distribution._replace(drawn=other.drawn, by_transform=True)

    distribution, _, found = bounded(mechanism, as_units, make)
    logs = abs(log_z) + distribution.largest * mechanism.scheme.sums.times + m * other.largest
    made = items(mechanism, found, distribution.beyond + distribution.above + other.beyond + other.above)
    made[name] = relative(sum(found) + m * sum(of_other) + 4 * U * logs)
    return made | ({RARE_DRAWS: ("relative", m * other_tau)} if other_tau else {})


def other_distribution(one, m: int, count: int, beyond: float, largest: float, spent: float) -> Distribution:
    score, ratio = numbers(one, m)
    everything = count * (ratio + 1 / one.noise_multiplier**2)
    largest, above = (largest, spent) if largest < everything else (everything, 0.0)
    return Distribution(count, beyond, m * math.sqrt(count), largest, above, score, ratio, True)


def example_items(mechanism, delta_v: float, m: int, log_z: float) -> Items:
    """Replicas of one of a user's k examples."""
    scheme, k = mechanism.scheme.parts
    one, spent = Mechanism(scheme, mechanism.strategy, mechanism.noise_multiplier), SPENT * delta_v

    def z2(power):
        return log_z2(scheme, mechanism.strategy, mechanism.noise_multiplier / math.sqrt(power))

    def make(tau):
        log_allowed = 2 * (math.log(spent * tau) + scheme.log_probability_of_none()) - z2(2 * k)
        count = fewest(scheme, log_allowed)
        beyond = spent if count < scheme.max_participations else 0.0
        return other_distribution(one, m, count, beyond, z2(k) - math.log(spent), spent)

    drawn = bounded(one, m, make)
    name = "float32 weights, with the loss of one example"
    return two_losses(mechanism, delta_v, m, log_z, drawn, -(-m // k), name)


def pair_items(mechanism, delta_v: float, m: int, log_z: float) -> Items:
    rare = "outputs of rare participations of a user's own"
    return example_items(mechanism, delta_v, m, log_z) | {rare: ("delta", (SPENT * delta_v) ** 2)}


def by_pairs(mechanism, delta_v: float, made: Items, as_units: int) -> Items:
    """Losses of pairs of a user's examples: the recurrence of two, for each pair, besides that of one."""
    scheme, k = mechanism.scheme, mechanism.scheme.parts[1]
    distribution = distribution_of(mechanism, delta_v, as_units, 0.0)
    two = Mechanism(scheme.two, mechanism.strategy, mechanism.noise_multiplier / math.sqrt(k - 1 + k % 2))
    more = interacting_error(two, distribution._replace(largest=2 * distribution.largest), most(two.scheme))
    return made | {RATIO: ("epsilon", made[RATIO][1] + (k // 2) * more)}


def inflated_items(mechanism, delta_v: float, m: int, times: int, log_z: float) -> Items:
    """Replicas of an example that participates `times` as often."""
    scheme, log_ratio = mechanism.scheme.inflated(times)
    inflated, spent = Mechanism(scheme, mechanism.strategy, mechanism.noise_multiplier), SPENT * delta_v
    of_none = scheme.log_probability_of_none() - mechanism.scheme.log_probability_of_none()
    log_least = min(log_ratio, of_none) - 1e-9

    def make(tau):
        count = fewest(scheme, math.log(spent * tau) + log_least)
        beyond = spent if count < scheme.max_participations else 0.0
        largest = log_z2(scheme, mechanism.strategy, mechanism.noise_multiplier) - log_least - math.log(spent)
        return other_distribution(inflated, m, count, beyond, largest, spent)

    name = "float32 weights, with the loss at the inflated probability"
    return two_losses(mechanism, delta_v, m, log_z, bounded(inflated, m, make), m, name)


def truncation_items(mechanism, delta_v: float, log_parts: float) -> Items:
    """Two replicas with independent truncation (truncated_batches.md, sections 3 and 5)."""
    distribution, tau, found = bounded(mechanism, 2, lambda tau: distribution_of(mechanism, delta_v, 2, tau))
    made = items(mechanism, found, distribution.beyond + distribution.above)
    made["more examples eligible than allowed for"] = "delta", mechanism.scheme.independent_truncation.beyond
    made["float32 weights"] = relative(sum(found) + 4 * U * (log_parts + 2 * distribution.largest))
    return made | ({RARE_DRAWS: ("relative", 2 * tau)} if tau else {})
