"""Users who share examples: the counterexample to theorem 6.1 of arXiv 2602.09338, and to algorithm 4.

The attacks play the adversary against the batches of algorithm 3 on the graph of
`tests.oracles.shared_examples`. They win: that is why `Sampler`, `fit` and `train.batches.attribution` refuse
such graphs for multi-attribution (`tests/train/batches/test_attribution.py`; proofs/shared_examples.md).
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from jaxacct import BandedToeplitz, CalibrationOptions, IndependentAttribution, MultiAttribution, calibrate
from jaxacct.core.evidence import Bound
from tests.oracles import shared_examples
from tests.oracles.tuples import two_step_delta
from tests.refusals import refused
from tests.stored_plans import claim_with
from train.batches.graph import AttributionPool, from_edges
from train.batches.sampler import Sampler

FALSE_ALARM = 1e-6


def accounted(p: float, sigma: float, epsilon: float, direction: str) -> float:
    """What theorem 6.1 says of two steps and k_u = 2, C = I, by integration over both outputs."""
    return two_step_delta(MultiAttribution(2, 2, p, 2, False), (1.0,), sigma, epsilon, direction)


@pytest.mark.parametrize(
    ("p", "sigma", "m", "remove", "add"),
    [
        (1e-3, 0.5, 20_000, 5.098e-4, 5.095e-4),
        (0.01, 0.5, 2000, 5.099e-3, 5.098e-3),
        (0.05, 1, 200, 5.867e-3, 5.009e-3),
    ],
)
def test_theorem_6_1_fails(p, sigma, m, remove, add):
    """The exact delta(1) of two released numbers is above what the theorem allows for all of them."""
    for direction, value in (("remove", remove), ("add", add)):
        true = shared_examples.exact_delta(m, p, sigma, 1.0, direction)
        assert true == pytest.approx(value, rel=1e-3)
        assert true > 2 * accounted(p, sigma, 1.0, direction)
    # The add direction was even said to be exactly zero.
    assert 1.0 > -MultiAttribution(2, 2, p, 2, False).log_probability_of_none()


@pytest.mark.parametrize("by_batches", [False, True], ids=["algorithm 3", "algorithm 4"])
@pytest.mark.parametrize("phantom", [False, True])
def test_the_distribution_behind_the_counterexample(by_batches, phantom):
    """(example 0 in the first batch, others in the second) over all coins of the printed algorithms."""
    m, p = 3, 0.3
    owners = [{0, 1, 2, 3}, {1}, {2}, {3}] + [{0}] * phantom
    distribution = np.zeros((2, m + 1))
    for coins in itertools.product(itertools.product((0, 1), repeat=len(owners)), repeat=2):
        first, second = ({e for e, coin in enumerate(step) if coin} for step in coins)
        barring = first - {len(owners) - 1} if by_batches and phantom else first  # a phantom never joins
        locked_out = {e for e in range(len(owners)) for other in barring if owners[e] & owners[other]}
        others = {e for e in second - locked_out if 1 <= e <= m}
        heads = sum(map(sum, coins))
        distribution[int(0 in first), len(others)] += p**heads * (1 - p) ** (2 * len(owners) - heads)
    exact = np.vstack([(1 - p) * shared_examples.second_batch(m, p), [p, *[0] * m]])
    np.testing.assert_allclose(distribution, exact, atol=1e-12)


def test_an_adversary_beats_the_batches_of_algorithm_3():
    """Real batches of the pool; given them an event of the two noisy sums has a probability in closed form.

    Empirical Bernstein (Maurer and Pontil 2009, theorem 4) bounds delta(1) from below; false alarm 1e-6 for
    each direction.
    """
    p, sigma, m, runs, alpha = 0.05, 1.0, 400, 8000, math.e
    users, rows = shared_examples.edges(m)
    graph, scheme = from_edges(users, rows, dataset_size=m + 1), MultiAttribution(2, 2, p, 2, False)
    generator = np.random.default_rng(611)
    seen = np.empty((runs, 2))
    for run in range(runs):
        pool = AttributionPool(scheme, graph, generator)
        first, second = pool.draw(0, generator), pool.draw(1, generator)
        seen[run] = 0 in first, np.count_nonzero(second)
    x, others = seen.T
    assert not others[x == 1].any()  # the second batch shows the coin
    small = stats.norm.cdf((3.0 - others) / sigma)
    present, absent = 1.5, -0.5  # the first number above the one, or below the other
    # P(event | D) - e P(event | D'), D' having a zero gradient for example 0 and the same batches.
    either = np.array([0.0, 1.0])  # the two values that x, and so a term, may have

    def remove(x):
        return stats.norm.sf(present - x) - alpha * stats.norm.sf(present)

    def add(x):
        return stats.norm.cdf(absent) - alpha * stats.norm.cdf(absent - x)

    for gain, direction in ((remove, "remove"), (add, "add")):
        terms, log_term, span = small * gain(x), math.log(2 / FALSE_ALARM), np.ptp(gain(either))
        width = math.sqrt(2 * terms.var(ddof=1) * log_term / runs) + 7 * span * log_term / (3 * (runs - 1))
        assert terms.mean() - width > accounted(p, sigma, 1.0, direction)
        assert terms.mean() - width < shared_examples.exact_delta(m, p, sigma, 1.0, direction)


@pytest.mark.parametrize("accountant", ["revealed-pattern", "unamplified"])
def test_the_revealed_pattern_holds_where_the_printed_theorem_is_broken(accountant):
    """One target, (1, 1e-3), on the counterexample graph: its exact delta at the noise of the printed theorem
    and at that of a plan with all coins revealed; nothing else passes for such a graph."""
    p, m, target = 0.05, 200, 1e-3
    scheme = MultiAttribution(2, 2, p, 2, False)
    assert (
        accounted(p, 1.0, 1.0, "remove") < target < shared_examples.exact_delta(m, p, 1.0, 1.0, "remove") / 5
    )
    options = dict(epsilon=1.0, delta=target, dataset_size=m + 1)
    plan = calibrate(
        scheme, BandedToeplitz.square_root(1), **options, options=CalibrationOptions(accountant=accountant)
    )
    for direction in ("remove", "add"):
        assert shared_examples.exact_delta(m, p, plan.mechanism.noise_multiplier, 1.0, direction) < target
    users, rows = shared_examples.edges(m)
    graph = from_edges(users, rows, dataset_size=m + 1)
    assert Sampler.from_plan(plan, graph=graph).next().size <= plan.max_batch_size
    forged = [
        dict(evidence=Bound("pld")),
        dict(evidence=Bound("unheard-of")),
        dict(claim=claim_with(plan.claim, noise_multiplier=1.0)),
    ]
    for change in forged:
        other = dataclasses.replace(plan, **change)
        assert not other.holds_for_shared_examples
        refused("graph must give every example one owner", Sampler.from_plan, other, graph=graph)


def test_independent_draws_do_not_show_the_coin():
    """The same adversary against batches of independent attribution: it stays below what is accounted for."""
    p, sigma, m, runs, alpha = 0.05, 1.0, 100, 3000, math.e
    users, rows = shared_examples.edges(m)
    graph, scheme = from_edges(users, rows, dataset_size=m + 1), IndependentAttribution(2, 2, p, 2, False)
    seen = np.empty((runs, 2))
    for run in range(runs):
        sampler = Sampler(scheme, m + 1, m + 1, (run, 6, 1, 1), graph=graph)
        first, second = sampler.next(), sampler.next()
        seen[run] = 0 in first, np.count_nonzero(second)
    x, others = seen.T
    assert stats.ttest_ind(others[x == 1], others[x == 0]).pvalue > FALSE_ALARM
    terms = stats.norm.cdf((3.0 - others) / sigma) * (stats.norm.sf(1.5 - x) - alpha * stats.norm.sf(1.5))
    allowed = two_step_delta(scheme, (1.0,), sigma, 1.0, "remove")
    assert terms.mean() + 5 * terms.std() / math.sqrt(runs) < allowed
