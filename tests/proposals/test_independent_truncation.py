"""Cuts drawn independently: the dominating pair, two replicas, and the bound on their terms."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxacct as ja
from jaxacct.estimates.estimate import best_proposal
from jaxacct.proposals.candidates import candidates
from jaxacct.proposals.families.replicas import log_scale
from jaxacct.proposals.families.truncated import Replicas
from jaxacct.proposals.threshold import budget_lines
from jaxacct.schemes.replicas import table as replicas
from jaxacct.schemes.truncation.independent_truncation import IndependentTruncation
from jaxacct.statistics.lines import total
from tests.draws import divergence_interval
from tests.oracles import enumeration, tuples
from tests.oracles.chi_square import FALSE_ALARM, chi_square_p_value
from tests.oracles.settings import slow
from tests.proposals_by_name import proposal_by_name
from tests.refusals import refused
from tests.schemes.test_truncated_b_min_sep import given_sizes

NAME = "truncated"
# Warm and cold, n < b, one band, everyone sampled; a maximum at the mean and above.
SMALL = [
    (ja.TruncatedBMinSep(5, 2, 0.3, 4, 12), 2),
    (ja.TruncatedBMinSep(5, 3, 0.4, 5, 10, False), 3),
    (ja.TruncatedBMinSep(4, 1, 0.3, 3, 9), 1),
    (ja.TruncatedBMinSep(3, 4, 0.5, 4, 9), 4),
]
IDS = [f"n{s.iterations}-b{s.min_separation}" for s, _ in SMALL]


def mechanism_of(scheme, bands, sigma=0.9):
    return ja.Mechanism(scheme, ja.BandedToeplitz.square_root(bands), sigma)


def distribution_given(
    scheme, truncated, when_truncated: int, when_whole: int
) -> dict[tuple[int, ...], float]:
    """Theorem 2 word for word: the distribution of x (2, 1) or y (-1, 0) given which steps are truncated."""
    distribution: dict[tuple[int, ...], float] = {}
    for pattern, weight in enumeration.pattern_distribution(scheme.untruncated).items():
        counts = tuple(
            x * (when_truncated if c else when_whole) for x, c in zip(pattern, truncated, strict=True)
        )
        distribution[counts] = distribution.get(counts, 0.0) + weight
    return distribution


def all_truncations(chances):
    """(which steps are truncated, its probability) for every set of steps."""
    for truncated in itertools.product((0, 1), repeat=len(chances)):
        yield truncated, float(np.prod([c if k else 1 - c for k, c in zip(truncated, chances, strict=True)]))


def two_steps(scheme, truncation, strategy, sigma, epsilon, direction):
    """Exact divergences of two steps: the pair of appendix D, and its bound with independent truncation."""
    dense = enumeration.strategy_matrix(strategy.coefficients, 2, 2)

    def delta(*pair):
        return tuples.divergence(*pair, sigma, epsilon, direction, dense=dense, points=401)

    bound = truncation.beyond + sum(
        w * delta(distribution_given(scheme, truncated, 2, 1), distribution_given(scheme, truncated, -1, 0))
        for truncated, w in all_truncations(truncation.chances)
    )
    return given_sizes(scheme, delta), bound


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(
    "scheme",
    [
        ja.TruncatedBMinSep(2, 2, 0.3, 2, 6),
        ja.TruncatedBMinSep(2, 1, 0.2, 2, 5),
        ja.TruncatedBMinSep(2, 2, 0.3, 2, 5, False),
    ],
)
def test_independent_truncation_dominates_the_pair_of_appendix_d(scheme, direction):
    """All others' batch sizes, exactly; and with rarer truncation the bound would be broken."""
    strategy, (sigma, epsilon) = ja.BandedToeplitz.square_root(min(2, scheme.min_separation)), (0.8, 0.5)
    truncation = scheme.independent_truncation
    exact, bound = two_steps(scheme, truncation, strategy, sigma, epsilon, direction)
    assert 0 < exact <= bound + 1e-7
    assert bound < 5 * exact  # of batches of two; a few per cent of large ones
    rarer = dataclasses.replace(truncation, chances=tuple(0.2 * c for c in truncation.chances))
    assert two_steps(scheme, rarer, strategy, sigma, epsilon, direction)[1] < exact


def test_the_chance_of_truncation_is_the_largest_that_the_past_allows():
    """At so many eligible as are reserved for it holds, with one more it would not; no fewer would do."""
    scheme = ja.TruncatedBMinSep.from_batch_size(
        dataset_size=51_200, batch_size=80, iterations=1000, min_separation=64, max_batch_size=80
    )
    truncation, p = scheme.independent_truncation, scheme.sampling_probability
    allowed, eligible = 2.0**-50 / 1000, 1 / (1 + 63 * p)
    most = next(k for k in range(46_000, 51_200) if stats.binom.sf(k, 51_199, eligible) <= allowed)
    assert truncation.beyond == pytest.approx(1000 * stats.binom.sf(most, 51_199, eligible), rel=1e-6, abs=0)
    assert 0 < truncation.beyond <= 2.0**-50
    assert set(truncation.chances) == {truncation.chances[0]}
    assert stats.binom.sf(79, most, p) <= truncation.chances[0] < stats.binom.sf(79, most + 1, p)
    # A tenth more than the batches that are truncated.
    assert stats.binom.sf(79, 51_199, scheme.untruncated.participation_rate) < truncation.chances[0] < 0.57
    # From a cold start everyone is eligible at first.
    cold = IndependentTruncation.of(
        dataclasses.replace(scheme.untruncated, warm_start=False), 120, 51_200
    ).chances
    assert cold[0] >= stats.binom.sf(119, 51_199, p) and cold[0] > 2 * cold[100]
    assert set(IndependentTruncation.of(scheme.untruncated, 51_200, 51_200).chances) == {0.0}


@pytest.mark.parametrize(("scheme", "bands"), SMALL[::3], ids=IDS[::3])
def test_likelihoods_against_enumeration(scheme, bands, x64):
    mechanism, rng, n = mechanism_of(scheme, bands), np.random.default_rng(1), scheme.iterations
    dense = enumeration.strategy_matrix(ja.BandedToeplitz.square_root(bands).array, n, n)
    norms, variance = (dense**2).sum(axis=0), mechanism.noise_multiplier**2
    outputs, truncated = rng.normal(size=(6, n)) * 1.5, rng.random((6, n)) < 0.5
    truncated[0], truncated[1] = False, True
    ratios = (outputs @ dense - norms / 2) / variance
    found = jax.jit(scheme.independent_truncation.log_likelihoods)(ratios, norms / 2 / variance, truncated)
    for k, (y, steps) in enumerate(zip(outputs, truncated, strict=True)):
        for ours, counts in zip(found, ((2, 1), (-1, 0)), strict=True):
            law = distribution_given(scheme, steps, *counts)
            exact = enumeration.log_mixture(law, dense, mechanism.noise_multiplier, y[None])
            assert float(ours[k]) == pytest.approx(exact[0], rel=1e-9, abs=1e-12)


def distribution_of_replicas(of_two, tilted) -> tuple[dict[tuple[int, ...], float], float]:
    """({truncated steps, counts of one replica, of the other: probability}, ln of their mean weight)."""
    (truncation, strategy, sigma), (one, two) = of_two, of_two.scheme.counts
    n = truncation.iterations
    dense = enumeration.strategy_matrix(strategy.array, strategy.rows(n), n)
    distribution: dict[tuple[int, ...], float] = {}
    patterns = enumeration.pattern_distribution(truncation.untruncated)
    for truncated, chance in all_truncations(tilted):
        count = np.where(truncated, two, one)
        for (x, p_x), (z, p_z) in itertools.product(patterns.items(), repeat=2):
            attracted = np.exp((dense @ (x * count)) @ (dense @ (z * count)) / sigma**2)
            key = (*truncated, *(np.add(x, z) * count).tolist())
            distribution[key] = distribution.get(key, 0.0) + chance * p_x * p_z * float(attracted)
    total_weight = sum(distribution.values())
    return {key: w / total_weight for key, w in distribution.items()}, math.log(total_weight)


@pytest.mark.parametrize(
    ("scheme", "bands", "counts"), [(*SMALL[0], (1, 2)), (*SMALL[1], (0, 1)), (*SMALL[2], (1, 2))]
)
def test_the_distribution_of_two_replicas(scheme, bands, counts, key):
    """The normalizer exactly, the draws by chi-square (false alarm 1e-6)."""
    chances = tuple(np.linspace(0.2, 0.7, scheme.iterations).tolist())
    truncation = IndependentTruncation(scheme.untruncated, chances, 0.0, counts)
    strategy = ja.BandedToeplitz.square_root(bands)
    of_two = Replicas(truncation, strategy, 1.2)
    distribution, log_z = distribution_of_replicas(of_two, chances)
    assert replicas.log_normalizer(of_two) == pytest.approx(log_z, rel=1e-10)
    shorter = of_two._replace(strategy=ja.FiniteToeplitz(strategy.coefficients, scheme.iterations))
    assert replicas.log_normalizer(shorter) == pytest.approx(
        distribution_of_replicas(shorter, chances)[1], rel=1e-10
    )
    arrays = {"pairs": replicas.tables(of_two), "chances": np.uint32(np.array(chances) * 2.0**32)}
    truncated, drawn = jax.jit(truncation.draw, static_argnums=2)(key, arrays, 40_000)
    both = np.concatenate([np.asarray(truncated).astype(int), np.rint(np.asarray(drawn)).astype(int)], axis=1)
    assert chi_square_p_value(both, distribution) > FALSE_ALARM


def densities(scheme, dense, sigma, outputs, truncated):
    """(f_P, f_Q) at each of the outputs, given which steps are truncated."""
    laws = (distribution_given(scheme, truncated, *counts) for counts in ((2, 1), (-1, 0)))
    return [np.exp(enumeration.log_mixture(law, dense, sigma, outputs)) for law in laws]


def max_term(mechanism, epsilon, direction, seed=0):
    """(largest term over the scale, the same where the floor under the other likelihood is taken for 1).

    Over every set of truncated steps, at outputs far and near and climbing from the best of them.
    """
    scheme, sigma, rng = mechanism.scheme, mechanism.noise_multiplier, np.random.default_rng(seed)
    n = scheme.iterations
    p = scheme.sampling_probability
    proposal = proposal_by_name(mechanism, epsilon, direction, NAME)
    dense = enumeration.strategy_matrix(mechanism.strategy.array, n + mechanism.strategy.bands - 1, n)
    alpha, none = math.exp(epsilon), math.exp(scheme.untruncated.log_probability_of_none())
    scale, worst, without = math.exp(proposal.log_scale), 0.0, 0.0
    tilt = float(proposal.tables()["log_tilt"])
    careless = math.exp(log_scale(proposal.log_normalizer, 2, epsilon))
    for truncated in itertools.product((0, 1), repeat=n):

        def term(y, truncated=truncated):
            f_p, f_q = densities(scheme, dense, sigma, y, truncated)
            if direction == "add":
                return math.exp(proposal.log_normalizer) * np.maximum(f_q - alpha * f_p, 0) / f_q**2
            weight = math.exp(proposal.log_normalizer - tilt * sum(truncated)) / f_p
            return weight * np.maximum(1 - alpha * f_q / f_p, 0)

        y = rng.normal(size=(3000, len(dense))) * rng.choice([0.5, 2.0, 8.0], size=(3000, 1))
        y += rng.choice([-3.0, 0.0, 3.0], size=(3000, 1))
        for step in (1.0, 0.3, 0.1, 0.03):
            best = y[np.argmax(term(y))]
            y = best + step * rng.normal(size=(1500, len(dense)))
            y[0] = best
        found = float(term(y).max())
        worst = max(worst, found / scale)
        # What a term would be without the lowering: in the remove direction the tilt belongs to it.
        without = max(without, found * math.exp(tilt * sum(truncated)) / careless)
    assert none > 0 and 0 < p < 1
    return worst, without


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(
    ("scheme", "bands"),
    [(ja.TruncatedBMinSep(3, 2, 0.4, 4, 10), 2), (ja.TruncatedBMinSep(3, 1, 0.4, 4, 10), 1)],
)
def test_no_term_exceeds_the_scale(scheme, bands, direction):
    """The search for a counterexample comes near 1 and not above; without the floors it finds one."""
    worst, without = 0.0, 0.0
    for epsilon, sigma in ((0.3, 1.0), (1.5, 0.5)):
        found = max_term(mechanism_of(scheme, bands, sigma), epsilon, direction)
        worst, without = max(worst, found[0]), max(without, found[1])
    assert 0.8 < worst <= 1 + 1e-9
    assert without > 1.2


@pytest.mark.parametrize("direction", ["remove", slow("add")])
def test_the_mean_is_the_divergence_with_independent_truncation(direction, key):
    """Two steps, two bands: the interval of the mean holds the exact divergence; false alarm 1e-6."""
    mechanism, epsilon = mechanism_of(ja.TruncatedBMinSep(2, 2, 0.4, 4, 10), 2, 1.0), 0.7
    exact = exact_divergence(mechanism, epsilon, direction)
    proposal = proposal_by_name(mechanism, epsilon, direction, NAME)
    low, high = divergence_interval(proposal, proposal.draw(key, 0, 64), epsilon, FALSE_ALARM)
    assert low <= exact <= high and high - low < 0.05 * math.exp(proposal.log_scale)
    assert proposal.of_a_bound and proposal.scale_at is not None
    assert proposal.scale_at(epsilon) == proposal.log_scale


def exact_divergence(mechanism, epsilon, direction) -> float:
    """Of two steps with independent truncation, in the plane that the columns of C span."""
    scheme, strategy = mechanism.scheme, mechanism.strategy
    _, triangle = np.linalg.qr(enumeration.strategy_matrix(strategy.array, 1 + strategy.bands, 2))

    def delta(truncated):
        laws = (distribution_given(scheme, truncated, *counts) for counts in ((2, 1), (-1, 0)))
        how = mechanism.noise_multiplier, epsilon, direction
        return float(tuples.divergence(*laws, *how, dense=triangle, points=401))

    chances = scheme.independent_truncation.chances
    return sum(w * delta(truncated) for truncated, w in all_truncations(chances))


def test_what_is_booked(key):
    """Float32 against float64 of the same draws stays within; a part of the eligible is reserved as delta."""
    scheme = ja.TruncatedBMinSep(12, 3, 0.1, 60, 600)
    mechanism = mechanism_of(scheme, 3, 0.8)
    log_likelihoods = jax.jit(scheme.independent_truncation.log_likelihoods)
    for direction in ("remove", "add"):
        proposal = proposal_by_name(mechanism, 2.0, direction, NAME)
        lines = {line.name: line for line in budget_lines(proposal, 1e-5)}
        margin, weight = total(tuple(lines.values()), "epsilon"), lines["float32 weights"].amount
        more = lines["more examples eligible than allowed for"]
        assert more.amount == scheme.independent_truncation.beyond > 0 and more.kind == "delta"
        n = scheme.iterations
        generator = np.random.default_rng(4)
        scores = generator.normal(size=(4000, n)) * 0.8 + generator.choice([-2.0, 0.0, 2.0, 4.0], (4000, n))
        truncated, single = generator.random((4000, n)) < 0.5, np.float32(0.64)
        small = log_likelihoods(
            (scores.astype(np.float32) - np.float32(0.5)) / single, np.float32(0.5) / single, truncated
        )
        with jax.enable_x64(True):
            exact = log_likelihoods(
                jnp.asarray((scores - 0.5) / 0.64), jnp.asarray(0.5 / 0.64), jnp.asarray(truncated)
            )
            exact = list(map(np.asarray, exact))
        errors = [np.abs(np.asarray(a, float) - b).max() for a, b in zip(small, exact, strict=True)]
        assert 0 < sum(errors) < margin and max(errors) < math.log1p(weight)


def test_where_there_is_none():
    loud = mechanism_of(SMALL[0][0], 2, 0.01)
    for mechanism, line in (
        (mechanism_of(SMALL[0][0].untruncated, 2), "scheme must truncate batches itself, got b-min-sep"),
        (loud, r"overflow at noise multiplier 0\.01"),
    ):
        refused(line, proposal_by_name, mechanism, 1.0, "remove", NAME)
    assert [c.proposal.name for c in candidates(loud, 1.0, "remove", ja.Budget.split(1e-2))] == ["plain"]


def test_few_samples(tmp_path):
    """A maximum at the mean batch, delta 1e-6: certified in both directions by a few thousand draws."""
    scheme = ja.TruncatedBMinSep.from_batch_size(
        dataset_size=600, batch_size=6, iterations=24, min_separation=4, max_batch_size=6
    )
    strategy = ja.BandedToeplitz.square_root(3)
    plan = ja.calibrate(scheme, strategy, epsilon=8.0, delta=1e-6, dataset_size=600, noise_multiplier=1.4)
    assert plan.certified and plan.is_sampled
    for seen in plan.verdict.directions:
        assert seen.proposal.startswith("truncated") and seen.num_samples < 50_000
    plan.save(tmp_path / "plan.json")
    assert type(plan).load(tmp_path / "plan.json") == plan
    found = ja.estimate_delta(plan.mechanism, 8.0, num_samples=1000, key=jax.random.key(1))
    assert found.low == 0 and found.high < 1e-5
    assert all(name.startswith("truncated") for name in found.proposals.values())
    # Where plain draws of the pair itself are few, they are taken.
    few, many = (candidates(plan.mechanism, 8.0, "remove", ja.Budget.split(delta)) for delta in (1e-2, 1e-6))
    assert [c.proposal.name for c in few] == ["plain"]
    predicted = [c.predicted_samples for c in many]
    assert max(predicted) > 1000 * min(predicted)
    loud = dataclasses.replace(plan.mechanism, noise_multiplier=0.5)
    assert best_proposal(loud, 1.0, "remove", None, None).name == "plain"
    assert best_proposal(loud, 1.0, "remove", NAME, None).name == NAME
