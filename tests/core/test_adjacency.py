"""Which pair dominates for which adjacency (proofs/adjacency.md): the adversary searches for a worse one."""

import itertools

import numpy as np
import pytest
from scipy import stats

import jaxacct as ja
from tests.draws import drawn_by
from tests.oracles.enumeration import pattern_distribution
from tests.oracles.settings import slow
from tests.refusals import refused
from train.batches.sampler import Sampler

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
