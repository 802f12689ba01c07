"""Draws of one command are independent: no key is used for two purposes.

A recorder is put in place of `randomness.stream_key`, through which every stream of a command goes. A stream
that certifies must not be one that something was fitted to.
"""

import sys

import jax
import numpy as np
import pytest

from jaxacct import BandedToeplitz, BMinSep, Mechanism, calibrate, verify
from jaxacct.estimates.estimate import estimate_delta, estimate_epsilon
from jaxacct.kernels import randomness
from jaxacct.proposals import base

SCHEME, STRATEGY = BMinSep(24, 3, 0.05), BandedToeplitz.square_root(3)


@pytest.fixture
def purposes(monkeypatch):
    """{words of a key: the places in the code that made it}."""
    found: dict[tuple, set] = {}
    made = randomness.stream_key

    def recorded(key, stream):
        derived = made(key, stream)
        frame = sys._getframe(1)
        place = frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno
        found.setdefault(tuple(randomness.key_words(derived)), set()).add(place)
        return derived

    monkeypatch.setattr(randomness, "stream_key", recorded)
    return found


MECHANISM = Mechanism(SCHEME, STRATEGY, 1.5)
COMMANDS = {
    "verify": lambda key: verify(Mechanism(SCHEME, STRATEGY, 2.0), 1.0, 1e-2, key=key),
    "calibrate": lambda key: calibrate(SCHEME, STRATEGY, epsilon=1.0, delta=1e-2, key=key),
    "estimate delta": lambda key: estimate_delta(MECHANISM, 1.0, num_samples=12_800, key=key),
    "estimate epsilon": lambda key: estimate_epsilon(MECHANISM, 1e-2, num_samples=12_800, key=key),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n != "verify" else ()) for n in COMMANDS]
)
def test_no_key_has_two_purposes(name, purposes, key):
    COMMANDS[name](key)
    assert purposes, "nothing was recorded"
    shared = {words: places for words, places in purposes.items() if len(places) > 1}
    assert not shared, shared
    assert tuple(randomness.key_words(key)) not in purposes  # no stream is the command's key itself


def test_streams_of_a_run_are_numbered_apart(key):
    """All numbers of `Stream` and `SearchStream`, with both directions: different keys under one key."""
    for kind in (randomness.Stream, randomness.SearchStream):
        keys = {tuple(randomness.key_words(randomness.stream_key(key, int(stream)))) for stream in kind}
        assert len(keys) == len(list(kind))
    directions = {
        tuple(np.asarray(jax.random.key_data(base.direction_key(key, d)))) for d in ("remove", "add")
    }
    assert len(directions) == 2
