"""A search is continued only by a call whose answer it is: every argument of `calibrate` names it."""

from types import SimpleNamespace
from typing import Any

import dp_accounting
import jax
import pytest

from jaxacct import BandedToeplitz, BMinSep
from jaxacct.calibration import route
from jaxacct.calibration.pilots import Pilots
from tests.calibrating import calibrate

COMMON: dict[str, Any] = dict(scheme=BMinSep(12, 3, 0.3), strategy=BandedToeplitz.square_root(3))
CALLS: dict[str, dict[str, Any]] = {
    "noise multiplier": COMMON | dict(epsilon=1.0, delta=1e-2),
    "epsilon": COMMON | dict(noise_multiplier=1.9, delta=1e-2),
    "delta": COMMON | dict(noise_multiplier=1.9, epsilon=1.0),
}
EVENT = dp_accounting.GaussianDpEvent(20.0)
CHANGES: list[dict[str, Any]] = [
    dict(scheme=BMinSep(12, 4, 0.25)),
    dict(strategy=BandedToeplitz((1.0, 0.2))),
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
            calibrate(**arguments, checkpoint_dir=tmp_path, key=jax.random.key(0))
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
    assert state_of(call | dict(compose_with=dp_accounting.GaussianDpEvent(21.0))) is SearchedError
