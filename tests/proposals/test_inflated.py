"""Replicas at an inflated probability: the bound by enumeration, draws, and the reserves for two losses."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from jaxacct import BandedToeplitz, BMinSep, Budget, Mechanism, Poisson
from jaxacct.likelihood import rounding
from jaxacct.likelihood.loss import loss_of_scores
from jaxacct.proposals.candidates import candidates
from jaxacct.proposals.families import replica_lines
from jaxacct.proposals.threshold import budget_lines
from jaxacct.statistics.lines import total
from jaxacct.strategies.stationary import adds_windows
from tests.oracles import enumeration
from tests.proposals_by_name import family_candidates, proposal_by_name
from tests.refusals import refused
from tests.rounding_errors import _losses, _normals, _probe


def more_often(scheme, times):
    found = scheme.inflated(times)
    assert found is not None
    return found


SMALL = Mechanism(BMinSep(6, 2, 0.01), BandedToeplitz((2.0, 1.0)), 1.0)


def test_the_least_ratio_of_all_participation_vectors():
    for p, times in [(0.01, 2), (0.01, 20), (0.1, 5)]:
        for n, b in [(1, 1), (2, 4), (5, 1), (6, 2), (7, 3)]:
            for warm in [True, False]:
                scheme = BMinSep(n, b, p, warm)
                more, log_ratio = more_often(scheme, times)
                assert more == BMinSep(n, b, times * p, warm)
                distribution = enumeration.pattern_distribution(scheme)
                other = enumeration.pattern_distribution(more)
                least = min(math.log(other[x] / distribution[x]) for x in distribution if any(x))
                assert log_ratio <= least
                # Exact where a vector passes up every other chance.
                assert b > 1 or log_ratio == pytest.approx(least, abs=1e-9)
                assert scheme.inflated(math.floor(0.5 / p) + 1) is None
    assert Poisson(5, 0.01).inflated(2) is None


def exact_scale(mechanism, m, times, epsilon) -> float:
    """The largest weighted term that the minorant `g >= P0' + c (f - P0)` allows, on a grid of f."""
    proposal = proposal_by_name(mechanism, epsilon, "remove", f"replicas:{m},{times}")
    scheme = mechanism.scheme
    more, log_ratio = more_often(scheme, times)
    none, inflated_none = (math.exp(one.log_probability_of_none()) for one in (scheme, more))
    alpha = math.exp(epsilon)
    f = alpha + np.geomspace(1e-4, 1e4, 4000)
    g = inflated_none + math.exp(log_ratio) * (f - none)
    return float(np.max(math.exp(proposal.log_normalizer) * (f - alpha) / g**m))


@pytest.mark.parametrize(("m", "times", "epsilon"), [(2, 2, 0.1), (4, 8, 0.02), (6, 8, 1.0), (4, 20, 3.0)])
def test_the_scale_is_the_largest_term_that_the_minorant_allows(m, times, epsilon):
    proposal = proposal_by_name(SMALL, epsilon, "remove", f"replicas:{m},{times}")
    largest = exact_scale(SMALL, m, times, epsilon)
    assert largest <= math.exp(proposal.log_scale) <= largest * (1 + 1e-3)
    assert proposal.scale_at is not None
    assert proposal.scale_at(epsilon) == proposal.log_scale > proposal.scale_at(epsilon + 0.1)


def test_losses_of_both_keep_the_minorant_and_the_lower_bound(x64):
    """Wherever outputs are: `g >= P0' + c (f - P0)`, and g >= r f, which the reserved outputs depend on."""
    generator = np.random.default_rng(2)
    scores = generator.normal(size=(4000, 6)) * generator.choice([0.5, 3.0, 10.0], size=(4000, 1))
    more, log_ratio = more_often(SMALL.scheme, 8)
    f, g = (
        np.exp(np.asarray(loss_of_scores(one, SMALL.strategy, scores, 1.0))) for one in (SMALL.scheme, more)
    )
    none, inflated_none = (math.exp(one.log_probability_of_none()) for one in (SMALL.scheme, more))
    assert (g >= (inflated_none + math.exp(log_ratio) * (f - none)) * (1 - 1e-12)).all()
    assert (g >= min(math.exp(log_ratio), inflated_none / none) * f * (1 - 1e-12)).all()
    assert (g < (inflated_none + 1.3 * math.exp(log_ratio) * (f - none))).any()  # a larger c would be wrong


def test_few_samples_where_participation_is_rare():
    """A tenth of the scale of ordinary replicas; `conformance` has the divergence."""
    epsilon, budget = 0.3, Budget.split(1e-5)
    found = candidates(SMALL, epsilon, "remove", budget)
    chosen, predicted = found[0].proposal, {each.proposal.name: each.predicted_samples for each in found}
    assert chosen.name == "replicas:4,8" and predicted[chosen.name] < 60_000
    ordinary = proposal_by_name(SMALL, epsilon, "remove", "replicas:4")
    assert chosen.log_scale < ordinary.log_scale - math.log(10)
    assert min(count for name, count in predicted.items() if "," not in name) > predicted[chosen.name]
    again = proposal_by_name(SMALL, epsilon, "remove", chosen.name)
    assert (again.name, again.log_scale) == (chosen.name, chosen.log_scale)


def test_what_is_booked_covers_both_losses(key):
    """Float32 against float64 of the same normals and counts: L, and `L - m L'` of the weights."""
    m, times = 4, 8
    proposal = proposal_by_name(SMALL, 0.3, "remove", f"replicas:{m},{times}")
    lines = {line.name: line for line in budget_lines(proposal, 1e-5)}
    margin = total(tuple(lines.values()), "epsilon")
    weight = math.log1p(lines["float32 weights, with the loss at the inflated probability"].amount)
    more, _ = more_often(SMALL.scheme, times)
    normals = _normals(key, SMALL.strategy, more.iterations)
    (counts, _), _ = _probe(key, None, more, m)

    def both(dtype):
        drawn = tuple(np.asarray(part, dtype) for part in normals), np.asarray(counts, dtype)
        given = SMALL.strategy, dtype(1), *drawn, None
        return [np.asarray(_losses(loss_of_scores, one, *given)) for one in (SMALL.scheme, more)]

    loss, other = both(np.float32)
    with jax.enable_x64(True):
        exact, exact_other = both(np.float64)
    assert 0 < np.max(np.abs(loss - exact)) < margin
    assert np.max(np.abs((loss - m * other) - (exact - m * exact_other))) < weight
    # Each of m times L' has an error of about as much as L.
    assert weight > m * margin


def sizes_at(mechanism, times, m, monkeypatch, log_ratio=None):
    """The `Size` of the loss at the inflated probability, at a share of 2^-20, and the mechanism there."""
    found, scheme = [], mechanism.scheme
    more, least = more_often(scheme, times)
    ratio = least if log_ratio is None else log_ratio
    with monkeypatch.context() as patch:
        patch.setattr(type(scheme), "inflated", lambda self, times: (more, ratio))
        kept = rounding.bounded
        patch.setattr(
            rounding,
            "bounded",
            lambda at, m, size_of: found.append(size_of(2.0**-20)) or kept(at, m, size_of),
        )
        replica_lines.inflated_lines.cache_clear()
        replica_lines.inflated_lines(mechanism, times, m, 2.0, 1e-5)
        replica_lines.inflated_lines.cache_clear()
    return found[0], Mechanism(more, mechanism.strategy, mechanism.noise_multiplier)


def test_few_participations_are_booked_as_they_are_added(monkeypatch):
    """By a transform in draws of another example; others add so few as windows, which round less."""
    long = Mechanism(BMinSep(7200, 8, 2e-5), BandedToeplitz((2.0, 1.0, 0.5)), 1.0)
    assert adds_windows(long.scheme, long.strategy, 4)
    size, _ = sizes_at(long, 3, 4, monkeypatch)
    windows = dataclasses.replace(size, transformed=False)
    errors = [rounding._score_error(long, 4, one, 1.0, 1) for one in (windows, size)]
    assert errors[0] < 0.9 * errors[1]


def test_vectors_that_count_are_ruled_out_under_the_target_distribution(monkeypatch):
    """`P'(> k) / r`, not P'(> k): with a smaller r more participations count."""
    mechanism = Mechanism(BMinSep(60, 2, 0.001), BandedToeplitz((2.0, 1.0)), 1.0)
    (many, busy), (most, _) = (sizes_at(mechanism, 8, 4, monkeypatch, r) for r in (0.0, -40.0))
    assert 1 < many.count < most.count < mechanism.scheme.max_participations
    allowed = math.log(1e-3 * 1e-5) + math.log(2.0**-20) - 40.0
    assert rounding.log_count_tail(busy.scheme, most.count + 1) <= allowed


def test_names_and_numbers_that_there_are_not():
    poisson = Mechanism(Poisson(6, 0.01), BandedToeplitz.identity(), 1.0)
    line = "is not available for this mechanism"
    for mechanism, name in ((SMALL, "replicas:9,2"), (poisson, "replicas:2,2"), (SMALL, "replicas:3")):
        refused(f"proposal {name} {line}", proposal_by_name, mechanism, 1.0, "remove", name)
    for name in ("replicas:2,1", "replicas:2,33", "replicas:2,3,4", "replicas"):
        refused(r"proposal must be replicas:1\.\.48,2\.\.32", proposal_by_name, SMALL, 1.0, "remove", name)
    frequent = Mechanism(BMinSep(6, 2, 0.3), BandedToeplitz((2.0, 1.0)), 1.0)
    assert all(len(p.spec.parameters) == 1 for p in family_candidates("replicas", frequent, 1.0))
