"""DiceSGD: the valid bound, the recursion against enumeration, theorem 3.7 beaten by its counterexample."""

import decimal
import itertools
import math
from decimal import Decimal

import mpmath
import numpy as np
import pytest
from scipy import optimize, stats

from jaxacct.accountants import dice
from jaxacct.accountants.dice_plan import DicePlan
from jaxacct.individual import gdp_delta, gdp_mu, rdp_to_epsilon, subsampled_gaussian_rdp
from tests.refusals import refused

CIFAR = dict(iterations=150, clip_norm=1.0, batch_size=1000)


def test_valid_noise():
    assert gdp_mu(2, 1e-5) == pytest.approx(0.50155169, rel=1e-7)
    assert gdp_mu(8, 8e-6) == pytest.approx(1.65149005, rel=1e-7)
    for error, sigma in ((1.0, 48.6995), (3.0, 146.0498), (1e-3, 0.07304)):
        found = dice.dice_noise_std(2, 1e-5, error_clip_norm=error, **CIFAR)
        assert found == pytest.approx(sigma, rel=2e-4)
        spent = dice.dice_epsilon(1e-5, error_clip_norm=error, noise_std=found, **CIFAR)
        assert spent == pytest.approx(2, rel=1e-9)
    assert dice.dice_mu(error_clip_norm=1.0, noise_std=0.00407168, **CIFAR) == pytest.approx(5998.8, rel=1e-4)
    # One step has nothing fed back; a reset after every step makes all steps first ones.
    one = dict(clip_norm=1.0, error_clip_norm=7.0, batch_size=10, noise_std=0.5)
    assert dice.dice_mu(iterations=1, **one) == pytest.approx(0.2)
    assert dice.dice_mu(iterations=9, reset_every=1, **one) == pytest.approx(0.6)
    assert dice.dice_mu(iterations=9, reset_every=1, adjacency="replace-one", **one) == pytest.approx(1.2)
    run = dict(error_clip_norm=1e-3, noise_std=1.0, **CIFAR)
    assert dice.dice_mu(**run) / dice.dice_mu(participations=3, **run) == pytest.approx(1.486, rel=1e-3)


@pytest.mark.parametrize(
    ("steps", "of_epoch", "reset_every"), [(7, 3, None), (8, 2, 3), (5, 1, 2), (4, 5, None)]
)
def test_an_example_is_in_one_batch_of_an_epoch(steps, of_epoch, reset_every):
    """The attack plays all places of an example; one participation less than it has would be beaten."""
    c1, c2 = 0.7, 0.2
    run = dict(clip_norm=c1, error_clip_norm=c2, batch_size=2, noise_std=1.0)
    run |= dict(iterations=steps, reset_every=reset_every)
    epochs, worst = -(-steps // of_epoch), 0.0
    for places in itertools.product(range(of_epoch), repeat=epochs):
        joins = {epoch * of_epoch + place for epoch, place in enumerate(places)}
        square, differs = 0.0, False
        for step in range(steps):
            differs = differs and (reset_every is None or step % reset_every > 0)
            square += ((step in joins) * c1 / 2 + differs * 2 * c2) ** 2
            differs = differs or step in joins
        worst = max(worst, math.sqrt(square))
    mu = dice.dice_mu(participations=epochs, **run)
    assert worst <= mu * (1 + 1e-12) and mu <= dice.dice_mu(**run) * (1 + 1e-12)
    assert reset_every is not None or mu == pytest.approx(worst)
    if reset_every is None and 1 < epochs:
        assert dice.dice_mu(participations=epochs - 1, **run) < worst
    refused("participations must be", dice.dice_mu, participations=0, **run)


@pytest.mark.parametrize(
    ("order", "p", "sigma"), [(16.0, 0.003, 0.28), (16.0, 0.11, 0.19), (512.0, 0.09, 0.5)]
)
def test_partial_amplification_is_rounded_up(order, p, sigma):
    """Against the closed form for unbounded gradients in 60 digits: logs are up to 3e7 after 3,000 steps."""
    steps, share, fed_back = 3000, 0.01, 0.12
    run = dict(iterations=steps, clip_norm=share * 100, error_clip_norm=fed_back / 2, batch_size=100)
    found = dice.dice_rdp_subsampled(order, noise_std=sigma, sampling_probability=p, **run)
    with decimal.localcontext() as context:
        context.prec, context.Emax = 60, decimal.MAX_EMAX
        a, q, P = Decimal(order), 1 - Decimal(p), Decimal(p)
        weight, s, f = a * (a - 1) / (2 * Decimal(sigma) ** 2), Decimal(share), Decimal(fed_back)
        after = q * (weight * f**2).exp() + P * (weight * (s + f) ** 2).exp()
        first = P * (weight * s**2).exp()
        exact = (q**steps + first * (after**steps - q**steps) / (after - q)).ln()
        assert 0 <= Decimal(found) * (a - 1) - exact <= Decimal("1e-8") * exact


HIDDEN = dict(clip_norm=0.9, error_clip_norm=0.35, batch_size=2, noise_std=0.8, sampling_probability=0.3)


def shifts_of(coins, reset_every=None):
    """The largest shifts of a pattern of `HIDDEN`."""
    shifts, differs = [], False
    for step, taken in enumerate(coins):
        differs = differs and (reset_every is None or step % reset_every > 0)
        shifts.append(taken * 0.45 + differs * 0.7)
        differs = differs or bool(taken)
    return np.array(shifts)


@pytest.mark.parametrize(("order", "reset_every"), [(2, None), (3, None), (4, 2), (3, 1), (2, 9)])
def test_moments_of_hidden_batches_against_every_tuple_of_patterns(order, reset_every):
    patterns = list(itertools.product((0, 1), repeat=4 if order < 4 else 3))
    shifts = np.array([shifts_of(coins, reset_every) for coins in patterns])
    weights = np.array([0.3 ** sum(coins) * 0.7 ** (len(coins) - sum(coins)) for coins in patterns])
    products, total = shifts @ shifts.T / 0.64, 0.0
    for chosen in itertools.product(range(len(patterns)), repeat=order):
        pairs = itertools.combinations(chosen, 2)
        total += math.prod(weights[list(chosen)]) * math.exp(sum(products[pair] for pair in pairs))
    run = dict(iterations=len(patterns[0]), reset_every=reset_every)
    assert dice.dice_log_moment(order, **run, **HIDDEN) == pytest.approx(math.log(total), abs=1e-10)
    whole = dice.dice_log_moment(order, **run, **HIDDEN | {"sampling_probability": 1.0})
    mu = dice.dice_mu(**run, **{name: HIDDEN[name] for name in list(HIDDEN)[:4]})
    assert whole == pytest.approx(order * (order - 1) / 2 * mu**2, abs=1e-10)


def test_moments_of_hidden_batches_by_quadrature():
    """Two steps: the integral of the likelihood ratio of the worst pair, at whole orders and between them."""
    points, weights = np.polynomial.hermite_e.hermegauss(120)
    grid, weight = np.meshgrid(points, points), np.outer(weights, weights) / (2 * math.pi)

    def ratio(shift):
        return np.exp(sum([h / 0.8 * z - h * h / 1.28 for h, z in zip(shift, grid, strict=True)]))

    mixed = sum(0.3 ** sum(c) * 0.7 ** (2 - sum(c)) * ratio(shifts_of(c)) for c in np.ndindex(2, 2))
    moments = {order: dice.dice_log_moment(order, iterations=2, **HIDDEN) for order in (2, 3, 4, 5)}
    for order, found in moments.items():
        assert found == pytest.approx(math.log((weight * mixed**order).sum()), rel=1e-9)
    for order in (2.5, 3.5, 4.5):
        chord = (moments[int(order)] + moments[int(order) + 1]) / 2
        assert math.log((weight * mixed**order).sum()) < chord


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 5.0, 20.0])
@pytest.mark.parametrize("noise", [0.6, 1.5, 4.0])
def test_delta_in_every_batch_is_above_the_exact_one(epsilon, noise):
    run = HIDDEN | dict(iterations=3, noise_std=noise)
    mu = dice.dice_mu(**{name: value for name, value in run.items() if name != "sampling_probability"})
    found = dice.dice_delta_subsampled(epsilon, **run | {"sampling_probability": 1.0})
    assert gdp_delta(epsilon, mu) < found < 30 * gdp_delta(epsilon, mu) + 1e-290


@pytest.mark.parametrize(("order", "p", "sigma"), [(6, 0.003, 0.28), (9, 0.11, 0.19), (2, 0.9, 0.01)])
def test_moments_of_hidden_batches_are_rounded_up(order, p, sigma):
    """Against powers in 60 digits of the matrix of a step, coin by coin: logs are up to 3e7."""
    c, f, steps = 0.01, 0.12, 3000
    found = dice.dice_log_moment(
        order, iterations=steps, clip_norm=c * 100, error_clip_norm=f / 2, batch_size=100, noise_std=sigma,
        sampling_probability=p,
    )  # fmt: skip
    with mpmath.workdps(60):
        c, f, p, sigma = mpmath.mpf(c), 2 * mpmath.mpf(f / 2), mpmath.mpf(p), mpmath.mpf(sigma)
        step = mpmath.zeros(order + 1)
        for j in range(order + 1):
            for coins in itertools.product((0, 1), repeat=order):
                shifts = [c * taken + f * (i < j) for i, taken in enumerate(coins)]
                pairs = (sum(shifts) ** 2 - sum(h * h for h in shifts)) / 2
                weight = p ** sum(coins) * (1 - p) ** (order - sum(coins))
                step[j, j + sum(coins[j:])] += weight * mpmath.exp(pairs / sigma**2)
        exact = mpmath.log(sum((step**steps)[0, j] for j in range(order + 1)))
        assert 0 <= found - exact <= 1e-8 * exact


# Theorem 3.7 of arXiv 2311.14632 as printed, which is false (proofs/errata.md): no guarantee.
def paper_theorem_3_7_sigma(
    epsilon: float, delta: float, *, iterations: int, dataset_size: int, clip_norm: float, error_bound: float
) -> float:
    """Return the noise as printed in arXiv 2311.14632, theorem 3.7: **not a guarantee** (proofs/errata.md).

    `sigma_1^2 = 32 T (C1^2 + 2 C^2) ln(1/delta) / (N^2 eps^2)`; `error_bound` is the printed C, at least B
    C2.
    """
    gradient = clip_norm**2 + 2 * error_bound**2
    return math.sqrt(32 * iterations * gradient * -math.log(delta)) / (dataset_size * epsilon)


def paper_theorem_3_7_epsilon(epsilon: float, delta: float) -> float:
    """Return epsilon of the proof's own Renyi bound at the printed noise: **not a guarantee**.

    `sqrt 2 eps + eps^2 / (2 ln 1/delta)`, not eps: the last step of the proof loses a constant.
    """
    return math.sqrt(2) * epsilon + epsilon**2 / (2 * -math.log(delta))


def test_printed_numbers():
    printed = dict(iterations=150, dataset_size=50_000, clip_norm=1.0)
    for error_bound, sigma in ((1000.0, 3.3245171), (3000.0, 9.97354911)):
        found = paper_theorem_3_7_sigma(2, 1e-5, error_bound=error_bound, **printed)
        assert found == pytest.approx(sigma, rel=1e-7)
    assert paper_theorem_3_7_epsilon(2, 1e-5) == pytest.approx(3.00214, rel=1e-5)
    assert paper_theorem_3_7_epsilon(8, 8e-6) == pytest.approx(14.04035, rel=1e-5)


def test_the_error_does_not_contract():
    """Lemma A.6 uses one factor for both runs: errors 10 and 9 clipped at 1 stay 1 apart, not 0.9."""
    assert (10 - min(10, 1)) - (9 - min(9, 1)) == 1


def test_noise_of_the_paper_beside_dp_sgd():
    """Algorithm 4 (C2 = C1 = C, Gtilde = 3) takes 4 times DP-SGD's noise; what it promises is false."""
    for steps, size, epsilon, delta, sigma in (
        (150, 50_000, 2, 1e-5, 0.00407168),
        (100, 50_000, 2, 1e-5, 0.00332452),
        (420, 42_000, 8, 8e-6, 0.00204730),
        (210, 42_000, 8, 8e-6, 0.00144766),
    ):
        found = paper_theorem_3_7_sigma(
            epsilon, delta, iterations=steps, dataset_size=size, clip_norm=1.0, error_bound=1.0
        )
        assert found == pytest.approx(sigma, rel=2e-6)
    orders = np.concatenate([np.arange(2, 128), [256, 512, 1024]])
    for steps, q, epsilon, delta, z in (
        (150, 0.02, 2, 1e-5, 1.00933),
        (100, 0.02, 2, 1e-5, 0.97354),
        (420, 1 / 42, 8, 8e-6, 0.71523),
    ):
        found = rdp_to_epsilon(steps * subsampled_gaussian_rdp(q, z, orders), orders, delta)[0]
        assert found == pytest.approx(epsilon, rel=1e-4)
    gpt = dict(iterations=420, clip_norm=1.0, batch_size=1000)
    assert dice.dice_noise_std(8, 8e-6, error_clip_norm=1.0, **gpt) == pytest.approx(24.8015, rel=1e-5)
    small = dict(error_clip_norm=1e-3, noise_std=0.00407168, **CIFAR)
    assert dice.dice_mu(**small) == pytest.approx(8.997, rel=1e-3)
    assert dice.dice_epsilon(1e-5, **small) == pytest.approx(78.03, rel=1e-3)


def test_theorem_3_6_holds_where_its_condition_does():
    """Example B.1 with C' = 2 from 10, C1 = 0.1: the bound on the weighted mean of squared gradients."""
    c1 = 0.1
    for c2, steps, right, left in (
        (0.3 + math.sqrt(6) / 3, 1000, 0.71507, 0.32338),
        (0.3, 100_000, 0.01986, 0.05042),  # fails: C2 is below what it asks for
    ):
        energy = 2 * c1**2 + 3 * c2**2
        rate = math.sqrt(2 * 17 / (steps * energy))
        assert 2 * math.sqrt(2 * 17 * energy / steps) == pytest.approx(right, rel=5e-4)
        x, e, slopes, es = 10.0, 0.0, np.zeros(steps), np.zeros(steps)
        for t in range(steps):
            raw = [max(-2.0, min(2.0, x - centre)) for centre in (-1.0, -1.0, 2.0)]
            slope = sum(raw) / 3
            v = sum(max(-c1, min(c1, g)) for g in raw) / 3 + max(-c2, min(c2, e))
            slopes[t], es[t] = slope**2, e
            x, e = x - rate * v, e + slope - v
        kept = 1 - np.minimum(1, c2 / np.maximum(np.abs(es), 1e-300))
        weights = 1 - np.append(np.cumprod(kept[::-1])[::-1][1:], 1.0)
        assert (weights @ slopes) / weights.sum() == pytest.approx(left, rel=0.02)


def released_sum(steps, p, batch, c1, c2, slope, sigma, runs, rng):
    """Sum over the run of what algorithm 2 releases, 1-D: one example with gradient `slope`, all others 0."""
    error, total = np.zeros(runs), np.zeros(runs)
    for _ in range(steps):
        taken = rng.random(runs) < p
        v = taken * min(slope, c1) / batch + np.clip(error, -c2, c2)
        error += taken * slope / batch - v
        total += v + sigma * rng.normal(size=runs)
    return total


def test_theorem_3_7_is_beaten():
    """A threshold on the released sum: delta(2) is 0.4 where the theorem says 1e-5. False alarm 1e-6 each."""
    steps, c1, c2, batch, size = 150, 1.0, 1.0, 1000, 50_000
    sigma = paper_theorem_3_7_sigma(
        2, 1e-5, iterations=steps, dataset_size=size, clip_norm=c1, error_bound=batch * c2
    )
    rng, runs = np.random.default_rng(4), 20_000
    seen = released_sum(steps, batch / size, batch, c1, c2, 1e6, sigma, runs, rng)
    threshold = 2.225 * sigma * math.sqrt(steps)
    false_alarm = stats.norm.sf(2.225)  # without the example every release is N(0, sigma^2)
    caught = stats.beta.ppf(1e-6, (seen > threshold).sum(), runs - (seen > threshold).sum() + 1)
    assert caught - math.exp(2) * false_alarm > 0.35
    # The valid bound covers the same attack.
    mu = dice.dice_mu(iterations=steps, clip_norm=c1, error_clip_norm=c2, batch_size=batch, noise_std=sigma)
    assert caught - math.exp(2) * false_alarm <= gdp_delta(2.0, mu)


def min_noise_std(
    epsilon, delta, *, epochs, dataset_size, batch_size, clip_norm, error_clip_norm, gradient_bound=math.inf
):
    """`noise_std` below which DiceSGD is not (epsilon, delta)-DP (proofs/dice.md, theorem 2).

    `(1 - 1/k) sqrt(T) min(C0, C1 + N C2) / (N mu)` for k epochs, the error never reset.
    """
    most = min(gradient_bound, clip_norm + dataset_size * error_clip_norm)
    steps = epochs * dataset_size // batch_size
    return (1 - 1 / epochs) * math.sqrt(steps) * most / (dataset_size * gdp_mu(epsilon, delta))


def test_no_accountant_can_certify_much_less():
    """Theorem 2 of proofs/dice.md: the sum of all releases moves by (k - 1) a / B for every shuffle.

    So at a noise below the bound the threshold test beats the promise; the valid bound asks for at most a
    factor of about 2 / (1 - 1/k) more, and clipped DP-SGD at the threshold C1 + N C2 needs the same noise.
    """
    size, batch, epochs, c1, c2 = 60, 5, 8, 1.0, 0.3
    steps, rng = epochs * size // batch, np.random.default_rng(9)
    for a in (0.5, c1 + 0.4 * size * c2, c1 + size * c2):
        most_left = max(0.0, a - c1) / batch
        for _ in range(200):
            error, total = 0.0, 0.0
            for _ in range(epochs):
                taken = rng.integers(size // batch)
                for t in range(size // batch):
                    v = (t == taken) * min(a, c1) / batch + min(error, c2)
                    error += (t == taken) * a / batch - v
                    total += v
                assert error <= most_left * (1 + 1e-12)
            assert total >= (epochs - 1) * a / batch * (1 - 1e-12)
    problem = dict(dataset_size=size, batch_size=batch, clip_norm=c1, error_clip_norm=c2)
    least = min_noise_std(4.0, 1e-5, epochs=epochs, **problem)
    shift = (epochs - 1) * (c1 + size * c2) / batch
    assert gdp_delta(4.0, shift / (math.sqrt(steps) * least)) == pytest.approx(1e-5, rel=1e-6)
    assert gdp_delta(4.0, shift / (math.sqrt(steps) * least * 0.99)) > 1e-5
    run = dict(iterations=steps, clip_norm=c1, error_clip_norm=c2, batch_size=batch)
    assert least < dice.dice_noise_std(4.0, 1e-5, **run) < least * (2 + c1 / (batch * c2)) / (1 - 1 / epochs)
    bounded = min_noise_std(4.0, 1e-5, epochs=epochs, gradient_bound=2.0, **problem)
    assert bounded == pytest.approx(least * 2.0 / (c1 + size * c2))


def test_partial_amplification_is_not_beaten():
    """Adversaries who add up releases, all or the last ones, never get beyond the bound.

    They do at the noise that would be enough if coins of later steps hid what is fed back, as the proof of
    theorem 3.7 has it. One example of a huge gradient, 120 Poisson batches at p = 0.02, (1, 0.05).
    Clopper and Pearson for each of 160 thresholds; false alarm 1e-6 in all.
    """
    steps, p, batch, c1, c2, runs = 120, 0.02, 6, 1.0, 0.5, 20_000
    plan = DicePlan.calibrate(
        1.0, 0.05, dataset_size=300, batch_size=batch, iterations=steps, clip_norm=c1, error_clip_norm=c2,
        sampling="poisson",
    )  # fmt: skip

    def shown(noise_std) -> float:
        """The most that delta(1) is shown to be."""
        rng, best = np.random.default_rng(6), 0.0
        taken = rng.random((runs, steps)) < p
        first = np.where(taken.any(axis=1), taken.argmax(axis=1), steps)
        shift = taken * c1 / batch + c2 * (np.arange(steps) > first[:, None])
        released = shift + noise_std * rng.normal(size=shift.shape)
        for last in (120, 90, 60, 30):
            seen = np.sort(released[:, -last:].sum(axis=1))
            for z in np.linspace(0, 4, 40):
                caught = runs - np.searchsorted(seen, z * noise_std * last**0.5)
                least = stats.beta.ppf(1e-6 / 160, caught, runs - caught + 1) if caught else 0.0
                best = max(best, least - math.e * stats.norm.sf(z))
        return best

    def wrongly(noise_std) -> float:
        """delta(1), were what is fed back hidden by the coins of later steps as gradients are."""
        orders = np.geomspace(1.05, 200, 300)
        weight = orders * (orders - 1) / (2 * noise_std**2) * (c1 / batch + 2 * c2) ** 2
        rdp = steps * np.logaddexp(math.log1p(-p), math.log(p) + weight) / (orders - 1)
        logs = (orders - 1) * (rdp - 1.0 + np.log1p(-1 / orders)) - np.log(orders)
        return float(np.exp(logs.min()))

    noise_if_it_were = optimize.brentq(lambda noise: wrongly(noise) - 0.05, 0.1, 50.0)
    assert shown(plan.noise_std) <= 0.05 < shown(noise_if_it_were)


def likelihood_ratio_test(noise_std, *, steps, p, share, fed_back, epsilon, runs, seed, reset_every):
    """Return terms whose mean is delta of the worst pair: one huge gradient, fed back after a batch."""
    rng, log_ratios = np.random.default_rng(seed), np.zeros(runs)
    for step in range(steps):
        if step % (reset_every or steps) == 0:
            taking, log_not, log_taken = np.zeros(runs, bool), log_ratios, np.full(runs, -np.inf)
        coins = rng.random(runs) < p
        seen = coins * share + taking * fed_back + noise_std * rng.normal(size=runs)

        def log_ratio(shift, seen=seen):
            return shift * (seen - shift / 2) / noise_std**2

        later = np.logaddexp(np.log1p(-p) + log_ratio(fed_back), np.log(p) + log_ratio(share + fed_back))
        log_taken = np.logaddexp(log_taken + later, log_not + np.log(p) + log_ratio(share))
        log_not, taking = log_not + np.log1p(-p), taking | coins
        log_ratios = np.logaddexp(log_not, log_taken)
    return np.maximum(0.0, -np.expm1(epsilon - log_ratios))


@pytest.mark.parametrize(
    ("steps", "p", "c2", "reset_every"),
    [(60, 0.02, 0.01, None), (60, 0.02, 0.5, 20), (100, 0.1, 0.002, None)],
)
def test_the_best_test_of_the_worst_pair_is_near_the_bound(steps, p, c2, reset_every):
    """It does not beat the plan's delta, and does at 0.75 of the noise. False alarm 1e-6 each."""
    plan = DicePlan.calibrate(
        1.0, 0.01, dataset_size=round(6 / p), batch_size=6, iterations=steps, clip_norm=1.0,
        error_clip_norm=c2, reset_every=reset_every, sampling="poisson",
    )  # fmt: skip
    attack = dict(steps=steps, p=p, share=1 / 6, fed_back=2 * c2, epsilon=1.0, runs=20_000, seed=3)
    attack |= dict(reset_every=reset_every)
    for factor, is_beaten in ((1.0, False), (0.75, True)):
        terms = likelihood_ratio_test(plan.noise_std * factor, **attack)
        shown = terms.mean() - 4.8 * terms.std() / math.sqrt(terms.size)
        assert (shown > 0.01) == is_beaten, shown


PROBLEM = dict(iterations=5, clip_norm=1.0, error_clip_norm=1.0, batch_size=2, noise_std=1.0)


def test_bad_input():
    for bad in [
        {"clip_norm": 0.0},
        {"error_clip_norm": -1.0},
        {"batch_size": 0},
        {"noise_std": float("nan")},
        {"iterations": 0},
        {"adjacency": "zero-out"},
        {"reset_every": 0},
    ]:
        refused(next(iter(bad)), dice.dice_mu, **PROBLEM | bad)
    sampled = PROBLEM | dict(sampling_probability=0.1)
    for name, value in (("noise_std", 1e200), ("clip_norm", 1e200), ("residual_bound", "1")):
        refused(name, dice.dice_delta_subsampled, 1.0, **sampled | {name: value})
    refused("residual_bound", dice.dice_delta_subsampled, 1.0, residual_bound=float("nan"), **sampled)


def test_a_delta_below_float64_is_not_0():
    problem = PROBLEM | dict(iterations=1, noise_std=20.0)
    for epsilon in (8.0, 1e308):
        assert 0 < dice.dice_delta_subsampled(epsilon, sampling_probability=0.1, **problem) < 1e-299


def test_partial_amplification():
    certain = dict(error_clip_norm=1.0, noise_std=50.0, sampling_probability=1.0, **CIFAR)
    assert dice.dice_rdp_subsampled(3.0, **certain) == pytest.approx(0.35795769, rel=1e-7)
    problem = dict(iterations=6, clip_norm=1.0, error_clip_norm=0.4, batch_size=2, noise_std=1.3)
    found = dice.dice_rdp_subsampled(2.5, sampling_probability=0.3, residual_bound=0.5, **problem)
    assert found == pytest.approx(1.86134686, rel=1e-7)
    total = 0.0
    for pattern in itertools.product((0, 1), repeat=6):
        probability, squares, seen = 1.0, 0.0, 0
        for taken in pattern:
            probability *= 0.3 if taken else 0.7
            squares += (taken * 0.5 + min(0.8, seen * 0.25)) ** 2
            seen += taken
        total += probability * math.exp(2.5 * 1.5 / (2 * 1.69) * squares)
    assert found == pytest.approx(math.log(total) / 1.5, rel=1e-12)
    orders = np.concatenate([np.linspace(1.1, 16, 150), np.geomspace(16, 256, 60)])
    for bound, epsilon in ((math.inf, 1.300), (1.0, 1.203)):
        run = dict(error_clip_norm=1e-3, noise_std=0.073, sampling_probability=0.02, residual_bound=bound)
        rdp = [dice.dice_rdp_subsampled(float(a), **run, **CIFAR) for a in orders]
        assert rdp_to_epsilon(rdp, orders, 1e-5)[0] == pytest.approx(epsilon, abs=2e-3)
