"""Schemes: the distribution of drawn participation against enumeration, construction, bad input, JSON."""

import jax
import numpy as np
import pytest

import jaxacct as ja
from tests.oracles.chi_square import FALSE_ALARM, chi_square_p_value
from tests.oracles.settings import PRODUCTION


def test_counts_of_the_production_setting(key):
    """Counts 0..4 have probability 0.4053, 0.3777, 0.1637, 0.0438, 0.0081 (proofs/derivations.md, 7)."""
    num = 20_000
    draw = jax.jit(lambda k: PRODUCTION.draw_participation(k, 2000).sum(axis=1))
    counts = np.concatenate([np.asarray(draw(k)) for k in jax.random.split(key, num // 2000)])
    law = dict(enumerate([0.4053, 0.3777, 0.1637, 0.0438, 0.0081]))
    law[5] = 1 - sum(law.values())  # five or more
    assert chi_square_p_value(np.minimum(counts, 5)[:, None], {(j,): p for j, p in law.items()}) > FALSE_ALARM


def test_from_batch_size():
    p0 = 200 / 51_200
    scheme = ja.BMinSep.from_batch_size(
        dataset_size=51_200, batch_size=200, iterations=1024, min_separation=16
    )
    assert scheme.sampling_probability == pytest.approx(p0 / (1 - 15 * p0), rel=1e-14)
    assert scheme.participation_rate == pytest.approx(p0, rel=1e-14)
    assert scheme.warm_start
    full = ja.BMinSep.from_batch_size(dataset_size=160, batch_size=10, iterations=5, min_separation=16)
    assert full.sampling_probability == 1.0
    assert ja.Poisson.from_batch_size(dataset_size=100, batch_size=5, iterations=3) == ja.Poisson(3, 0.05)
    cyclic = ja.CyclicPoisson.from_batch_size(dataset_size=100, batch_size=5, iterations=3, cycle_length=4)
    assert cyclic == ja.CyclicPoisson(3, 4, 0.2)
    bins = ja.BallsInBins.from_batch_size(dataset_size=100, batch_size=5, iterations=3)
    assert bins == ja.BallsInBins(3, 20)
    # Never a larger batch than asked for.
    assert ja.BallsInBins.from_batch_size(dataset_size=101, batch_size=5, iterations=3).cycle_length == 21


def test_counts_of_many_examples(key):
    """Their distribution (false alarm 1e-6), and what each adds to a likelihood ratio."""
    many, some = ja.MultiAttribution(6, 2, 0.1, 20), ja.MultiAttribution(6, 2, 0.3, 3)
    steps, counts = jax.jit(lambda key: many.table.draw_counts(key, 10_000))(key)
    counts = np.asarray(counts)[np.asarray(steps) < 6]
    law = {(j,): weight for j, weight in enumerate(many.count_weights(), 1)}
    assert chi_square_p_value(counts[:, None], law) > FALSE_ALARM
    ratios = np.linspace(-3, 3, 12, dtype=np.float32).reshape(2, 6)
    joined = jax.jit(lambda x: some._any_count(x, np.float32(0.2)))(ratios)
    each = [w * np.exp(j * ratios - j * (j - 1) * 0.2) for j, w in enumerate(some.count_weights(), 1)]
    np.testing.assert_allclose(joined, np.log(sum(each)), rtol=1e-5, atol=1e-6)
