"""Real batches: participation and truncation against their distributions, batch sizes, resuming."""

import collections

import numpy as np
import pytest
from scipy import stats

from jaxacct import BalancedMinSep, BallsInBins, BMinSep, CyclicPoisson, EpochwiseAllocation
from jaxacct.schemes import MultiAttribution, Poisson, TruncatedBMinSep
from tests.oracles import enumeration
from tests.oracles.chi_square import chi_square_p_value
from tests.oracles.settings import SMALL
from tests.refusals import refused
from train.batches.sampler import BatchOverflowError, Sampler

FALSE_ALARM = 1e-6
KEY = (1, 2, 3, 4)


def participation(scheme, size: int, key=KEY, most=None) -> np.ndarray:
    """(size, iterations): who was in which batch of one run."""
    sampler = Sampler(scheme, size, most or size, key)
    drawn = np.zeros((size, scheme.iterations), np.int64)
    for step in range(scheme.iterations):
        members = sampler.next()
        assert len(set(members.tolist())) == len(members)
        drawn[members, step] += 1
    return drawn


ALONE = [s for s, _ in SMALL if not isinstance(s, MultiAttribution)]


FIXED_COUNTS = [BalancedMinSep(8, 3, 2), EpochwiseAllocation(8, 3, 2)]


def test_each_example_follows_the_accounted_distribution():
    """Examples are independent, so one run of many is a sample; false alarm 1e-6."""
    for scheme in ALONE + FIXED_COUNTS:
        drawn = participation(scheme, 40_000)
        assert chi_square_p_value(drawn, enumeration.pattern_distribution(scheme)) > FALSE_ALARM


def test_refused():
    """An overfull batch, more steps than the scheme has, another replay, and bad sizes."""
    sampler = Sampler(Poisson(5, 0.5), 100, 20, KEY)
    with pytest.raises(BatchOverflowError, match="raise max_batch_size"):
        sampler.next()
    sampler = Sampler(Poisson(1, 0.5), 10, 10, KEY)
    sampler.next()
    refused("1 steps", sampler.next)
    part = Sampler(Poisson(5, 0.5), 10, 10, KEY)
    part.next()
    refused("does not replay", Sampler, Poisson(5, 0.4), 10, 10, state=part.state)
    for name, value in (("dataset_size", 0), ("dataset_size", 2.5), ("max_batch_size", -1)):
        refused(name, Sampler, Poisson(5, 0.1), **{"dataset_size": 10, "max_batch_size": 10} | {name: value})


def test_a_resumed_sampler_goes_on_with_the_same_batches():
    schemes = [Poisson(30, 0.1), BallsInBins(30, 4), CyclicPoisson(30, 4, 0.3), BMinSep(30, 4, 0.3)]
    for scheme in [*schemes, BalancedMinSep(30, 4, 2.5), EpochwiseAllocation(30, 7, 4)]:
        whole = Sampler(scheme, 300, 300, KEY)
        batches = [whole.next() for _ in range(30)]
        for stop in (0, 1, 17, 30):
            part = Sampler(scheme, 300, 300, KEY)
            for _ in range(stop):
                part.next()
            resumed = Sampler(scheme, 300, 300, state=part.state)
            for batch in batches[stop:]:
                np.testing.assert_array_equal(resumed.next(), batch)
            assert resumed.state == whole.state


def test_truncation_keeps_every_example_alike():
    """Ten of a first batch stay, whichever their number; counts vary less than independent ones (1e-6)."""
    scheme = TruncatedBMinSep(1, 1, 0.5, max_batch_size=10, dataset_size=20)
    counts, full = np.zeros(20), 0
    for i in range(500):
        batch = Sampler(scheme, 20, 10, key=(i, 2, 3, 4)).next()
        counts[batch] += 1
        full += len(batch) == 10
    assert full > 200 and stats.chisquare(counts).pvalue > 1e-6


@pytest.mark.parametrize(
    "scheme", [BMinSep(6, 3, 0.3), CyclicPoisson(6, 3, 0.5), Poisson(4, 0.4), EpochwiseAllocation(5, 3, 2)]
)
def test_examples_are_independent(scheme):
    """Pairs of examples among a hundred: the distribution of both vectors is the product; false alarm 1e-6.

    8,000 pairs in 160 runs of 50, as examples that follow each other are drawn. Two examples alone, which
    tell batches of a fixed size, are in `conformance/test_registry.py`.
    """
    distribution = enumeration.pattern_distribution(scheme)
    pairs = {x + y: v * w for x, v in distribution.items() for y, w in distribution.items()}
    width = 2 * scheme.iterations
    many = [participation(scheme, 100, (run, 5, 6, 7)).reshape(50, width) for run in range(160)]
    assert chi_square_p_value(np.concatenate(many), pairs) > FALSE_ALARM


@pytest.mark.parametrize(("b", "p", "warm"), [(5, 0.9, False), (40, 0.3, True)])
def test_separation_is_never_violated(b, p, warm):
    drawn = participation(BMinSep(200, b, p, warm), 500)
    for steps in map(np.flatnonzero, drawn):
        assert np.all(np.diff(steps) >= b)


def test_fresh_keys_differ_and_batches_with_them():
    drawn = {tuple(sorted(Sampler(Poisson(1, 0.5), 64, 64).next().tolist())) for _ in range(3)}
    keys = {Sampler(Poisson(1, 0.5), 64, 64).state.key for _ in range(3)}
    assert len(keys) == 3
    assert len(drawn) == 3


def test_tiny_data_sets():
    assert participation(BMinSep(9, 4, 1.0, False), 1).tolist() == [[1, 0, 0, 0, 1, 0, 0, 0, 1]]
    runs = (participation(BallsInBins(4, 4), 1, (run, 0, 0, 0)) for run in range(400))
    counts = collections.Counter(drawn.argmax() for drawn in runs)
    assert stats.chisquare([counts[i] for i in range(4)]).pvalue > FALSE_ALARM
