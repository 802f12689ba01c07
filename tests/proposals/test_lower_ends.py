"""Lower ends of estimates: exact losses have weights rounded down; bounded losses have none."""

import jax
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.estimates import estimate, interval
from jaxacct.estimates.interval import for_lower_ends
from jaxacct.kernels.likelihoods.interacting_recurrence import numbers_kept
from jaxacct.proposals.families import replicas
from jaxacct.proposals.families.pair_weights import log_factor, rounds
from jaxacct.proposals.threshold import budget_lines
from jaxacct.schemes.users import independent_attribution
from jaxacct.statistics.lines import total
from tests.proposals_by_name import proposal_by_name

P = 0.3


def bounded(examples: int, sigma: float, monkeypatch) -> ja.Mechanism:
    """As if the tables of the likelihood of more than two, or of any, did not fit."""
    monkeypatch.setattr(independent_attribution, "MAX_NUMBERS", numbers_kept(2, 2, False) * (examples > 2))
    mechanism = ja.Mechanism(
        ja.IndependentAttribution(2, 2, P, examples, False), ja.BandedToeplitz.identity(), sigma
    )
    assert mechanism.is_upper_bound and (mechanism.scheme.pair_bound is not None) == (examples > 2)
    return mechanism


def test_weights_that_are_rounded_up_have_others_for_lower_ends(monkeypatch):
    """Of replicas in pairs, of exact losses: a lower end of their own weights would be too high."""
    mechanism = ja.Mechanism(ja.BMinSep(4, 2, P), ja.BandedToeplitz.identity(), 1.0)
    distribution, asked = proposal_by_name(mechanism, 1.0, "remove", "replicas:4"), []
    monkeypatch.setattr(replicas, "log_factor", lambda *args: asked.append(args[3]) or log_factor(*args))
    lower = for_lower_ends(distribution)
    assert lower.log_scale == distribution.log_scale and lower.rounded_down is None
    scheme, strategy, key = mechanism.scheme, mechanism.strategy, jax.random.key(0)
    for one in (distribution, lower):
        jax.eval_shape(
            lambda key, one=one: one.draw_block(key, scheme, strategy, 1.0, one.tables(), np.float32), key
        )
    assert asked == [1, -1]
    plain = proposal_by_name(mechanism, 1.0, "remove", "plain")
    assert for_lower_ends(plain) is plain


def test_each_end_is_of_its_own_draws(monkeypatch):
    """The upper end of weights rounded up, the lower one of those rounded down."""
    mechanism, grid = ja.Mechanism(ja.BMinSep(4, 2, P), ja.BandedToeplitz.identity(), 1.0), np.array([1.0])
    chosen, asked = proposal_by_name(mechanism, 1.0, "remove", "replicas:4"), []
    lower = for_lower_ends(chosen)
    ends = {chosen: (0.3, 0.4, 0.5), lower: (0.2, 0.3, 0.45)}
    monkeypatch.setattr(interval, "bands", lambda drawn, *_: np.array(ends[drawn.chosen])[:, None])
    found = interval.bands_of_both(chosen, grid, lambda one: asked.append(one), 0.1)
    np.testing.assert_array_equal(found[:, 0], [0.2, 0.4, 0.5])
    assert asked == [chosen, lower]


def test_weights_are_rounded_down():
    """The exact factor, in float64 from its formula, is between both."""
    factor_of = jax.jit(log_factor, static_argnums=(1, 2, 3))
    m, shared = 4, np.random.default_rng(0).uniform(0, 3, (4, 4, 50)).astype(np.float32)
    shared += shared.swapaxes(0, 1)
    up, down = (np.asarray(factor_of(shared, 2, 3, side), np.float64) for side in (1, -1))
    meet, own = rounds(m, 2)
    aligned, apart = ((m - 1) * np.einsum("lij,ijt->lt", meet, shared), np.einsum("lij,ijt->lt", own, shared))
    factor = aligned.sum(axis=0) / (m - 1) - np.log(np.exp(aligned).mean(axis=0))
    factor += np.log(np.exp(-apart).mean(axis=0))
    assert (down < factor).all() and (factor < up).all() and (up - down < 1e-3).all()


@pytest.mark.parametrize("examples", [2, 4])
def test_losses_that_are_bounded_have_no_lower_end(examples, monkeypatch):
    """Attack: as if they were exact, an interval could lie above the divergence. Low is 0 instead."""
    mechanism = bounded(examples, 0.9 if examples == 2 else 1.6, monkeypatch)
    for name in ["plain", "replicas:1", "replicas:6"] if examples > 2 else ["plain", "replicas:4"]:
        assert for_lower_ends(proposal_by_name(mechanism, 1.0, "remove", name)) is None
    if examples == 2:
        plain = proposal_by_name(mechanism, 0.2, "remove", "plain")
        monkeypatch.setattr(estimate, "proposals_at", lambda *_, **__: [plain])  # fewer programs
        options = dict(num_samples=2048, key=jax.random.key(2))
        found = ja.estimate_delta(mechanism, 0.2, **options)
        assert found.low == 0 < found.value < found.high
        found = ja.estimate_epsilon(mechanism, found.high, **options)
        assert found.low == 0 < found.value <= found.high


def test_losses_by_pairs_cost_more(monkeypatch):
    by_pairs = bounded(4, 1.6, monkeypatch)
    assert estimate.best_proposal(by_pairs, 0.2, "remove", None, None).name == "replicas:1"
    (alone, pairs) = (proposal_by_name(by_pairs, 0.2, "remove", name) for name in ("plain", "replicas:1"))
    booked = [total(budget_lines(distribution, 1e-9), "epsilon") for distribution in (alone, pairs)]
    assert booked[0] < booked[1] < 3 * booked[0] and alone.relative_error == pairs.relative_error > 0
