"""Ends of searches: both have been evaluated, and the predicate holds at the second."""

import math

import pytest

from jaxacct.statistics import roots


@pytest.mark.parametrize("turn", [1e-12, 0.3, 2.0, 999.0])
def test_both_ends_of_a_bisection_are_on_their_sides(turn):
    low, high = roots.bisect(lambda x: x >= turn, 0.0, 1000.0)
    assert low < turn <= high and high - low <= 1e-14 * high


def test_a_bisection_stops_at_neighbouring_floats():
    low, high = roots.bisect(lambda x: x >= 0.3, 0.0, 1.0, relative=0.0)
    assert math.nextafter(low, 1) == high == 0.3


@pytest.mark.parametrize("turn", [-70, -3, 0, 5, 64])
def test_a_bracket_has_been_evaluated_on_both_sides(turn):
    seen = {}

    def is_past(x):
        return seen.setdefault(x, x >= turn)

    low, high = roots.bracket(is_past, 0, 1)
    assert not seen[low] and seen[high]
    assert isinstance(low, int) and isinstance(high, int)


def test_a_bracket_beyond_its_limits_is_open():
    assert roots.bracket(lambda x: x > 100, 0, 1, highest=10) == (10, math.inf)
    assert roots.bracket(lambda x: x > -100, 0, 1, lowest=-10) == (-math.inf, -10)


@pytest.mark.parametrize("near", [0.01, 0.5, 1.0])
def test_a_root_is_enclosed_and_nan_is_refused(near):
    low, high = roots.root(lambda x: x**3 - 0.02, 1e-300, 1.0, near)
    assert low**3 < 0.02 <= high**3 and high - low <= 1e-14 * high
    with pytest.raises(ArithmeticError):
        roots.root(lambda x: math.nan, 1e-300, 1.0, near if near < 1 else 0.5)


@pytest.mark.parametrize("turn", [-3.0, 0.1, 20.0])
def test_a_turn_is_searched_from_its_start_and_open_beyond_its_limits(turn):
    low, high = roots.turn(lambda x: x >= turn, 0.0, 1.0, -math.inf, math.inf, absolute=1e-9)
    assert low < turn <= high <= low + 1e-9
    assert roots.turn(lambda x: x >= turn, turn - 2, 1.0, -math.inf, turn - 0.01)[1] == math.inf
    assert roots.turn(lambda x: x >= turn, turn + 2, 1.0, turn + 0.01, math.inf)[0] == -math.inf
