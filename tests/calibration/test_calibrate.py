"""Calibration end to end, plans, and searches that only a call whose answer they are continues."""

import json
from types import SimpleNamespace
from typing import Any

import dp_accounting as dp
import jax
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.accountants import analytic, unamplified
from jaxacct.calibration import route
from jaxacct.calibration.grid import MIN_NOISE_MULTIPLIER, Problem, smallest_bound
from jaxacct.calibration.pilots import Pilots
from tests import calibrating
from tests.oracles.settings import slow

SMALL = ja.BMinSep.from_batch_size(dataset_size=3000, batch_size=50, iterations=60, min_separation=6)
STRATEGY = ja.BandedToeplitz.square_root(6)
TARGET = dict(epsilon=2.0, delta=2e-2)


@pytest.fixture(scope="module")
def plan():
    return ja.calibrate(SMALL, STRATEGY, **TARGET, dataset_size=3000, key=jax.random.key(3))


@pytest.mark.parametrize(("share", "draws"), [(0.95, 30_000), slow(0.97, 400_000)])
def test_the_plan_is_certified_and_near_the_truth(plan, share, draws):
    assert plan.certified
    assert plan.verdict.certified
    assert "is (2, 0.02)-differentially private" in plan.statement()
    sigma = plan.mechanism.noise_multiplier
    assert sigma == pytest.approx(1.01 ** round(np.log(sigma) / np.log(1.01)), rel=1e-12)
    assert sigma < unamplified.noise_multiplier_for(ja.Mechanism(SMALL, STRATEGY, 1.0), 2.0, 2e-2) / 5
    # A little less noise is not private: an interval at 99.9999 % clears delta.
    less = ja.Mechanism(SMALL, STRATEGY, share * sigma)
    found = ja.estimate_delta(less, 2.0, num_samples=draws, key=jax.random.key(1), confidence=1 - 1e-6)
    assert found.low > 2e-2
    at = ja.estimate_delta(
        plan.mechanism, 2.0, num_samples=draws // 4, key=jax.random.key(1), confidence=1 - 1e-6
    )
    assert at.low < 2e-2


def test_a_search_ends_where_any_noise_is_private():
    """An example that hardly ever participates: delta is larger than the probability that it does at all."""
    plan = ja.calibrate(ja.BMinSep(60, 6, 1e-7), STRATEGY, epsilon=1.0, delta=1e-3)
    assert plan.certified
    assert plan.mechanism.noise_multiplier == pytest.approx(MIN_NOISE_MULTIPLIER, rel=0.02)


def test_the_analytic_search_ends_at_the_boundary():
    """Within a hundredth of it, on the side that is certified."""
    problem = Problem(
        ja.Poisson(300, 0.01), ja.BandedToeplitz.identity(), "zero-out", epsilon=0.2, delta=1e-5
    )
    noise = smallest_bound(problem, None, 1.01)
    assert noise is not None
    at, below = (analytic.best_accountant(problem.at(each), 0.2)[1] for each in (noise, noise / 1.01))
    assert at <= 1e-5 < below


def test_composition_needs_more_noise(plan):
    other, sigma = dp.GaussianDpEvent(2.0), plan.mechanism.noise_multiplier
    options = dict(**TARGET, key=jax.random.key(4), compose_with=other)
    few = ja.CalibrationOptions(max_samples=20_000)
    with pytest.raises(ja.NotCertifiedError):
        ja.calibrate(SMALL, STRATEGY, **options, noise_multiplier=sigma, options=few)
    both = ja.calibrate(SMALL, STRATEGY, **options, noise_multiplier=2 * sigma)
    assert both.certified
    assert "composed with" in both.statement()
    assert ja.Plan.from_json(json.loads(json.dumps(both.to_json()))) == both
    with pytest.raises(ValueError, match="compose_with must leave room"):
        ja.calibrate(SMALL, STRATEGY, epsilon=0.1, delta=1e-6, compose_with=other)


def test_a_proposal_that_the_scheme_does_not_have_is_refused():
    """It was dropped in silence, and the bound released."""
    with pytest.raises(ValueError, match=r"proposal must be one of .*plain, got 'replicas:2,4'"):
        ja.calibrate(SMALL, STRATEGY, **TARGET, options=ja.CalibrationOptions(proposal="replicas:2,4"))


def test_save_load_and_verify_again(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    loaded = ja.Plan.load(path)
    assert loaded == plan
    again = loaded.verify(max_samples=2_000_000)
    assert again.certified
    assert again.evidence.remove.key != plan.evidence.remove.key


def test_one_noise_multiplier():
    good = ja.calibrate(SMALL, STRATEGY, **TARGET, noise_multiplier=2.0, key=jax.random.key(1))
    assert good.certified
    assert good.mechanism.noise_multiplier == 2.0
    with pytest.raises(ja.NotCertifiedError, match=r"noise multiplier 0.4 could not be certified .* remove"):
        ja.calibrate(SMALL, STRATEGY, **TARGET, noise_multiplier=0.4, key=jax.random.key(1))
    with pytest.raises(ValueError, match="max_samples must be at least"):
        few = ja.CalibrationOptions(proposal="plain", max_samples=10)
        ja.calibrate(SMALL, STRATEGY, **TARGET, noise_multiplier=2.0, options=few)


def test_resumes_from_a_folder(tmp_path):
    # A candidate at the edge is given up earlier.
    few = ja.CalibrationOptions(checkpoint_dir=tmp_path, max_samples=60_000)
    first = ja.calibrate(SMALL, STRATEGY, **TARGET, options=few)
    calls = []
    again = ja.calibrate(SMALL, STRATEGY, **TARGET, progress=lambda what, *_: calls.append(what), options=few)
    assert again.mechanism == first.mechanism
    # The same evidence, from the same keys, with no search and hardly a draw.
    assert again.evidence == first.evidence
    assert not [c for c in calls if c.startswith("trying")]


COMMON: dict[str, Any] = dict(scheme=ja.BMinSep(12, 3, 0.3), strategy=ja.BandedToeplitz.square_root(3))
CALLS: dict[str, dict[str, Any]] = {
    "noise multiplier": COMMON | dict(epsilon=1.0, delta=1e-2),
    "epsilon": COMMON | dict(noise_multiplier=1.9, delta=1e-2),
    "delta": COMMON | dict(noise_multiplier=1.9, epsilon=1.0),
}
EVENT = dp.GaussianDpEvent(20.0)
CHANGES: list[dict[str, Any]] = [
    dict(scheme=ja.BMinSep(12, 4, 0.25)),
    dict(strategy=ja.BandedToeplitz((1.0, 0.2))),
    dict(epsilon=1.5),
    dict(delta=2e-2),
    dict(noise_multiplier=2.5),
    dict(dataset_size=80),
    dict(dataset_size=80, max_batch_size=40),
    dict(adjacency="add-or-remove-one"),
    dict(adjacency="replace-one"),
    dict(compose_with=EVENT),
    dict(grid_ratio=1.02),
    dict(max_samples=90_000),
    dict(rule="fixed"),
    dict(proposal="plain"),
    dict(estimate=2.0),
]


class SearchedError(Exception):
    pass


class VerifiedError(Exception):
    pass


@pytest.fixture
def state_of(tmp_path, monkeypatch):
    """Whether a call goes on from the search in the folder, or makes one."""

    def searched(*_):
        raise SearchedError

    def verified(*_, **__):
        raise VerifiedError

    # Candidates below the bound are verified, of which pilots allow the third.
    monkeypatch.setattr(route, "verify_claim", verified)
    monkeypatch.setattr(route, "smallest_bound", lambda of, *_: 0.3 if of.missing == "delta" else 2.7)
    monkeypatch.setattr(
        route.Route, "_bound", lambda _, claim: SimpleNamespace(claim=claim, flaws=(), **vars(claim))
    )
    monkeypatch.setattr(route.Route, "_in_short", lambda *_: "")

    def of(arguments, store=False):
        monkeypatch.setattr(Pilots, "limit_for", (lambda *_: 10_000.0) if store else searched)
        try:
            calibrating.calibrate(**arguments, checkpoint_dir=tmp_path, key=jax.random.key(0))
        except (SearchedError, VerifiedError) as error:
            return type(error)

    return of


@pytest.mark.parametrize("what", CALLS)
def test_every_argument_names_its_search(what, state_of):
    call = CALLS[what]
    assert state_of(call, store=True) is VerifiedError
    assert state_of(call) is VerifiedError  # the same call goes on
    tried = 0
    for change in CHANGES:
        if set(change) & {"epsilon", "delta", "noise_multiplier"} - set(call):
            continue
        if "estimate" in change and what != "noise multiplier":
            continue  # where the search for a noise multiplier begins
        tried += 1
        assert state_of(call | change) is SearchedError, change
    assert tried >= 13
    assert state_of(call) is VerifiedError
    # A composition of another event.
    assert state_of(call | dict(compose_with=EVENT), store=True) is VerifiedError
    assert state_of(call | dict(compose_with=dp.GaussianDpEvent(21.0))) is SearchedError
