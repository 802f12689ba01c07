"""Calls of functions that are tested themselves: what they are asked for, and what becomes of the answer."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxacct import BandedToeplitz, Mechanism, Poisson, TruncatedBMinSep, privacy_profile
from jaxacct.core.check import Outcome
from jaxacct.estimates import estimate
from jaxacct.verification import replay as again
from tests.stored_plans import whole


def test_a_replay_is_accepted_where_its_own_draws_prove_the_claim(monkeypatch):
    """What is drawn again decides, by the check of its direction."""
    checked = []

    def refused(claim, direction, side, evidence):
        checked.append((direction, side.num_samples))
        return dataclasses.replace(real(claim, direction, side, evidence), outcome=Outcome.MEAN_ABOVE)

    real, plan = again.check_direction, whole("plain")
    assert all(one.accepted for one in again.replay(plan))
    monkeypatch.setattr(again, "check_direction", refused)
    assert [one.accepted for one in again.replay(plan) if one.drawn] == [False] * len(checked)
    assert checked


@pytest.mark.parametrize("proposal", [None, "plain"])
def test_a_plan_is_verified_by_the_proposal_that_is_asked_for(proposal):
    plan = whole("replicas")
    stored = plan.verdict.remove.proposal
    assert stored != "plain"
    found = plan.verify(proposal=proposal, max_samples=2048, key=jax.random.key(0))
    assert found.remove is not None and found.remove.proposal == (proposal or stored)


@pytest.mark.parametrize(
    "scheme", [Poisson(4, 0.9), TruncatedBMinSep(3, 4, 0.5, 4, 9)], ids=["poisson", "truncated"]
)
def test_bands_of_a_profile_share_their_failure_probability(scheme, monkeypatch):
    """All intervals of all directions that are drawn fail with at most 1 - confidence together."""
    spent = []

    def bands(chosen, grid, draw, q):
        spent.append(q * len(grid))
        return np.tile([[0.0], [0.0], [0.5]], len(grid))

    monkeypatch.setattr(estimate.interval, "bands_of_both", bands)
    mechanism = Mechanism(scheme, BandedToeplitz.identity(), 1.0)
    privacy_profile(mechanism, [0.1, 0.5, 1.0, 2.0], confidence=0.9, num_samples=10)
    assert len(spent) >= len(mechanism.directions)
    assert sum(spent) == pytest.approx(0.1, rel=1e-12)
