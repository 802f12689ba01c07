"""Budget items by family of proposals, recomputed (`tests.oracles.budget`); without `likelihood`."""

import math

from jaxacct import Mechanism
from tests.oracles.budget import (
    RARE_DRAWS,
    RATIO,
    SPENT,
    Distribution,
    Items,
    U,
    bounded,
    distribution_of,
    fewest,
    interacting_error,
    items,
    log_z2,
    most,
    numbers,
    relative,
)


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
