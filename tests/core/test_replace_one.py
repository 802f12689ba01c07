"""Adjacencies (proofs/adjacency.md): the pair `C x + z` against `-C x + z` by enumeration and attacks.

Which pair dominates for which adjacency: the adversary searches for a worse one.
"""

import functools
import inspect
import itertools
import math

import dp_accounting
import jax
import numpy as np
import pytest
from msgspec import structs
from scipy import stats

import jaxacct as ja
from jaxacct.accountants import ACCOUNTANTS
from jaxacct.accountants.analytic import best_accountant, delta_by
from jaxacct.core import evidence
from jaxacct.core.check import check, resolve
from jaxacct.likelihood.rounding import loss_lines
from jaxacct.proposals.base import ProposalSpec
from jaxacct.proposals.candidates import proposals_at
from jaxacct.proposals.families import mirrored
from jaxacct.statistics.bounds import Budget
from jaxacct.statistics.lines import total
from jaxacct.strategies import by_name
from tests.commands import exit_code
from tests.draws import drawn_by
from tests.oracles import enumeration
from tests.oracles.composed_losses import antipodal, sampled
from tests.oracles.enumeration import pattern_distribution
from tests.oracles.settings import slow
from tests.refusals import refused
from tests.rounding_errors import loss_margin, measured_error
from train.batches.sampler import Sampler

WHITE = ja.BandedToeplitz.identity()
REPLACE = "replace-one"


def one_step(q, sigma, epsilon):
    """H of one Poisson step, whose means are at 1 and -1, each with probability q."""
    return float(antipodal(epsilon, q, sigma))


def exact_loss(scheme, strategy, sigma, y):
    """ln f(y) - ln f(-y), f of zero-out by enumeration, (samples,) float64; `y` is (samples, n)."""
    first, second = (enumeration.log_ratio(scheme, strategy.array, sigma, sign * y) for sign in (1, -1))
    return first - second


SCHEMES = [
    ja.Poisson(5, 0.3),
    ja.CyclicPoisson(6, 3, 0.6),
    ja.BallsInBins(6, 3),
    ja.BMinSep(6, 3, 0.3),
    ja.BMinSep(6, 2, 0.4, False),
    ja.BalancedMinSep(7, 3, 2),
    ja.EpochwiseAllocation(8, 3, 2),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: type(scheme).__name__)
def test_losses_are_those_of_enumeration(scheme):
    """At given outputs, and of drawn ones: `E_P e^-L = 1` at each output as well."""
    n, sigma = scheme.iterations, 0.8
    strategy = ja.BandedToeplitz.square_root(1 if scheme.min_separation == 1 else 2)
    y = np.random.default_rng(1).normal(size=(64, n)) * 1.5
    exact = exact_loss(scheme, strategy, sigma, y)
    mechanism = ja.Mechanism(scheme, strategy, sigma, REPLACE)
    np.testing.assert_allclose(ja.privacy_loss(mechanism, y), exact, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(ja.privacy_loss(mechanism, -y), -exact, rtol=2e-5, atol=2e-5)


def test_losses_of_another_matrix_are_upper_bounds():
    scheme = ja.BMinSep(6, 2, 0.3)
    strategy = by_name("bisr", 2, scheme)
    mechanism = ja.Mechanism(scheme, strategy, 0.9, REPLACE)
    assert mechanism.is_upper_bound
    # The weights of replicas need a lower bound on the likelihood ratio, which bounds from above do not give.
    for at, names in ((mechanism, {"plain"}), (ja.Mechanism(scheme, strategy, 0.9), {"plain", "replicas:2"})):
        assert {proposal.name for proposal in proposals_at(at, 1.0, "remove", lambda _: 0.0)} == names
    y = np.random.default_rng(2).normal(size=(64, 6))
    exact = exact_loss(scheme, strategy, 0.9, y)
    found = np.asarray(ja.privacy_loss(mechanism, y))
    assert (found >= exact - 1e-5).all() and (found <= exact + 3).all() and (found > exact + 1e-3).any()


@pytest.mark.parametrize(
    ("q", "sigma", "epsilon"), [(0.3, 1.0, 1.0), *(slow(*row) for row in ((0.01, 0.5, 2.0), (1.0, 1.5, 1.0)))]
)
def test_one_poisson_step_against_60_digits(q, sigma, epsilon):
    exact = one_step(q, sigma, epsilon)
    mechanism = ja.Mechanism(ja.Poisson(1, q), WHITE, sigma, REPLACE)
    options = dict(confidence=1 - 1e-6, key=jax.random.key(5))
    found = ja.estimate_delta(mechanism, epsilon, num_samples=100_000, **options)
    assert found.low <= exact <= found.high < 1.3 * exact
    assert delta_by("unamplified", mechanism, epsilon) >= exact * (1 - 1e-6)
    assert exact * (1 - 1e-11) <= delta_by("pld", mechanism, epsilon) <= 1.0002 * exact
    if q == 1.0:  # twice the sensitivity of zero-out
        assert delta_by("unamplified", mechanism, epsilon) == pytest.approx(exact, rel=1e-5)
    # Neither zero-out nor the amplification of twice the sensitivity alone is this pair.
    assert sampled(epsilon, q, sigma, remove=True) < 0.99 * exact
    profile = ja.privacy_profile(mechanism, [epsilon], num_samples=20_000, **options)
    assert profile.lower[0] <= exact <= profile.upper[0]
    assert set(profile.directions) == {"remove", "add"}


def test_dp_accounting_has_half_of_the_sensitivity():
    """Its issues 378 and 464: under REPLACE_ONE a Gaussian event is that of one clip norm, not of two."""
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(dp_accounting.GaussianDpEvent(2.0))
    stated = accountant.get_epsilon(1e-3)
    exact = one_step(1.0, 2.0, stated)
    assert exact > 5 * 1e-3  # at its epsilon the antipodal pair has far more than its delta
    assert sampled(stated, 1.0, 2.0, remove=True) <= 1e-3  # which is that of zero-out
    mechanism = ja.Mechanism(ja.Poisson(1, 1.0), WHITE, 2.0, REPLACE)
    assert best_accountant(mechanism, stated)[1] >= exact * (1 - 1e-6)


def composed(q, sigma, steps, epsilon, points=2**17, width=40.0):
    """H of independent steps: the loss of one step on a lattice, composed by FFT. An oracle to about 1e-4."""
    y = np.linspace(-9, 9, 200_001) * max(sigma, 1.0)
    kernels = [stats.norm.pdf(y, mean, sigma) for mean in (0.0, 1.0, -1.0)]
    p, m = (1 - q) * kernels[0] + q * kernels[1], (1 - q) * kernels[0] + q * kernels[2]
    step = 2 * width / points
    places = np.log(p / m) / step
    low = np.floor(places).astype(int)
    mass = p * (y[1] - y[0])
    law = np.bincount((low + points // 2) % points, mass * (low + 1 - places), points)
    law += np.bincount((low + 1 + points // 2) % points, mass * (places - low), points)
    whole = np.fft.irfft(np.fft.rfft(np.roll(law, -(points // 2))) ** steps, points)
    losses = step * np.fft.fftfreq(points, 1 / points)
    return float(np.sum(whole * -np.expm1(np.minimum(epsilon - losses, 0.0))))


def test_composition_of_poisson_steps_against_a_lattice():
    assert composed(0.3, 1.0, 1, 1.0) == pytest.approx(one_step(0.3, 1.0, 1.0), rel=1e-3)
    mechanism = ja.Mechanism(ja.Poisson(50, 0.05), WHITE, 0.8, REPLACE)
    for epsilon in (1.0, 4.0):
        exact = composed(0.05, 0.8, 50, epsilon)
        assert exact * (1 - 1e-3) <= delta_by("pld", mechanism, epsilon) <= exact * (1 + 2e-3)
    found = ja.estimate_delta(mechanism, 4.0, num_samples=150_000, confidence=1 - 1e-6, key=jax.random.key(7))
    assert found.low <= exact * (1 + 1e-3) and exact * (1 - 1e-3) <= found.high < 1.2 * exact
    at = ja.estimate_epsilon(mechanism, exact, num_samples=40_000, confidence=1 - 1e-6, key=jax.random.key(8))
    assert at.low <= 4.001 and 3.999 <= at.high < 4.2


def shown_terms(mechanism, epsilon, name, blocks=100):
    """Weighted terms over their scale before they are cut at 1, and the scale."""
    (proposal,) = (p for p in proposals_at(mechanism, epsilon, "remove") if p.name == name)
    draws = proposal.draw(jax.random.key(11), 0, blocks)
    terms = np.exp(draws.log_weight - proposal.log_scale) * np.maximum(-np.expm1(epsilon - draws.loss), 0)
    return terms, math.exp(proposal.log_scale)


@pytest.mark.parametrize(
    ("scheme", "strategy", "sigma", "epsilon"),
    [
        (ja.Poisson(50, 0.05), WHITE, 0.8, 4.0),
        slow(ja.BMinSep(40, 4, 0.06), ja.BandedToeplitz.square_root(3), 0.9, 3.0),
        slow(ja.BallsInBins(20, 20), WHITE, 0.7, 3.0),
        slow(ja.BalancedMinSep(30, 3, 2), ja.BandedToeplitz.square_root(3), 1.2, 3.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_weighted_terms_of_replicas_are_bounded(scheme, strategy, sigma, epsilon):
    """No term is above 1 but for rounding, plain samples have the same mean, and some term is not small."""
    mechanism = ja.Mechanism(scheme, strategy, sigma, REPLACE)
    terms, scale = shown_terms(mechanism, epsilon, "replicas:2")
    assert 0.02 < terms.max() <= 1 + 1e-3
    plain, _ = shown_terms(mechanism, epsilon, "plain")
    error = math.hypot(plain.std(), scale * terms.std()) / math.sqrt(plain.size)
    assert abs(plain.mean() - scale * terms.mean()) < 6 * error


def test_the_floor_is_below_the_likelihood_ratio():
    """Of enumeration, at outputs pushed to where f(-y) is small; equality of the tangent at 0."""
    scheme, strategy, sigma = ja.BMinSep(6, 3, 0.3), ja.BandedToeplitz.square_root(2), 0.8
    log_floor, left_out = mirrored.floor(ja.Mechanism(scheme, strategy, sigma, REPLACE))
    assert left_out < 1e-17
    matrix = enumeration.strategy_matrix(strategy.array, 6, 6)
    rng = np.random.default_rng(3)
    y = rng.normal(size=(20_000, 6)) * sigma + (matrix @ np.ones((6, 1))).T * rng.uniform(0, 2, (20_000, 1))
    lowest = enumeration.log_ratio(scheme, strategy.array, sigma, -y).min()
    assert math.log(enumeration.pattern_distribution(scheme)[(0,) * 6]) <= log_floor <= lowest
    # What is certain is that it is not below P(x = 0): large outputs come close to that.
    assert enumeration.log_ratio(scheme, strategy.array, sigma, -y - 30).min() < log_floor + 1


def test_schemes_with_participations_have_a_floor():
    """Balls-in-bins: every example participates, so f(-y) may be any number, but rarely."""
    log_floor, left_out = mirrored.floor(ja.Mechanism(ja.BallsInBins(20, 20), WHITE, 0.7, REPLACE))
    assert -math.inf < log_floor < -0.5 / 0.7**2 and 0 < left_out < 1e-17


@pytest.mark.parametrize(
    ("scheme", "bands", "sigma", "replicas"),
    [
        (ja.BMinSep(300, 4, 0.02), 3, 0.5, 2),
        slow(ja.BallsInBins(64, 8), 4, 0.3, 1),
        slow(ja.Poisson(200, 0.03), 1, 0.25, 3),
    ],
    ids=["b-min-sep", "balls-in-bins", "poisson"],
)
def test_rounding_is_within_its_margin(scheme, bands, sigma, replicas):
    """Of both likelihood ratios together; the margin is more than that of zero-out."""
    mechanism = ja.Mechanism(scheme, ja.BandedToeplitz.square_root(bands), sigma, REPLACE)
    zero_out = ja.Mechanism(scheme, mechanism.strategy, sigma)
    margin = loss_margin(mechanism, replicas)
    assert 0 < measured_error(jax.random.key(3), mechanism, replicas) < margin
    assert 1.2 * loss_margin(zero_out, replicas) < margin < 5 * loss_margin(zero_out, replicas)
    lines = mirrored.loss_lines(mechanism, 1e-5, replicas)
    assert total(lines, "delta") > total(loss_lines(zero_out, 1e-5, replicas), "delta")


def certified(scheme, strategy, sigma, epsilon, delta, seed, **options):
    return ja.verify(
        ja.Mechanism(scheme, strategy, sigma, REPLACE), epsilon, delta, key=jax.random.key(seed), **options
    )


def test_too_little_noise_is_not_certified():
    """Just below: delta is 1.02 times the target. A wrong certificate has probability q = 1e-3 a run."""
    epsilon, runs = 1.0, 20
    target = one_step(0.3, 1.0, epsilon) / 1.02
    budget = Budget.split(target, 1e-3 / target)
    wrong = 0
    for seed in range(runs):
        options = dict(budget=budget, max_samples=20_000)
        wrong += certified(ja.Poisson(1, 0.3), WHITE, 1.0, epsilon, target, seed, **options).certified
    # P(Binomial(20, 1e-3) > 3) < 1e-8.
    assert wrong <= 3


def test_a_practical_target_from_few_samples():
    """(8, 1e-5) for 50 steps with 2.5 expected participations, of the programs above."""
    found = certified(ja.Poisson(50, 0.05), WHITE, 0.8, 8.0, 1e-5, 1)
    assert found.certified and found.num_samples < 50_000


def attacked(scheme, sigma, epsilon, seed, runs=1000):
    """P(S) - e^epsilon Q(S) of losses above epsilon: gradients 1 and -1, the sampler of training."""
    rng = np.random.default_rng(seed)
    seen = []
    for sign in (1, -1):
        samplers = (Sampler(scheme, 3, 3, key=(seed, run, 7, 8 + sign)) for run in range(runs))
        joined = np.stack([drawn_by(sampler, 3)[0] for sampler in samplers])
        y = sign * joined + sigma * rng.normal(size=joined.shape)
        seen.append((exact_loss(scheme, WHITE, sigma, y) > epsilon).mean())
    return seen[0] - math.exp(epsilon) * seen[1]


def test_an_attack_on_the_real_sampler():
    """It finds the divergence of this pair, which is far above what zero-out allows."""
    scheme, epsilon, sigma, runs = ja.BallsInBins(4, 2), 1.0, 1.0, 1000
    options = dict(num_samples=40_000, confidence=1 - 1e-6, key=jax.random.key(9))
    allowed = ja.estimate_delta(ja.Mechanism(scheme, WHITE, sigma, REPLACE), epsilon, **options)
    of_zero_out = ja.estimate_delta(ja.Mechanism(scheme, WHITE, sigma), epsilon, **options)
    found = attacked(scheme, sigma, epsilon, 3, runs)
    # Hoeffding's inequality for a mean of terms in [-e^epsilon, 1], 1e-6 a side.
    slack = (1 + math.exp(epsilon)) * math.sqrt(math.log(2e6) / (2 * 2 * runs))
    assert abs(found - allowed.value) < slack
    assert found > of_zero_out.high + 0.1


def plan_of(tmp_path, *more):
    numbers = "--scheme b-min-sep --iterations 12 --min-separation 3 --sampling-probability 0.1 --bands 3"
    target = "--epsilon 4 --delta 1e-2 --dataset-size 80 --noise-multiplier 1.5 --adjacency replace-one"
    return exit_code("calibrate", *numbers.split(), *target.split(), "--out", tmp_path / "plan.json", *more)


def test_another_another_adjacency_proves_nothing(tmp_path):
    """Stored samples of zero-out, and a missing direction of replace-one."""
    assert plan_of(tmp_path) == 0
    plan = ja.Plan.load(tmp_path / "plan.json")
    mechanism = plan.mechanism
    zero_out = ja.Mechanism(mechanism.scheme, mechanism.strategy, mechanism.noise_multiplier)
    other = ja.Claim(zero_out, plan.target, plan.dataset_size, None)
    assert "another mechanism" in check(other, plan.evidence).flaws[0]
    for side in (evidence.NotRun(), plan.evidence.remove, evidence.WeightBound(ProposalSpec("plain", ()))):
        assert not check(plan.claim, structs.replace(plan.evidence, add=side)).certified
    assert not check(plan.claim, structs.replace(plan.evidence, remove=evidence.Dominated())).certified
    for family in ("replicas:2,2", "replicas:1"):
        with pytest.raises(ValueError, match="is not available for this mechanism"):
            resolve(plan.claim, "remove", ProposalSpec.parse(family))
    with pytest.raises(ValueError, match="does not cover the remove direction under replace-one adjacency"):
        resolve(plan.claim, "remove", ProposalSpec.parse("truncated"))


def test_what_has_no_antipodal_pair_is_refused():
    """Of schemes: `conformance`; of batches that are cut: below."""
    mechanism = ja.Mechanism(ja.Poisson(12, 0.1), WHITE, 1.0, REPLACE)
    with pytest.raises(ValueError, match="compose_with must not be given with replace-one"):
        ja.Claim(mechanism, ja.ClaimedTarget.at(2.0, 1e-3, dp_accounting.GaussianDpEvent(3.0)), None, None)
    for name in ("random-allocation", "redrawn-bins"):
        refused("not for replace-one", delta_by, name, mechanism, 1.0)
    with pytest.raises(ValueError, match="the pair of replace-one is symmetric"):
        ja.sample_privacy_loss(jax.random.key(0), mechanism, 10, "add")


def composing_calls():
    """Every public call that takes a mechanism and an event, by its signature, and all accountants."""
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    numbers = {"epsilon": 1.0, "delta": 1e-3, "epsilons": [1.0], "adjacency": REPLACE}
    calls = {f"accountant {name}": one.delta for name, one in ACCOUNTANTS.items()}
    calls |= {"delta_by": functools.partial(delta_by, "pld"), "best_accountant": best_accountant}
    calls |= {name: getattr(ja, name) for name in ja.__all__}
    for name, call in calls.items():
        if isinstance(call, type) or not callable(call):
            continue
        parameters = inspect.signature(call).parameters
        if "compose_with" in parameters:
            needed = {key: value for key, value in numbers.items() if key in parameters}
            yield name, functools.partial(call, **needed, compose_with=event), "mechanism" in parameters


def test_no_public_call_composes_an_event_with_replace_one():
    """The event's losses are those of zero-out: 7.24e-4 in place of 1.0065e-3 by two steps of both."""
    mechanism = ja.Mechanism(ja.Poisson(1, 0.1), WHITE, 1.0, REPLACE)
    together = delta_by("pld", ja.Mechanism(ja.Poisson(2, 0.1), WHITE, 1.0, REPLACE), 1.0)
    assert together == pytest.approx(1.0065e-3, rel=1e-3)
    of_zero_out = dict((name, call) for name, call, _ in composing_calls())["delta_by"]
    assert of_zero_out(mechanism=ja.Mechanism(ja.Poisson(1, 0.1), WHITE, 1.0)) < 0.75 * together
    found = []
    for name, call, of_a_mechanism in composing_calls():
        found.append(name)
        with pytest.raises(ValueError, match="compose_with must not be given with replace-one"):
            call(mechanism=mechanism) if of_a_mechanism else call(mechanism.scheme, mechanism.strategy)
    assert {"estimate_delta", "privacy_profile", "verify", "calibrate", "accountant pld"} <= set(found)


FALSE_ALARM = 1e-6


SETTINGS = [
    (ja.Poisson(2, 0.3), 0.8, 0.7, 1.0),
    (ja.BalancedMinSep(2, 2, 0.5), 0.6, 0.5, 1.0),
    (ja.BalancedMinSep(2, 2, 0.9), 1.0, 1.0, 0.2),
]


@pytest.mark.parametrize(("scheme", "c", "sigma", "epsilon"), SETTINGS)
def test_adaptive_gradients_are_not_worse(scheme, c, sigma, epsilon):
    """The second gradients depend on the first output: signs on either side of every threshold."""
    line = np.linspace(-8, 8, 161) * max(1.0, sigma)
    x, y = np.meshgrid(line, line, indexing="ij")

    def density(first, second):
        total = 0.0
        for (i, j), p in pattern_distribution(scheme).items():
            mean = c * i * first + j * second(x)
            total = total + p * np.exp(-((x - i * first) ** 2 + (y - mean) ** 2) / (2 * sigma**2))
        return total / (2 * np.pi * sigma**2)

    def value(P, Q):
        return float(np.maximum(P - np.exp(epsilon) * Q, 0).sum() * (line[1] - line[0]) ** 2)

    bound = value(density(1, np.ones_like), density(-1, lambda at: -np.ones_like(at)))
    found = []
    for threshold, below, above, opposite in itertools.product(
        (-0.5, 0.0, 0.8), (-1, 0, 1), (-1, 0, 1), (-1, 0, 1)
    ):
        adaptive = density(1, lambda at, t=threshold, b=below, a=above: np.where(at < t, b, a))
        found.append(value(adaptive, density(-1, lambda at, o=opposite: o * np.ones_like(at))))
    assert max(found) <= bound * (1 + 1e-3) + 1e-9


def same_distribution(first, second) -> float:
    """Chi-square p-value of two tables of equally many draws; rare patterns are pooled."""
    rare = first + second < 20
    table = np.stack([np.append(row[~rare], row[rare].sum()) for row in (first, second)])
    return stats.chi2_contingency(table[:, table.any(axis=0)]).pvalue


def counted(patterns_of_two) -> np.ndarray:
    """How often each joint pattern of examples 0 and 1 was drawn; (runs, 4 steps, 2) of 0 and 1."""
    codes = patterns_of_two.reshape(len(patterns_of_two), 8) @ (1 << np.arange(8))
    return np.bincount(codes, minlength=256)


def drawn(scheme, size, seed, runs=2000) -> np.ndarray:
    """Joint patterns of examples 0 and 1 among `size`, from the trainer's own sampler."""
    samplers = (Sampler(scheme, size, size, key=(seed, run, 7, 9)) for run in range(runs))
    return np.stack([drawn_by(sampler, size)[:2].T for sampler in samplers])


@pytest.mark.parametrize(
    "scheme",
    [slow(ja.CyclicPoisson(4, 2, 0.6)), slow(ja.BallsInBins(4, 2)), ja.BMinSep(4, 3, 0.6, False)],
    ids=lambda scheme: type(scheme).__name__,
)
def test_the_others_batches_do_not_depend_on_the_example(scheme):
    """Add-or-remove-one: patterns of two examples, with a third one and without it."""
    assert scheme.others_are_independent
    assert same_distribution(counted(drawn(scheme, 3, 1)), counted(drawn(scheme, 2, 2))) > FALSE_ALARM


def test_mechanisms_without_the_pair_are_refused():
    """Of schemes that have none: `conformance`."""
    white = ja.BandedToeplitz.square_root(1)
    for adjacency in ("add-or-remove-one", "replace-one"):
        mechanism = ja.Mechanism(ja.Poisson(12, 0.1), white, 1.0, adjacency)
        target = ja.ClaimedTarget.at(2.0, 1e-3)
        refused(f"max_batch_size must not be given with {adjacency}", ja.Claim, mechanism, target, 100, 15)
    refused("adjacency must be one of", lambda: ja.Mechanism(ja.Poisson(12, 0.1), white, 1.0, "replace-two"))
