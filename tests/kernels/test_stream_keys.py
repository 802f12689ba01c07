"""Draws of one command are independent: no key is used for two purposes.

A recorder is put in place of `randomness.stream_key`, through which every stream of a command goes, and of
the draws of participation distributions. A stream that certifies must not be one that something was fitted
to.
"""

import sys

import jax
import numpy as np
import pytest

from jaxacct import BandedToeplitz, BMinSep, Mechanism, calibrate, verify
from jaxacct.accountants.tradeoff.generalized_dpsgd import mixture_certificate
from jaxacct.accountants.tradeoff.plan import SampledGeneralPlan
from jaxacct.estimates.estimate import estimate_delta, estimate_epsilon
from jaxacct.kernels import randomness
from jaxacct.proposals import base

SCHEME, STRATEGY = BMinSep(24, 3, 0.05), BandedToeplitz.square_root(3)
SIZES = dict(dataset_size=24, num_microbatches=2, microbatch_size=3, num_epochs=2, sampling="shuffling")


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


COMMANDS = {
    "calibrate": lambda key: calibrate(SCHEME, STRATEGY, epsilon=1.0, delta=1e-2, key=key),
    "verify": lambda key: verify(Mechanism(SCHEME, STRATEGY, 2.0), 1.0, 1e-2, key=key),
    "estimate delta": lambda key: estimate_delta(
        Mechanism(SCHEME, STRATEGY, 1.5), 1.0, num_samples=12_800, key=key
    ),
    "estimate epsilon": lambda key: estimate_epsilon(
        Mechanism(SCHEME, STRATEGY, 1.5), 1e-2, num_samples=12_800, key=key
    ),
    "general": lambda key: SampledGeneralPlan.calibrate(6.0, 1e-3, num_samples=2**15, key=key, **SIZES),
}


@pytest.mark.parametrize(
    "name",
    [
        "verify",
        "general",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("calibrate", "estimate delta", "estimate epsilon")
        ),
    ],
)
def test_no_key_has_two_purposes(name, purposes, key):
    COMMANDS[name](key)
    assert purposes, "nothing was recorded"
    shared = {words: places for words, places in purposes.items() if len(places) > 1}
    assert not shared, shared
    assert tuple(randomness.key_words(key)) not in purposes  # no stream is the command's key itself


def test_fitted_noise_and_its_certificate_have_draws_of_their_own(monkeypatch, key):
    """Keys of the blocks that each draws: with one in common a noise would be certified by what chose it."""
    blocks: dict[str, list] = {}
    drawn = mixture_certificate._block

    def recorded(distribution, stream, block):
        caller = sys._getframe(1).f_code.co_qualname.split(".")[0]
        blocks.setdefault(caller, []).append(tuple(randomness.key_words(stream)))
        return drawn(distribution, stream, block)

    monkeypatch.setattr(mixture_certificate, "_block", recorded)
    SampledGeneralPlan.calibrate(6.0, 1e-3, num_samples=2**15, key=key, **SIZES)
    assert set(blocks) == {"calibrate_mixture", "certify_mixture"}
    assert not set(blocks["calibrate_mixture"]) & set(blocks["certify_mixture"])


def test_streams_of_a_run_are_numbered_apart(key):
    """All numbers of `Stream` and `SearchStream`, with both directions: different keys under one key."""
    for kind in (randomness.Stream, randomness.SearchStream):
        keys = {tuple(randomness.key_words(randomness.stream_key(key, int(stream)))) for stream in kind}
        assert len(keys) == len(list(kind))
    directions = {
        tuple(np.asarray(jax.random.key_data(base.direction_key(key, d)))) for d in ("remove", "add")
    }
    assert len(directions) == 2
