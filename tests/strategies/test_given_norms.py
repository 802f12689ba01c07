"""Matrices that are rescaled: plans, pages and commands name the noise multiplier of C as it was given.

Another trainer adds noise to sums of `C x` with the C that was given, and takes its noise multiplier
from what the plan shows.
"""

import dataclasses
import json
import math
import re
from fractions import Fraction

import numpy as np
import pytest

import jaxacct as ja
from jaxacct.core.claim import Claim, ClaimedTarget, claim_from_json
from jaxacct.core.text import noise_multipliers
from jaxacct.strategies import STRATEGIES, ending
from tests.refusals import refused

N = 6
COLUMN = (1.0, 0.5, 0.5)  # of norm 1.2247
LOWER = np.tril(0.3 + np.arange(36.0).reshape(6, 6) / 30)
INVERSE = (1.0, -0.5, -0.125)


def first_column(c):
    return [[Fraction(x) for x in c]]


def inverse_column(inverse):
    """The first column of C, in rational numbers."""
    h, column = [Fraction(x) for x in inverse], []
    for t in range(N):
        rest = sum((h[k] * column[t - k] for k in range(1, min(t, len(h) - 1) + 1)), Fraction(0))
        column.append((Fraction(t == 0) - rest) / h[0])
    return [column]


def buffered_column(decay, weight):
    return [[Fraction(1), *(Fraction(weight) * Fraction(decay) ** t for t in range(N - 1))]]


GIVEN = {
    "banded-toeplitz": (ja.BandedToeplitz(COLUMN), first_column(COLUMN)),
    "finite-toeplitz": (ja.FiniteToeplitz(COLUMN, N), first_column(COLUMN)),
    "toeplitz": (ja.Toeplitz((3e-9, 1e-9)), first_column((3e-9, 1e-9))),
    "banded-inverse": (ja.BandedInverse(INVERSE, N), inverse_column(INVERSE)),
    "buffered-toeplitz": (ja.BufferedToeplitz((0.9,), (0.4,), N), buffered_column(0.9, 0.4)),
    "dense": (ja.Dense(LOWER), [[Fraction(x) for x in column] for column in LOWER.T]),
}
"""Kind of matrix -> the strategy made of numbers of another scale, and the columns of C as given."""


def shown(text):
    """The noise multiplier for the matrix as given, as a reader finds it in a text."""
    (found,) = set(re.findall(r"([0-9.e-]+) for the matrix as given", text))
    return Fraction(found)


def has_the_certified_noise(noise, columns, sigma):
    """Whether noise of this size beside C as given is at least `sigma` beside C of norm 1, exactly."""
    largest = max(sum(x * x for x in column) for column in columns)
    return noise * noise >= Fraction(sigma) ** 2 * largest


def test_who_trains_with_the_matrix_as_given_has_the_certified_noise():
    assert set(GIVEN) == set(STRATEGIES), "every kind of matrix is in the table"
    for sigma in [0.7, 1.0, 0.123456789012345]:
        for strategy, columns in GIVEN.values():
            words = noise_multipliers(ja.Mechanism(ja.BMinSep(N, 3, 0.2), strategy, sigma))
            noise = shown(words)
            assert has_the_certified_noise(noise, columns, sigma)
            # Neither more noise than that, nor the number for C of norm 1, which is too little.
            assert not has_the_certified_noise(noise * (1 - Fraction(1, 10**11)), columns, sigma)
            assert repr(sigma).removesuffix(".0") + " for C divided by" in words
            if strategy.given_norm > 1:
                assert not has_the_certified_noise(Fraction(sigma), columns, sigma)


def test_the_norm_is_stored_and_read_again():
    for kind, (strategy, _) in GIVEN.items():
        again = STRATEGIES[kind].from_json(json.loads(json.dumps(strategy.to_json())))
        assert again == strategy and again.given_norm == strategy.given_norm != 1
        mechanism = ja.Mechanism(ja.BMinSep(N, 3, 0.2), strategy, 0.7)
        claim = Claim(mechanism, ClaimedTarget.at(8.0, 1e-5), None, None)
        stored = json.loads(json.dumps(claim.to_json()))
        read = claim_from_json(stored)
        assert read.mechanism.strategy.given_norm == strategy.given_norm and read.digest == claim.digest
        stored["strategy"]["kind"] = "unheard-of"
        refused("strategy kind must be one of", claim_from_json, stored)


def test_a_matrix_of_norm_1_is_not_said_to_be_rescaled():
    for kind, (strategy, _) in GIVEN.items():
        if kind != "buffered-toeplitz":  # it has no numbers of another scale
            name = next(field.name for field in dataclasses.fields(strategy))
            scaled = dataclasses.replace(strategy, **{name: getattr(strategy, name)}, given_norm=0.0)
            assert scaled.given_norm == 1 and scaled == strategy
            assert noise_multipliers(ja.Mechanism(ja.BMinSep(N, 3, 0.2), scaled, 0.7)) == "0.7"
            larger = {name: tuple(3 * np.array(getattr(scaled, name))), "given_norm": 1.0}
            refused("given_norm must be given with a column norm of 1", dataclasses.replace, scaled, **larger)
            refused("given_norm must be a finite", dataclasses.replace, scaled, given_norm=math.nan)


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e300])
def test_a_scale_beyond_what_noise_can_have_is_refused(scale):
    for make in (ja.BandedToeplitz, ja.Toeplitz, lambda c: ja.FiniteToeplitz(c, N)):
        refused("column norm from 1e-290 to 1e", make, (scale, scale))
    refused("column norm from 1e-290 to 1e", lambda: ja.Dense(scale * np.eye(2)))


def test_the_finite_matrix_of_a_given_one_keeps_its_scale_and_what_a_search_scales_has_none():
    strategy = ja.BandedToeplitz(COLUMN)
    finite = ending(strategy, ja.BMinSep(N, 3, 0.2))
    assert type(finite) is ja.FiniteToeplitz and finite.given_norm == strategy.given_norm
    schedule = dict(iterations=N, min_separation=3, participations=2)
    assert ja.BandedToeplitz.optimal(bands=3, **schedule).given_norm == 1
    assert ja.BandedInverse.optimal(bands=3, **schedule).given_norm == 1


def test_matrices_at_random():
    """Rounding never leaves too little noise: 300 matrices of sizes from 1e-200 to 1e200."""
    rng = np.random.default_rng(1)
    for scale in 10 ** rng.uniform(-200, 200, 300):
        c = tuple((rng.random(rng.integers(1, 9)) + 0.01) * scale)
        sigma = float(rng.uniform(0.1, 10))
        noise = Fraction(repr(ja.BandedToeplitz(c).noise_as_given(sigma)))
        assert has_the_certified_noise(noise, first_column(c), sigma)
