"""Draws of the privacy loss: batching, both directions, known deltas."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from scipy import stats

from jaxacct import BandedToeplitz, BMinSep, Mechanism, Poisson, sample_privacy_loss
from jaxacct.kernels.randomness import BLOCK_SIZE
from jaxacct.proposals import base
from jaxacct.statistics.hockey_stick import weighted_terms
from tests.draws import draws_of
from tests.oracles import enumeration
from tests.oracles.settings import PRODUCTION, few_in_ci, slow
from tests.proposals_by_name import proposal_by_name
from tests.refusals import refused

FALSE_ALARM = 1e-6
Z = stats.norm.isf(FALSE_ALARM / 2)


def hockey_stick_terms(losses, direction, epsilon):
    sign = 1 if direction == "remove" else -1
    return np.maximum(0, -np.expm1(epsilon - sign * np.asarray(losses, float)))


@functools.lru_cache
def _pld(sigma, p, n):
    # Of the default of 1e-4 it takes four times as long, and deltas are within 3e-4 of themselves.
    accountant = PLDAccountant(value_discretization_interval=5e-4)
    return accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(p, GaussianDpEvent(sigma)), n))._pld


def pld_distribution(sigma, p, n, direction):
    """dp-accounting's distribution of the privacy loss of Poisson-sampled Gaussians in one direction."""
    return {"remove": _pld(sigma, p, n)._pmf_remove, "add": _pld(sigma, p, n)._pmf_add}[direction]


def pld_delta(sigma, p, n, epsilon, direction):
    """Its delta."""
    return float(pld_distribution(sigma, p, n, direction).get_delta_for_epsilon(epsilon))


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(("scheme", "bands"), few_in_ci({10, 19}))
def test_distribution_of_the_loss_against_outputs(scheme, bands, direction, key):
    """Spectral draws against outputs drawn in the time domain and scored by enumeration.

    Two-sample Kolmogorov-Smirnov at a false alarm of 1e-6. Both on the extended horizon. And no likelihood
    ratio is below the probability of no participation.
    """
    strategy, sigma, num = BandedToeplitz.square_root(bands), 0.7, 20_000
    ours = np.asarray(sample_privacy_loss(key, Mechanism(scheme, strategy, sigma), num, direction))
    if direction == "add":
        assert ours.min() >= scheme.log_probability_of_none() - 2e-5
    rng = np.random.default_rng(7)
    rows = scheme.iterations + bands - 1
    outputs = sigma * rng.normal(size=(num, rows))
    if direction == "remove":
        patterns, weights = enumeration.vectors(scheme)
        drawn = patterns[rng.choice(len(weights), size=num, p=weights)]
        outputs += drawn @ enumeration.strategy_matrix(strategy.coefficients, rows, scheme.iterations).T
    exact = enumeration.log_ratio(scheme, strategy.coefficients, sigma, outputs)
    assert stats.ks_2samp(ours, exact).pvalue > FALSE_ALARM


@pytest.mark.parametrize(("draws", "blocks"), [(4_096, 8), slow(60_000, 128)])
def test_the_production_deltas(draws, blocks, key):
    """delta(1) = 5.97e-3 and delta(2) = 3.2e-4 at sigma 0.47 (proofs/derivations.md, 7; 245,760 samples of a
    peer); and blocks of two replicas say the same, with less noise.
    """
    mechanism = Mechanism(PRODUCTION, BandedToeplitz.square_root(256), 0.47)
    losses = np.asarray(sample_privacy_loss(key, mechanism, draws), float)
    assert np.all(np.isfinite(losses))
    bounded = proposal_by_name(mechanism, 2.0, "remove", "replicas:2")
    of_replicas = draws_of(bounded, base.direction_key(key, "remove"), blocks)
    for epsilon, published in ((1.0, 5.97e-3), (2.0, 3.2e-4)):
        terms = hockey_stick_terms(losses, "remove", epsilon)
        ours, theirs = terms.std() / np.sqrt(terms.size), terms.std() / np.sqrt(245_760)
        assert abs(terms.mean() - published) < Z * np.hypot(ours, theirs)
        weighted = weighted_terms(of_replicas, "remove", epsilon)
        error = np.hypot(ours, weighted.std() / np.sqrt(weighted.size))
        assert abs(terms.mean() - weighted.mean()) < Z * error
        assert weighted.std() < terms.std()
    assert losses.mean() == pytest.approx(0.05, abs=Z * 0.37 / np.sqrt(losses.size) + 0.01)
    assert losses.std() == pytest.approx(0.37, abs=0.02)


# Of the settings whose distribution is compared above: the same programs.
MECHANISM = Mechanism(BMinSep(12, 3, 0.3), BandedToeplitz.square_root(3), 0.8)


def test_batches_do_not_matter(key):
    proposal = base.plain(MECHANISM, "remove")
    stream = base.direction_key(key, "remove")
    whole = proposal.draw(stream, 0, base.blocks_at_once(MECHANISM)).loss
    parts = np.concatenate([proposal.draw(stream, first, 1).loss for first in range(8)])
    # Same draws; XLA may round differently for another batch shape.
    np.testing.assert_allclose(parts, whole[: 8 * BLOCK_SIZE], atol=2e-6)
    batches = np.concatenate([b.loss for b in base.draw_in_batches(proposal, stream, 2, 6)])
    np.testing.assert_allclose(batches, whole[2 * BLOCK_SIZE : 8 * BLOCK_SIZE], atol=2e-6)
    few = sample_privacy_loss(key, MECHANISM, 100)
    np.testing.assert_allclose(few, whole[:100].astype(np.float32), atol=2e-6)


def test_blocks_and_directions_are_independent(key):
    remove = np.asarray(sample_privacy_loss(key, MECHANISM, 4 * BLOCK_SIZE))
    add = np.asarray(sample_privacy_loss(key, MECHANISM, 4 * BLOCK_SIZE, "add"))
    blocks = [*remove.reshape(4, -1), *add.reshape(4, -1)]
    bound = stats.norm.isf(FALSE_ALARM / 56) / np.sqrt(BLOCK_SIZE)
    assert np.abs(np.corrcoef(np.array(blocks))[~np.eye(8, dtype=bool)]).max() < bound


@pytest.mark.parametrize("sigma", [0.05, 100.0])
def test_finite_at_extreme_noise(sigma, key):
    for scheme, bands, direction in (
        (BMinSep(12, 3, 0.9), 3, "remove"),
        (BMinSep(12, 3, 0.9), 3, "add"),
        (Poisson(8, 1e-6), 1, "remove"),
        (BMinSep(12, 3, 1e-6), 3, "remove"),
    ):
        mechanism = Mechanism(scheme, BandedToeplitz.square_root(bands), sigma)
        assert np.all(np.isfinite(np.asarray(sample_privacy_loss(key, mechanism, 256, direction))))


def test_float64(x64, key):
    mechanism = Mechanism(Poisson(8, 0.2), BandedToeplitz((1.0,)), 0.8)
    assert sample_privacy_loss(key, mechanism, 10, dtype=jnp.float64).dtype == jnp.float64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 0}, "num_samples must be an integer of at least 1, got 0"),
        ({"direction": "both"}, "direction must be one of remove, add, got 'both'"),
        ({"dtype": jnp.float64}, "dtype float64 needs jax_enable_x64"),
    ],
)
def test_bad_input(change, message, key):
    refused(message, sample_privacy_loss, key, MECHANISM, **{"num_samples": 5} | change)


def test_blocks_side_by_side_fit_a_cache():
    """Four of 1024 steps take a fifth less time than eight; 1 and 2 are other programs, so other bits."""
    at = {n: base.blocks_side_by_side(n) for n in (64, 511, 512, 1024, 2048, 2049, 4096, 7200, 10**6)}
    assert at == {64: 128, 511: 16, 512: 4, 1024: 4, 2048: 4, 2049: 3, 4096: 2, 7200: 1, 10**6: 1}
