"""Every kind of proposal through one table of requirements, against exact divergences of two steps.

A new proposal shows up in `candidates`; the test fails until its kind is in `KINDS`.
"""

import dataclasses
import functools
import math

import numpy as np
import pytest

import jaxacct as ja
from jaxacct.core.check import _fit_together
from jaxacct.kernels import randomness
from jaxacct.proposals import base
from jaxacct.proposals.candidates import candidates
from jaxacct.proposals.registry import FAMILIES
from jaxacct.proposals.threshold import Resolved
from jaxacct.statistics import bounds, hockey_stick
from tests.conformance.test_schemes import IDENTITY, quadrature
from tests.draws import divergence_interval, draws_of
from tests.oracles.settings import slow
from tests.oracles.tuples import two_step_delta
from tests.proposals.test_independent_truncation import exact_divergence

FALSE_ALARM = 1e-6 / 20  # of each interval
BLOCKS = 64
REMOVE, ADD = ("remove",), ("add",)
# Each kind with the directions that it is offered in.
KINDS = {
    "plain": REMOVE + ADD,
    "replicas": REMOVE,
    "replicas where columns overlap": REMOVE,
    "replicas of more than two vectors": REMOVE,
    "replicas of one of a user's examples": REMOVE,
    "replicas at an inflated probability": REMOVE,
    "joint-replicas": REMOVE,
    "truncated": REMOVE + ADD,
}
EACH = [(direction, name) for name, directions in KINDS.items() for direction in directions]
MECHANISMS = [
    ja.Mechanism(ja.BMinSep(2, 2, 0.4), IDENTITY, 0.8),
    ja.Mechanism(ja.BMinSep(2, 2, 0.04), IDENTITY, 0.8),
    ja.Mechanism(ja.Poisson(2, 0.3), IDENTITY, 2.0),
    ja.Mechanism(ja.BMinSep(2, 2, 0.04), IDENTITY, 0.25),
    ja.Mechanism(ja.IndependentAttribution(2, 2, 0.3, 2), IDENTITY, 2.0),
    ja.Mechanism(ja.MultiAttribution(2, 2, 0.3, 2), IDENTITY, 2.0),
    ja.Mechanism(ja.Poisson(2, 0.3), ja.Toeplitz((0.8, 0.6)), 2.0),
    ja.Mechanism(
        ja.TruncatedBMinSep(2, 2, 0.4, 10, 10), IDENTITY, 2.0
    ),  # never cut, for the exact value of "add"
    ja.Mechanism(ja.TruncatedBMinSep(2, 2, 0.4, 4, 10), IDENTITY, 2.0),
]
EPSILONS = (0.2, 3.0)


def kind(proposal) -> str:
    spec, mechanism = proposal.spec, proposal.mechanism
    if spec.family != "replicas":
        return spec.family
    if mechanism.is_upper_bound:
        return "replicas where columns overlap"
    if mechanism.scheme.parts is not None:
        return "replicas of one of a user's examples"
    if len(spec.parameters) > 1:
        return "replicas at an inflated probability"
    return "replicas of more than two vectors" if spec.parameters[0] > 2 else "replicas"


def offered():
    for mechanism in MECHANISMS:
        for epsilon in EPSILONS:
            for direction in ("remove", "add"):
                for candidate in candidates(mechanism, epsilon, direction, ja.Budget.split(1e-6)):
                    yield mechanism, epsilon, direction, candidate.proposal


@functools.cache
def one_of_each() -> dict:
    """By direction and kind: an epsilon and a proposal. In seconds, so not while tests are collected."""
    chosen = {}
    for _, epsilon, direction, proposal in offered():
        chosen.setdefault((direction, kind(proposal)), (epsilon, proposal))
    return chosen


def test_every_kind_is_offered_and_known():
    assert set(one_of_each()) == set(EACH)
    assert set(FAMILIES) <= {*KINDS}


def bound_of_overlapping_columns(mechanism, epsilon: float) -> float:
    """`E_P (1 - e^epsilon / f+)_+` of two Poisson-sampled steps, with all rows of both columns."""
    p, sigma = mechanism.scheme.sampling_probability, mechanism.noise_multiplier
    gram = mechanism.strategy.gram(np.array([1.0, 0.0]))[np.array([[0, 1], [1, 0]])]
    outputs, chances = quadrature(sigma)
    ratios = np.exp((outputs @ np.linalg.cholesky(gram).T - 0.5) / sigma**2)
    above = (1 - p + p * ratios).prod(axis=1)
    exact = above - p**2 * ratios.prod(axis=1) * -math.expm1(-gram[0, 1] / sigma**2)
    return float(chances @ (exact * np.maximum(1 - math.exp(epsilon) / above, 0)))


@pytest.mark.parametrize(("direction", "name"), EACH)
def test_requirements(direction, name):
    """Bounded terms, the exact divergence in a rigorous interval, draws a function of key and block."""
    epsilon, proposal = one_of_each()[direction, name]
    mechanism = proposal.mechanism
    if proposal.of_a_bound or mechanism.scheme.side_information:  # and not of the pair itself
        divergence = exact_divergence(mechanism, epsilon, direction)
    elif mechanism.is_upper_bound:
        divergence = bound_of_overlapping_columns(mechanism, epsilon)
    else:
        divergence = two_step_delta(mechanism.scheme, (1.0,), mechanism.noise_multiplier, epsilon, direction)
    assert proposal.relative_error >= 0 and proposal.total_variation >= 0
    key = randomness.key_from_words([3, 4])
    draws = draws_of(proposal, key, BLOCKS)
    assert draws.loss.dtype == np.float64 and draws.loss.shape == (BLOCKS * randomness.BLOCK_SIZE,)
    later = proposal.draw(key, 3, base.blocks_at_once(mechanism))
    shared = slice(3 * randomness.BLOCK_SIZE, 3 * randomness.BLOCK_SIZE + later.loss.size)
    np.testing.assert_array_equal(draws.loss[shared], later.loss)
    np.testing.assert_array_equal(draws.log_weight[shared], later.log_weight)
    resolved = Resolved(proposal, epsilon, hockey_stick.hockey_stick, (), 0.5)
    counted = bounds.bin_terms(resolved.terms(draws, 1e-3)), hockey_stick.bin_losses(draws.loss)
    assert counted[0][1:].any() and _fit_together(resolved, 1e-3, *counted), "a plan would be refused"
    low, high = divergence_interval(proposal, draws, epsilon, FALSE_ALARM)
    assert low <= divergence <= high


@pytest.mark.parametrize("name", [slow("plain"), "replicas:2"])
def test_another_noise_multiplier_does_not_recompile(name, traced_once):
    """The same kind of proposal at another noise multiplier is the same program."""
    traced_once(base.draw_blocks)
    for sigma in (0.8, 0.9):
        mechanism = dataclasses.replace(MECHANISMS[0], noise_multiplier=sigma)
        found = candidates(mechanism, 0.2, "remove", ja.Budget.split(1e-6))
        proposal = next(c.proposal for c in found if c.proposal.name == name)
        draws_of(proposal, randomness.key_from_words([1, 2]), 1)
