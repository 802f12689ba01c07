"""Mistakes planted into our implementation that certify a plan wrongly: the checker sees each."""

import numpy as np
import pytest

import jaxacct
from jaxacct import checker
from jaxacct.core import verify
from jaxacct.likelihood import loss as losses
from jaxacct.proposals import registry, threshold
from jaxacct.schemes.replicas import table


def _less_normalizer(monkeypatch):
    honest = table.log_normalizer
    monkeypatch.setattr(table, "log_normalizer", lambda mechanism: honest(mechanism) - 1.0)


def _twice_the_threshold(monkeypatch):
    honest = threshold.threshold
    monkeypatch.setattr(threshold, "threshold", lambda proposal, delta_v: 4 * honest(proposal, delta_v))


def _nothing_in_its_place(monkeypatch):
    """Replace-one as zero-out: the other example's outputs are those without any."""

    def without(*arguments):
        loss = losses.loss_of_scores(*arguments)
        return loss, loss

    monkeypatch.setattr(losses, "losses_of_mirrored", without)
    monkeypatch.setattr(losses, "loss_of_mirrored", losses.loss_of_scores)


FEW, EPOCHS = jaxacct.BMinSep(12, 3, 0.3), jaxacct.EpochwiseAllocation(20, 6, 3)


@pytest.mark.parametrize(
    "plant, scheme, sigma, epsilon, delta, adjacency",
    [
        (_twice_the_threshold, FEW, 2.4, 1.0, 2e-3, "zero-out"),
        (_less_normalizer, EPOCHS, 1.1, 4.0, 3.4e-4, "zero-out"),
        (_nothing_in_its_place, FEW, 2.4, 2.0, 3.8e-3, "replace-one"),
    ],
)
def test_the_checker_sees_a_mistake(plant, scheme, sigma, epsilon, delta, adjacency, monkeypatch):
    """The true divergences are 1.25 to 1.5 times delta."""
    mechanism = jaxacct.Mechanism(scheme, jaxacct.BandedToeplitz.square_root(3), sigma, adjacency)
    plant(monkeypatch)
    registry.build.cache_clear()
    verdict = verify.verify(mechanism, epsilon, delta, max_samples=200_000)
    assert verdict.certified
    plan = jaxacct.Plan(verdict.claim, verdict.evidence).to_json()
    registry.build.cache_clear()
    found = checker.check(plan, np.random.default_rng(1))
    assert found["verdict"] == "not certified"
    assert found["remove"]["verdict"] == "refuted", found
