"""Sampled participation plans: against the exact distribution, wrong distributions, and forged draws."""

import dataclasses
import json
from collections import Counter

import jax
import numpy as np
import optax
import pytest

from jaxacct.accountants.tradeoff import (
    GeneralDPSGD,
    ParticipationPMF,
    gdp_delta,
    mixture_delta,
    mixture_epsilon,
)
from jaxacct.accountants.tradeoff.generalized_dpsgd import mixture_certificate as certificate
from jaxacct.accountants.tradeoff.generalized_dpsgd.mixture_certificate import (
    BLOCK,
    accepts,
    certify_mixture,
    digest,
    replayed,
)
from jaxacct.accountants.tradeoff.generalized_dpsgd.sampled_participation import SampledDistribution
from jaxacct.accountants.tradeoff.plan import PLANS, SampledGeneralPlan

SIZES = dict(dataset_size=24, num_microbatches=2, microbatch_size=3, num_epochs=2, sampling="shuffling")
SIZES |= dict(group_size=3)
DISTRIBUTION = SampledDistribution(GeneralDPSGD(**SIZES))
KEY = jax.random.key(7)


@pytest.fixture(scope="module")
def plan():
    return SampledGeneralPlan.calibrate(6.0, 1e-3, num_samples=8 * BLOCK, key=KEY, **SIZES)


def test_a_plan_costs_hardly_more_noise_than_the_exact_distribution(plan):
    """The promise holds by the exact distribution, whose epsilon is a few per cent below."""
    exact = mixture_epsilon(1e-3, DISTRIBUTION.run.pmf(), plan.sigma)
    assert plan.certified and 0.9 * 6 < exact < 6 and plan.replay()
    assert "Certified by" in plan.statement() and "sees which records" in plan.statement()
    assert plan.terms.kind == "certified" and plan.terms.adversary == "sampling-revealed"


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param((11, 36, 37, 38, 39, 56, 58, 72, 83, 84, 88, 99), id="worst"),
        pytest.param(range(100), id="all", marks=pytest.mark.slow),
    ],
)
def test_a_plan_is_hardly_ever_refused(seeds):
    """Draws differ from the pilot's by chance, for which the noise leaves room: one in 25 was refused.

    The worst of a hundred seeds are those that one standard error of room, and not five, would not do for.
    """
    for seed in seeds:
        SampledGeneralPlan.calibrate(6.0, 1e-3, num_samples=2 * BLOCK, key=jax.random.key(seed), **SIZES)


def test_draws_follow_the_distribution():
    """Counts of a block against the exact distribution, chi-square, false alarm 1e-6; c^2 <= `most`."""
    from scipy import stats

    pmf, drawn = DISTRIBUTION.run.pmf(), DISTRIBUTION.draw(KEY, BLOCK)
    assert drawn.max() <= DISTRIBUTION.most() and set(drawn) <= set(pmf.squared_sensitivity)
    seen = np.array([(drawn == y).sum() for y in pmf.squared_sensitivity])
    likely = pmf.prob * BLOCK > 5
    observed = np.append(seen[likely], seen[~likely].sum())
    expected = np.append(pmf.prob[likely], pmf.prob[~likely].sum()) * BLOCK
    kept = expected > 0
    assert (
        stats.chisquare(observed[kept], expected[kept] * (observed[kept].sum() / expected[kept].sum())).pvalue
        > 1e-6
    )


def test_bad_arguments_are_refused():
    for change, word in (
        ({"sigma": 0.0}, "sigma"),
        ({"delta": 1.0}, "delta"),
        ({"num_samples": 0}, "num_samples"),
    ):
        with pytest.raises(ValueError, match=word):
            certify_mixture(**dict(distribution=DISTRIBUTION, sigma=1.0, epsilon=1.0, delta=0.1) | change)


def test_wrong_acceptance_is_as_rare_as_it_says():
    """A distribution whose delta is at the limit is rarely accepted: 2000 runs of draws with q = 0.01."""
    values, chance, q = (1, 16), (0.95, 0.05), 0.01
    epsilon, sigma = 1.0, 2.0
    exact = mixture_delta(epsilon, ParticipationPMF(np.array(values), np.array(chance)), sigma)

    class Two(SampledDistribution):
        def most(self):
            return 16

    distribution, rng, accepted = Two(DISTRIBUTION.run), np.random.default_rng(0), 0
    budget = certificate.Budget(1.0 - 1e-9, float(exact), q)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificate.Budget, "split", lambda delta: budget)
        for high, times in Counter(rng.binomial(2000, chance[1], size=2000).tolist()).items():
            accepted += times * certificate.accepts(
                ((1, 2000 - high), (16, high)), distribution, sigma, epsilon, 0.5
            )
        # A hundredth less noise than that is distinguished by more draws.
        assert certificate.accepts(((1, 97_000), (16, 3_000)), distribution, sigma, epsilon, 0.5)
    # 2000 q = 20 on the average at most; above 48 with probability 1e-6 at most.
    assert accepted <= 48


def test_forged_and_relabelled_draws_are_refused(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert SampledGeneralPlan.load(tmp_path / "plan.json") == plan and SampledGeneralPlan in PLANS.values()
    stored = json.loads((tmp_path / "plan.json").read_text())
    counts = stored["evidence"]["counts"]
    for name, value in (
        ("sigma", plan.sigma * 0.999),
        ("epsilon", 5.99),
        ("delta", 9e-4),
        ("num_epochs", 3),
        ("sampling", "subsampling"),
        ("sampling", "poisson"),
        ("evidence", None),
        ("evidence", stored["evidence"] | {"target": "0" * 64}),
        ("evidence", stored["evidence"] | {"counts": [*counts, [100, 1]]}),
        ("evidence", stored["evidence"] | {"counts": counts[::-1]}),
        ("evidence", stored["evidence"] | {"counts": [[counts[0][0], 1]]}),
        ("evidence", stored["evidence"] | {"key": [1]}),
        ("evidence", stored["evidence"] | {"note": 1}),
    ):
        with pytest.raises(ValueError) as caught:
            SampledGeneralPlan.from_json(stored | {name: value})
        assert "\n" not in str(caught.value)
    # Less noise, relabelled with counts that would be enough: only drawing shows it.
    sigma = plan.sigma / 1.2
    target = digest(DISTRIBUTION, sigma, plan.epsilon, plan.delta)
    forged = dataclasses.replace(plan.draws, target=target, counts=((2, 256 * BLOCK),))
    cheat = dataclasses.replace(plan, sigma=sigma, evidence=forged)
    assert cheat.certified and not cheat.replay() and not replayed(forged, DISTRIBUTION)
    # More or fewer than the key draws, by whole blocks or not.
    assert replayed(plan.draws, DISTRIBUTION)
    value, number = plan.draws.counts[0]
    for other in (number + BLOCK, number + 1, number - 1):
        changed = ((value, other), *plan.draws.counts[1:])
        assert not replayed(dataclasses.replace(plan.draws, counts=changed), DISTRIBUTION)
    with pytest.raises(ValueError, match="could not be certified"):
        cheat.verify(num_samples=4 * BLOCK, key=jax.random.key(8))


def test_fit_trains_under_it_and_draws_anew(plan, tmp_path):
    from tests.train.fitting import fit

    data, seen = np.ones((24, 2), np.float32), []

    def train(covered, **options):
        loss = lambda w, row: ((w - row) ** 2).sum()  # noqa: E731
        options |= dict(clip="mixed", progress=lambda what, done, of: seen.append(what))
        return fit(covered, np.zeros(2, np.float32), loss, data, optax.sgd(0.1), **options)

    assert train(plan, out=tmp_path / "run").steps == plan.iterations == 8
    assert seen.index("participations") < seen.index("training")
    seen.clear()
    assert train(plan, out=tmp_path / "new", verify=False).steps == 8 and "participations" not in seen


class Skewed:
    """A distribution of one value, of which draws may be up to `off` likelier than they are drawn."""

    def __init__(self, off):
        self.off = off

    def draw(self, key, num_samples):
        return np.ones(num_samples, np.int64)

    def most(self):
        return 4

    def draw_error(self):
        return self.off

    def describe(self):
        return {"kind": "skewed", "off": self.off}


def test_errors_of_the_draws_lower_the_threshold():
    """Deltas that are 30 % below the target on the average prove it, unless draws may be wrong by 50 %."""
    sigma, epsilon = 1.0, 0.5
    delta = 1.3 * float(gdp_delta(epsilon, 1 / sigma))
    counts = ((1, 2**18),)
    assert accepts(counts, Skewed(0.0), sigma, epsilon, delta)
    assert accepts(counts, Skewed(0.2), sigma, epsilon, delta)
    assert not accepts(counts, Skewed(0.5), sigma, epsilon, delta)


@pytest.mark.parametrize(("share", "accepted"), [(0.97, True), (1.02, False)])
def test_the_mean_that_draws_must_show_is_that_of_the_budget(share, accepted):
    """Of the largest term in some draws and nothing in the others: just below it, and just above."""
    sigma, epsilon, number = 1.0, 4.0, 10**9
    most = float(gdp_delta(epsilon, 2 / sigma))
    delta = 0.1 * most
    high = round(share * certificate.Budget.split(delta).delta_v / most * number)
    assert accepts(((0, number - high), (4, high)), Skewed(0.0), sigma, epsilon, delta) == accepted
