"""Filters (readmission, rounding, NaN, adaptive adversaries); GDP curves, Renyi conversion, the odometer."""

import fractions

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import integrate, optimize, stats

from jaxacct import individual
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_log_delta
from jaxacct.individual import GDPFilter, IndividualGDPFilter, IndividualRDPFilter, gdp_delta
from jaxacct.individual.filters import add_exactly, spent_of
from tests.refusals import refused


def run(privacy_filter, costs, steps):
    """How often each example participated when it asks for the same cost at every step."""
    costs = jnp.asarray(costs)

    @jax.jit
    def all_steps(state):
        def body(_, carry):
            state, taken = carry
            state, active = privacy_filter.step(state, costs)
            return state, taken + active.astype(jnp.int32)

        return jax.lax.fori_loop(0, steps, body, (state, jnp.zeros(costs.shape, jnp.int32)))

    return all_steps(privacy_filter.init(costs.shape[0]))


def test_tiny_charges_are_not_lost_in_float32():
    """1e5 charges of 1e-8 on top of 1 are 1e-3; a plain float32 sum stays at 1."""

    @jax.jit
    def total():
        start = (jnp.float32(1), jnp.float32(0))
        return jax.lax.fori_loop(0, 100_000, lambda _, carry: add_exactly(*carry, jnp.float32(1e-8)), start)

    high, rest = total()
    assert float(high) + float(rest) == pytest.approx(1.001, rel=1e-9)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_an_unknown_cost_never_takes_part(bad):
    for privacy_filter in (IndividualGDPFilter(1.0), IndividualRDPFilter(8, 1.0)):
        state, taken = run(privacy_filter, [bad, 0.1], 3)
        assert taken.tolist() == [0, 3] and np.isfinite(spent_of(state)).all()
    state, scale = IndividualGDPFilter(1.0, spend_exactly=True).step_and_scale(
        IndividualGDPFilter(1.0).init(2), jnp.array([bad, 0.1])
    )
    assert scale.tolist() == [0, 1] and np.isfinite(spent_of(state)).all()
    _, active = GDPFilter(1.0).step(GDPFilter(1.0).init(), bad)
    assert not active


def test_readmission():
    costs = [0.9, 0.9, 0.1]

    def seen(privacy_filter, scale=1.0):
        state, found = privacy_filter.init(1), []
        for cost in costs:
            state, active = privacy_filter.step(state, jnp.array([scale * cost]))
            found.append(bool(np.all(active)))
        return found

    for readmit, expected in ((True, [True, False, True]), (False, [True, False, False])):
        assert seen(IndividualGDPFilter(1.0, readmit=readmit)) == expected
        assert seen(IndividualRDPFilter(8, 1.0, readmit=readmit), 0.99) == expected
    assert seen(GDPFilter(1.0)) == [True, False, False]


@pytest.mark.parametrize("wide", [False, True])
def test_spending_exactly(wide):
    """Three steps of 0.6 against a budget of 1: the third is scaled by 0.8819; the squares add up to 1."""
    with jax.enable_x64(wide):
        privacy_filter = IndividualGDPFilter(1.0, spend_exactly=True)
        state, scales = privacy_filter.init(1), []
        for _ in range(5):
            state, scale = privacy_filter.step_and_scale(state, jnp.array([0.6]))
            scales.append(float(scale[0]))
        np.testing.assert_allclose(scales, [1, 1, 0.881917103688, 0, 0], rtol=1e-6)
        spent = float(state.spent[0]) + float(state.rest[0])
        assert spent <= 1 and spent == pytest.approx(1, rel=1e-5)
        refused("step_and_scale", lambda: privacy_filter.step(state, jnp.array([0.6])))


def exact_sum(costs, square: bool) -> fractions.Fraction:
    return sum(fractions.Fraction(float(cost)) ** (1 + square) for cost in costs)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", [GDPFilter, IndividualGDPFilter, IndividualRDPFilter])
def test_no_costs_add_up_to_more_than_is_promised(kind, wide):
    """Adversarial costs, in exact numbers: a last one that is the largest that the filter lets through.

    Of squared mu, B^2 and its slack are promised; of Renyi divergences, the budget.
    """
    renyi, rng = kind is IndividualRDPFilter, np.random.default_rng(0)
    most = fractions.Fraction(0)
    with jax.enable_x64(wide):
        for budget in (1.0, 0.7, 1.9999999):
            given = kind(8, budget) if renyi else kind(budget)
            step, cost_of = jax.jit(given.step), (lambda x: x) if renyi else np.sqrt
            dtype = given.init(1).spent.dtype
            allowed = fractions.Fraction(budget) ** (1 if renyi else 2)
            state, costs = given.init(1), []
            for part in rng.dirichlet(np.ones(20)) * float(allowed) * 0.9:
                costs.append(dtype.type(cost_of(part)))
                state, active = step(state, jnp.array([costs[-1]]))
                assert np.all(active)
            low, high = dtype.type(0), dtype.type(cost_of(float(allowed)))  # bisection down to one unit
            while np.nextafter(low, high) < high:
                middle = dtype.type((low + high) / 2)
                fits = bool(np.all(step(state, jnp.array([middle]))[1]))
                low, high = (middle, high) if fits else (low, middle)
            most = max(most, exact_sum([*costs, low], square=not renyi) / allowed)
    slack = 1e-12 if wide else 2.0**-20
    assert 1 - 2 * slack < most <= 1 + (0 if renyi else fractions.Fraction(slack))


def test_bad_input():
    for cls in (GDPFilter, IndividualGDPFilter):
        for bad in (0.0, -1.0, np.nan, np.inf):
            refused("budget_mu", cls, bad)
    refused("shape", lambda: IndividualGDPFilter(1.0).step(IndividualGDPFilter(1.0).init(3), jnp.zeros(4)))
    refused("order", IndividualRDPFilter, 1, 1.0)
    refused("order must be larger", IndividualRDPFilter.from_epsilon_delta, 0.1, 1e-9, 2)


def adaptive_divergence(epsilon: float, first: float, second, reverse: bool = False) -> float:
    """H of two Gaussian steps, the second's mu a function of the first output, by quadrature."""

    def conditional(t):
        loss = first * t - first**2 / 2
        weight = stats.norm.pdf(t) if reverse else stats.norm.pdf(t, first)
        return weight * float(np.exp(gdp_log_delta(epsilon + loss if reverse else epsilon - loss, second(t))))

    return integrate.quad(conditional, -12, 12, points=[0], epsabs=1e-12, limit=400)[0]


def test_adversarial_adaptive_sequence():
    """An adversary who asks for more after a lucky output gains nothing beyond the budget (theorem 2)."""

    def lucky(t):
        return 0.8 if t > 0 else 0.0

    for epsilon, remove, add in (
        (0.5, 0.2205746, 0.1393633),
        (1, 0.1213080, 0.0392770),
        (2, 0.02069707, 0.00138984),
    ):
        assert adaptive_divergence(epsilon, 0.6, lucky) == pytest.approx(remove, rel=1e-6)
        assert adaptive_divergence(epsilon, 0.6, lucky, reverse=True) == pytest.approx(add, rel=1e-5)
        assert remove <= gdp_delta(epsilon, 1.0)
        always = adaptive_divergence(epsilon, 0.6, lambda t: 0.8)
        assert always == pytest.approx(float(gdp_delta(epsilon, 1.0)), rel=1e-9)
    # The filter would not let the adversary have more: after 0.6 a step of 0.81 is refused.
    privacy_filter = IndividualGDPFilter(1.0)
    state, _ = privacy_filter.step(privacy_filter.init(1), jnp.array([0.6]))
    assert not privacy_filter.step(state, jnp.array([0.81]))[1][0]


def test_a_filter_without_its_rule_would_be_beaten():
    """The attack wins where the budget is on the average and not on every path: the test above has power."""

    def lucky(t):
        return 1.6 if t > 0.6 else 0.0  # the mean square is about 1.28 / 2 + .36 = 1

    assert adaptive_divergence(2.0, 0.6, lucky) > 1.5 * gdp_delta(2.0, 1.0)


@pytest.mark.parametrize("kind", [GDPFilter, IndividualGDPFilter])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-5), (8.0, 1e-3)])
def test_the_budget_of_a_target_is_the_largest_that_keeps_it(kind, epsilon, delta):
    budget = kind.from_epsilon_delta(epsilon, delta).budget_mu
    assert gdp_delta(epsilon, budget) <= delta * (1 + 1e-9) < gdp_delta(epsilon, 1.001 * budget)


@pytest.mark.parametrize("wide", [False, True])
def test_charged_steps(wide):
    """Budget B^2 = 1/2, noise 10: constant norms 1, .5, .25, .1 last exactly 50, 200, 800, 5000 steps."""
    with jax.enable_x64(wide):
        privacy_filter = IndividualGDPFilter(0.5**0.5)
        state, taken = run(privacy_filter, np.array([1, 0.5, 0.25, 0.1]) / 10, 5100)
        assert taken.tolist() == [50, 200, 800, 5000]
        state, taken = run(privacy_filter, np.array([1, 0.5, 0.25, 0.1]) / 10, 100)
        expected = [2.9432252, 1.9930914, 0.9263415, 0.3406694]
        np.testing.assert_allclose(privacy_filter.epsilon(state, 1e-5), expected, rtol=2e-6)
        spent = np.minimum(0.5, np.array([1, 0.25, 0.0625, 0.01]))  # of a hundred steps
        assert np.all(privacy_filter.mu(state) ** 2 >= spent)


def test_private_gd_of_the_paper():
    """420 Renyi steps at sigma 100 are 495 GDP steps at the same epsilon (arXiv 2209.15596, section 4)."""
    mu = individual.compose_gdp(np.full(420, 0.01))
    assert individual.gdp_epsilon(1e-5, mu) == pytest.approx(0.7451382, abs=1e-6)
    found = optimize.minimize_scalar(
        lambda order: individual.rdp_to_epsilon([order * mu**2 / 2], [order], 1e-5)[0], (10, 20, 40)
    )
    assert found.x == pytest.approx(21.077, abs=1e-2) and found.fun == pytest.approx(0.8156234, abs=1e-6)
    steps = np.arange(400, 600)
    assert steps[individual.gdp_epsilon(1e-5, np.sqrt(steps) / 100) <= found.fun].max() == 495
    sigma = 10.614652581338738
    epsilons = individual.gdp_epsilon(1e-5, np.sqrt([50, 51, 100]) / sigma)
    np.testing.assert_allclose(epsilons, [2.7510206, 2.7819941, 4.0856579], rtol=1e-7)
    # At epsilon 0.8 exactly: 478 Gaussian steps, 405 Renyi ones; the tabular setting by Renyi.
    steps, orders = np.arange(300, 600), np.linspace(1.5, 60, 4000)
    assert steps[individual.gdp_epsilon(1e-5, np.sqrt(steps) / 100) <= 0.8].max() == 478
    renyi = [individual.rdp_to_epsilon(orders * k / 2e4, orders, 1e-5)[0] for k in (405, 406)]
    assert renyi[0] <= 0.8 < renyi[1]
    found = individual.rdp_to_epsilon(orders * 50 / sigma**2 / 2, orders, 1e-5)[0]
    assert found == pytest.approx(2.98221, abs=1e-5)


def test_subsampled_renyi_against_quadrature():
    q, sigma = 0.2, 1.3
    for order in (2, 5, 16):

        def density(t, order=order):
            ratio = 1 - q + q * np.exp((2 * t - 1) / (2 * sigma**2))
            return stats.norm.pdf(t, 0, sigma) * ratio**order

        moment = integrate.quad(density, -30, 60, epsrel=1e-12, limit=400)[0]
        ours = individual.subsampled_gaussian_rdp(q, sigma, [order])
        np.testing.assert_allclose(ours, [np.log(moment) / (order - 1)], rtol=1e-8)
    np.testing.assert_allclose(
        individual.subsampled_gaussian_rdp(1.0, 2.0, [2, 8]), [2 / 8, 8 / 8], rtol=1e-12
    )
    assert np.all(individual.subsampled_gaussian_rdp(0.1, np.inf) == 0)
    worst = individual.rdp_to_epsilon(
        10_000 * individual.subsampled_gaussian_rdp(0.005, 2.0, range(2, 64)), range(2, 64), 1e-5
    )[0]
    assert worst == pytest.approx(1.098876, rel=1e-3)


def test_an_odometer_against_an_adaptive_adversary():
    """Who asks for more after a lucky output: the exact composition stays below what the odometer says.

    Pieces 0.6 and 0.8; a first step of 0.6, then 0.8 or nothing. One that forgot its first piece would be
    beaten by the same sequence.
    """
    for epsilon in (0.5, 1.0, 2.0):
        exact = adaptive_divergence(epsilon, 0.6, lambda t: 0.8 if t > 0 else 0.0)
        odometer = individual.PrivacyOdometer([0.6, 0.8])
        odometer.charge(0.6)
        odometer.charge(0.8)
        assert exact <= individual.gdp_delta(epsilon, odometer.spent_mu())
        assert exact > individual.gdp_delta(epsilon, 0.8)
    refused("fit in one of the pieces", odometer.charge, 0.01)


def test_odometer():
    odometer = individual.PrivacyOdometer([0.25] * 16)
    assert odometer.spent_mu() == 0
    for _ in range(16):
        odometer.charge(0.25)
    assert odometer.spent_mu() == pytest.approx(1)
    assert odometer.epsilon(1e-5) == pytest.approx(4.377178, rel=1e-6)
    refused("fit in one of the pieces", odometer.charge, 0.1)
    odometer = individual.PrivacyOdometer([0.3, 0.4, 1.2])
    odometer.charge(0.2)
    # Between the ends of pieces the whole piece counts.
    assert odometer.spent_mu() == pytest.approx(0.3)
    odometer.charge(0.35)
    odometer.charge(1.1)
    assert odometer.spent_mu() == pytest.approx(1.3)
    refused("mu", lambda: odometer.charge(float("nan")))


def test_small_costs_are_not_rounded_to_0():
    """Sums of 60 digits: a filter adds up many costs, so each is at least the exact one."""
    for q, sigma in [(2.0**-32, 1e3), (1e-4, 100.0), (0.1, 1e9), (0.999, 50.0), (0.3, 0.7)]:
        for order in [2, 64]:
            with mpmath.workdps(60):
                p, variance = mpmath.mpf(q), mpmath.mpf(sigma) ** 2
                terms = [
                    mpmath.binomial(order, k)
                    * (1 - p) ** (order - k)
                    * p**k
                    * mpmath.exp(k * (k - 1) / (2 * variance))
                    for k in range(order + 1)
                ]
                exact = mpmath.log(mpmath.fsum(terms)) / (order - 1)
            assert exact <= individual.subsampled_gaussian_rdp(q, sigma, [order])[0] <= exact * (1 + 1e-9)


def test_invalid_orders_are_refused():
    for orders in [[np.inf], [2, np.nan], [2.0**21], [1], []]:
        refused("orders must be", individual.subsampled_gaussian_rdp, 0.1, 1.0, orders)
    refused("orders must be finite", individual.rdp_to_epsilon, [1.0], [np.inf], 1e-5)
    refused("orders must be at most", individual.IndividualRDPFilter, np.inf, 1.0)
