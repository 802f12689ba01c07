"""An advantage as the target: the total variation, certified, against the best test there is."""

import dataclasses
import math

import numpy as np
import pytest

from jaxacct import BandedToeplitz, BMinSep, Plan, Target, calibrate, verify
from jaxacct.core import text
from jaxacct.kernels.randomness import key_from_words
from jaxacct.report import risk
from jaxacct.report.html import report
from tests.oracles.enumeration import log_ratio, strategy_matrix, vectors
from tests.refusals import refused
from tests.stored_plans import as_json

ADVANTAGE = 0.3
SCHEME = BMinSep.from_batch_size(dataset_size=80, batch_size=10, iterations=12, min_separation=8)
DRAWS = 200_000
# Of a difference of two means of DRAWS numbers in [0, 1], with probability 1e-6 (Hoeffding).
ERROR = math.sqrt(math.log(1e6) / DRAWS)


@pytest.fixture(scope="module")
def plan() -> Plan:
    key = key_from_words([7, 11])
    return calibrate(
        SCHEME, BandedToeplitz.square_root(2), dataset_size=80, key=key, target=Target.advantage(ADVANTAGE)
    )


def best_test(plan: Plan, noise_multiplier: float) -> float:
    """True minus false positive rate of "the likelihood ratio is above 1", on fresh outputs of each kind."""
    n, c, random = SCHEME.iterations, plan.mechanism.strategy.array, np.random.default_rng(3)
    patterns, weights = vectors(SCHEME)
    members = patterns[random.choice(len(weights), DRAWS, p=weights / weights.sum())]

    def positive(x) -> float:
        outputs = x @ strategy_matrix(c, n, n).T + noise_multiplier * random.standard_normal((DRAWS, n))
        return float((log_ratio(SCHEME, c, noise_multiplier, outputs) > 0).mean())

    return positive(members) - positive(np.zeros(n))


def test_no_test_gains_more_and_one_would_with_less_noise(plan):
    sigma = plan.mechanism.noise_multiplier
    assert 0.93 * ADVANTAGE - ERROR < best_test(plan, sigma) < ADVANTAGE + ERROR
    assert best_test(plan, 0.8 * sigma) > ADVANTAGE + 2 * ERROR
    low = dataclasses.replace(plan.mechanism, noise_multiplier=0.8 * sigma)
    assert not verify(low, 0.0, ADVANTAGE, max_samples=50_000, key=key_from_words([1, 2])).certified


def test_the_divergence_at_epsilon_0_is_that_of_the_best_test(plan):
    found = best_test(plan, plan.mechanism.noise_multiplier)
    assert plan.verdict.remove.estimate == pytest.approx(found, abs=3 * ERROR)


def test_the_plan_says_it_and_is_read_back(plan):
    data = as_json(plan)
    assert Plan.from_json(data) == plan and plan.certified
    assert (plan.epsilon, plan.delta) == (0.0, ADVANTAGE)
    assert "true positive rate more than 0.3 above its false positive rate" in plan.statement()
    assert risk.advantage(plan.epsilon, plan.delta) == ADVANTAGE
    for change in ({"delta": 0.25}, {"epsilon": -0.1}, {"epsilon": 0.1}):
        refused(r"plan|epsilon|budget", Plan.from_json, data | {"claim": data["claim"] | change})
    assert "more than 0.3 above" in report(plan)  # and its pictures can be made
    assert math.fsum(delta for _, delta in text.budget_items(plan.verdict)) <= ADVANTAGE
