"""Every registered accountant through one table of requirements. A new one needs a line in `MEMBERS`.

What a bound has to stay above is the exact divergence of two steps, by enumeration and quadrature; where the
accountant states the distribution that it reveals, it has to be that distribution's divergence too.
"""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest
from scipy import special

import jaxacct as ja
from jaxacct.accountants import ACCOUNTANTS, Accountant, analytic
from jaxacct.core.claim import Claim, ClaimedTarget
from jaxacct.core.evidence import Bound
from jaxacct.statistics.composed_losses import Part, divergence_bound
from jaxacct.statistics.gaussian_mixtures import sampled_gaussian
from jaxacct.statistics.hockey_stick import DIRECTIONS
from jaxacct.strategies import Strategy
from tests.oracles import enumeration, tuples
from tests.oracles.composed_losses import gaussian, sampled
from tests.refusals import refused
from tests.stored_plans import as_json, loaded

IDENTITY = ja.BandedToeplitz.identity()
COMPOSED = dp_accounting.GaussianDpEvent(5.0)
OVERLAPPING = ja.Dense(np.array([[1.0, 0.0], [0.5, 1.0]]))
UNIT_COLUMNS = ja.Dense(np.array([[0.6, 0.0], [0.8, 1.0]]))  # which overlap all the same
SHORT_COLUMN = ja.Dense(np.diag([1.0, 0.5]))


def at(scheme, sigma: float = 0.9, strategy: Strategy = IDENTITY) -> ja.Mechanism:
    return ja.Mechanism(scheme, strategy, sigma)


# By name: what it covers (typical, then edges: b = 1, p = 1, n < b); what it does not, with its reason.
MEMBERS = {
    "unamplified": (
        [
            at(ja.BMinSep(2, 2, 0.3)),
            at(ja.Poisson(2, 0.3)),
            at(ja.Poisson(2, 1.0)),
            at(ja.BallsInBins(2, 3)),
            at(ja.IndependentAttribution(2, 2, 0.3, 2)),
            at(ja.TruncatedBMinSep(2, 2, 0.3, 6, 10)),
            at(ja.Poisson(2, 0.3), strategy=OVERLAPPING),
        ],
        [],
    ),
    "pld": (
        [
            at(ja.Poisson(2, 0.3)),
            at(ja.BMinSep(2, 1, 0.3)),
            at(ja.Poisson(2, 1.0)),
            at(ja.CyclicPoisson(2, 3, 0.7)),
            at(ja.CyclicPoisson(2, 2, 0.4)),
            at(ja.MultiAttribution(2, 1, 0.3, 2)),
            at(ja.IndependentAttribution(2, 1, 0.3, 3)),
            at(ja.IndependentAttribution(2, 1, 1.0, 2), 2.0),
        ],
        [
            (at(ja.BMinSep(2, 2, 0.3)), None, "rounds are not independent"),
            (at(ja.MultiAttribution(2, 2, 0.3, 2)), None, "rounds are not independent"),
            (at(ja.IndependentAttribution(2, 2, 0.3, 2)), None, "rounds are not independent"),
            (at(ja.MultiAttribution(2, 1, 0.3, 2), strategy=OVERLAPPING), None, "overlap"),
            (at(ja.BallsInBins(2, 2)), None, "rounds are not independent"),
            (at(ja.Poisson(2, 0.3), strategy=OVERLAPPING), None, "overlap"),
        ],
    ),
    "random-allocation": (
        [
            at(ja.BallsInBins(2, 2)),
            at(ja.BallsInBins(2, 3)),
            at(ja.BallsInBins(2, 1)),
            at(ja.CyclicPoisson(2, 2, 1.0)),
            at(ja.BMinSep(2, 2, 0.3)),
            at(ja.BalancedMinSep(2, 1, 0.6)),
        ],
        [
            (at(ja.BMinSep(3, 2, 0.3)), None, "not one phase, drawn once"),
            (at(ja.BMinSep(2, 2, 0.3, False)), None, "not one phase, drawn once"),
            (at(ja.BalancedMinSep(3, 1, 1.2)), None, "not one phase, drawn once"),
            (at(ja.CyclicPoisson(2, 2, 0.9)), None, "not one phase, drawn once"),
            (at(ja.BallsInBins(2, 2)), COMPOSED, "nothing is composed"),
            (at(ja.BallsInBins(2, 1), strategy=OVERLAPPING), None, "overlap"),
        ],
    ),
    "redrawn-bins": (
        [at(ja.EpochwiseAllocation(2, 1)), at(ja.EpochwiseAllocation(2, 1), 0.6)],
        [
            (at(ja.EpochwiseAllocation(5, 3, 2)), None, "epochs are not independent"),
            (at(ja.BallsInBins(2, 2)), None, "epochs are not independent"),
            (at(ja.EpochwiseAllocation(2, 1)), COMPOSED, "nothing is composed"),
            (at(ja.EpochwiseAllocation(2, 1), strategy=SHORT_COLUMN), None, "not the identity"),
            (at(ja.EpochwiseAllocation(2, 1), strategy=UNIT_COLUMNS), None, "not the identity"),
        ],
    ),
    "revealed-pattern": (
        [
            at(ja.MultiAttribution(2, 2, 0.3, 2)),
            at(ja.MultiAttribution(2, 1, 0.3, 2)),
            at(ja.MultiAttribution(2, 3, 1.0, 3)),
            at(ja.MultiAttribution(2, 3, 0.4, 2, False)),
        ],
        [
            (at(ja.Poisson(2, 0.3)), None, "distribution of its participations"),
            (at(ja.MultiAttribution(2, 2, 0.3, 2)), COMPOSED, "nothing is composed"),
            (at(ja.MultiAttribution(2, 1, 0.3, 2), strategy=OVERLAPPING), None, "overlap"),
        ],
    ),
}
COVERED = [
    pytest.param(ACCOUNTANTS[name], mechanism, id=f"{name}-{mechanism.scheme}-{mechanism.strategy.kind}")
    for name, (covered, _) in MEMBERS.items()
    for mechanism in covered
]
TYPICAL = [pytest.param(ACCOUNTANTS[name], covered[0], id=name) for name, (covered, _) in MEMBERS.items()]
REFUSED = [
    pytest.param(ACCOUNTANTS[name], *case, id=f"{name}-{case[2]}")
    for name, (_, refused) in MEMBERS.items()
    for case in refused
]
EPSILONS = (0.1, 0.5, 2.0)


def test_every_registered_accountant_is_in_the_tables():
    assert set(MEMBERS) == set(RANGES) == set(ORACLES) == set(ACCOUNTANTS)
    assert all(member.name == name for name, member in ACCOUNTANTS.items())


@pytest.mark.parametrize(("accountant", "mechanism"), COVERED)
def test_a_probability_that_falls_with_epsilon_and_noise(accountant, mechanism):
    assert accountant.supports(mechanism) and mechanism.adjacency in accountant.adjacencies
    quiet = [accountant.delta(mechanism, epsilon) for epsilon in EPSILONS]
    noisy = dataclasses.replace(mechanism, noise_multiplier=2 * mechanism.noise_multiplier)
    assert 1 > quiet[0] > quiet[1] > quiet[2] >= 0
    assert all(0 <= accountant.delta(noisy, e) < delta for e, delta in zip(EPSILONS, quiet, strict=True))


def exact(mechanism, epsilon: float) -> float:
    """The larger divergence of two steps by enumeration, C = I, good to about 1e-5; no kernel of ours."""
    pair = mechanism.scheme, (1.0,), mechanism.noise_multiplier, epsilon
    return max(float(tuples.two_step_delta(*pair, side, points=401)) for side in DIRECTIONS)


@pytest.mark.parametrize(("accountant", "mechanism"), COVERED)
def test_at_least_the_exact_divergence(accountant, mechanism):
    if mechanism.scheme.side_information is not None or mechanism.strategy is OVERLAPPING:
        pytest.skip("no enumeration: test_truncated_b_min_sep.py and test_non_banded.py")
    for epsilon in EPSILONS:
        assert accountant.delta(mechanism, epsilon) >= exact(mechanism, epsilon) - 1e-4


def worst_pattern(mechanism, epsilon):
    patterns = enumeration.pattern_distribution(mechanism.scheme)
    return float(gaussian(epsilon, max(map(np.linalg.norm, patterns)) / mechanism.noise_multiplier))


def revealed_patterns(mechanism, epsilon):
    distribution = enumeration.pattern_distribution(mechanism.scheme)
    lengths = {x: np.linalg.norm(x) / mechanism.noise_multiplier for x in distribution}
    return float(sum(weight * gaussian(epsilon, lengths[x]) for x, weight in distribution.items() if any(x)))


# What each bounds exactly where nothing is rounded, and how far up rounding may go.
ORACLES = {
    "unamplified": (worst_pattern, 1e-9),
    "revealed-pattern": (revealed_patterns, 1e-6),
    "pld": (exact, 1e-2),
    "random-allocation": (exact, 1e-3),
    "redrawn-bins": (exact, 3e-3),
}


@pytest.mark.parametrize(("accountant", "mechanism"), TYPICAL)
def test_against_the_distribution_that_it_reveals(accountant, mechanism):
    oracle, slack = ORACLES[accountant.name]
    for epsilon in (0.1, 0.5):
        assert accountant.delta(mechanism, epsilon) == pytest.approx(oracle(mechanism, epsilon), rel=slack)


# Over the whole admitted range: (mechanism, mu) whose exact divergence is that of N(mu, 1) against N(0, 1),
# and how far above it the bound may be: relative, absolute.
NOISE = (0.1, 0.9, 30.0, 1e3)


def gaussian_cases(make, lengths, noise=NOISE):
    return [(at(make(n), sigma), math.sqrt(n) / sigma) for n in lengths for sigma in noise]


RANGES = {
    "unamplified": (gaussian_cases(lambda n: ja.BMinSep(n, 1, 0.01), (1, 1000, 10**6)), 1e-6, 0.0),
    "pld": (gaussian_cases(lambda n: ja.Poisson(n, 1.0), (1, 1000, 10**6)), 0.02, 0.0),
    # Their floors are those of one epoch; with less noise the add direction is 1 at large epsilons.
    "random-allocation": (gaussian_cases(lambda n: ja.BallsInBins(n, 1), (1, 12), NOISE[1:]), 0.02, 1e-8),
    "redrawn-bins": (gaussian_cases(lambda n: ja.EpochwiseAllocation(n, 1), (1, 12), NOISE[1:]), 0.05, 1e-10),
    "revealed-pattern": (gaussian_cases(lambda n: ja.MultiAttribution(n, 1, 1.0, 1), (1, 50)), 1e-6, 0.0),
}


@pytest.mark.parametrize("name", RANGES)
def test_at_least_60_digits_over_the_whole_range(name):
    """At targets of 0.3 to 1e-15, wherever an epsilon of at least 0 has one."""
    seen = []
    cases, relative, absolute = RANGES[name]
    for mechanism, mu in cases:
        for target in (0.3, 1e-5, 1e-10, 1e-15):
            epsilon = mu * mu / 2 - mu * float(special.ndtri(target)) - min(mu, 1.0)
            if 0 <= epsilon <= 300:
                exact = gaussian(epsilon, mu)
                bound = ACCOUNTANTS[name].delta(mechanism, epsilon)
                assert exact * (1 - 1e-12) <= bound, (mechanism, epsilon)
                assert bound <= (1 + relative) * exact + absolute, (mechanism, epsilon)
                seen.append(float(exact))
    assert min(seen) < 1e-12 and max(seen) > 1e-2


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 300.0, 1000.0, 10_000.0])
def test_at_least_60_digits_from_the_smallest_to_the_largest_epsilon(epsilon):
    """One Gaussian mechanism at deltas of about 1e-5, by every accountant; and a sampled one."""
    mu = math.sqrt(2 * epsilon + 18) - math.sqrt(18) if epsilon >= 1 else epsilon / 3.5
    exact = gaussian(epsilon, mu)
    for make in (
        ja.Poisson(1, 1.0),
        ja.MultiAttribution(1, 1, 1.0, 1),
        ja.IndependentAttribution(1, 1, 1.0, 2),
        ja.BallsInBins(1, 1),
        ja.EpochwiseAllocation(1, 1),
    ):
        mechanism = at(make, make.examples_per_unit / mu)
        for name, member in ACCOUNTANTS.items():
            if member.supports(mechanism):
                bound = member.delta(mechanism, epsilon)
                assert exact * (1 - 1e-12) <= bound
                assert bound <= 1.12 * exact or "bins" in name or "allocation" in name
    for remove in (True, False):
        found = divergence_bound([Part(sampled_gaussian(1 / mu, 0.1)[not remove], 1)], epsilon)
        assert sampled(epsilon, 0.1, 1 / mu, remove) * (1 - 1e-12) <= found


def test_a_plan_of_a_large_epsilon_is_certified():
    plan = ja.calibrate(ja.Poisson(1000, 0.004), IDENTITY, epsilon=1000, delta=1e-5)
    assert plan.certified and 0.083 < plan.noise_multiplier < 0.085
    assert loaded(plan).certified and "(1000, 1e-05)" in plan.statement()
    with pytest.raises(ValueError, match="epsilon must be at most 10000, got 10001"):
        ja.calibrate(ja.Poisson(1000, 0.004), IDENTITY, epsilon=10_001, delta=1e-5)


@pytest.mark.parametrize(("accountant", "mechanism", "composed", "reason"), REFUSED)
def test_it_refuses_what_it_does_not_cover(accountant, mechanism, composed, reason):
    assert not accountant.supports(mechanism, composed)
    assert reason in accountant.why_not(mechanism, composed)
    refused(f"{accountant.name} does not cover .*{reason}", accountant.delta, mechanism, 1.0, composed)
    assert analytic.best_accountant(mechanism, 1.0, composed)[0] != accountant.name


@pytest.mark.parametrize(("accountant", "mechanism"), TYPICAL)
def test_another_adjacency_and_bad_input(accountant, mechanism, monkeypatch):
    monkeypatch.setattr(type(accountant), "adjacencies", ("replace-one",))
    refused("it is for replace-one adjacency, not for zero-out", accountant.delta, mechanism, 1.0)
    monkeypatch.undo()
    assert accountant.delta(mechanism, 0.1) <= accountant.delta(mechanism, 0.0) <= 1
    for epsilon in (-1.0, math.nan, "one"):
        refused("epsilon", accountant.delta, mechanism, epsilon)
    refused("mechanism must be", accountant.delta, mechanism.scheme, 1.0)
    for wrong in (math.nan, -0.1, 1.1):
        monkeypatch.setattr(type(accountant), "bound", lambda *arguments, wrong=wrong: wrong)
        refused("which is not a probability", accountant.delta, mechanism, 1.0)


@pytest.mark.parametrize(("accountant", "mechanism"), TYPICAL)
def test_a_plan_names_it(accountant, mechanism):
    plan = ja.Plan(Claim(mechanism, ClaimedTarget.at(2.0, 0.9), None, None), Bound(accountant.name))
    assert ja.Plan.from_json(as_json(plan)).evidence == plan.evidence
    assert plan.verdict.bound == accountant.delta(mechanism, 2.0)
    refused("accountant must be one of", lambda: loaded(ja.Plan(plan.claim, Bound("unheard-of"))))


def test_close_bounds_are_near_the_exact_divergences():
    close = set()
    for name, member in ACCOUNTANTS.items():
        for mechanism in MEMBERS[name][0]:
            if not member.is_close(mechanism, None):
                continue
            close.add(name)
            assert analytic.close(mechanism) is member
            assert analytic.close(mechanism, compose_with=COMPOSED) is None
            truth = exact(mechanism, 0.5)
            assert truth - 1e-4 <= member.delta(mechanism, 0.5) <= 1.01 * truth + 1e-4
    assert close == {"random-allocation"}  # unamplified is so for fixed-order batches: tests/schemes
    assert analytic.close(at(ja.BMinSep(3, 2, 0.3))) is None
    assert analytic.close(at(ja.BallsInBins(2, 2), strategy=OVERLAPPING)) is None


def test_the_best_is_the_smallest_of_those_that_cover():
    for covered, _ in MEMBERS.values():
        for mechanism in covered:
            bounds = {
                name: member.delta(mechanism, 0.5)
                for name, member in ACCOUNTANTS.items()
                if member.supports(mechanism)
            }
            assert analytic.best_accountant(mechanism, 0.5) == min(bounds.items(), key=lambda item: item[1])


def test_composition_costs_privacy_and_asks_only_the_best():
    """What is left out of a composition would have given no smaller bound."""
    mechanism = at(ja.Poisson(2, 0.3))
    alone, both = (analytic.best_accountant(mechanism, 0.5, composed) for composed in (None, COMPOSED))
    assert both[0] == "pld" and alone[1] < both[1]
    for outdone in ACCOUNTANTS["pld"].outdoes_composed:
        assert both[1] <= ACCOUNTANTS[outdone].delta(mechanism, 0.5, COMPOSED)


def test_an_accountant_must_say_what_the_guarantee_rests_on():
    class Partial(Accountant):
        name, adjacencies, reveals_all_coins = "made", ("zero-out",), False

        def bound(self, mechanism, epsilon, compose_with):
            return 0.0

    with pytest.raises(TypeError, match="why_not_covered"):
        Partial()
    with pytest.raises(TypeError, match="must state its name"):
        type("Nameless", (Accountant,), {})
