"""One table of claims, for every scheme: a field of the claim -> the numbers that must change with it.

That a number is right says nothing where the claim asks for it with another argument. Each is computed again
from the proofs (proofs/rounding.md, section 8), and compared with what the claim, its budget and its file
state. Users come first: their reserve depends on epsilon.
"""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from jaxacct import BandedToeplitz, FixedOrder, Mechanism, Plan
from jaxacct.core.check import check
from jaxacct.core.claim import Claim, ClaimedTarget
from jaxacct.core.evidence import Bound
from jaxacct.core.text import budget_items
from jaxacct.report.facts import mechanism_rows
from jaxacct.schemes import SCHEMES
from tests.conformance.test_schemes import MEMBERS
from tests.refusals import refused

SCHEMES_OF_CLAIMS = {name: members[0] for name, members in MEMBERS.items()}
SCHEMES_OF_CLAIMS["fixed-order"] = FixedOrder(4, 2, 2)
USERS_FIRST = sorted(SCHEMES_OF_CLAIMS, key=lambda name: SCHEMES_OF_CLAIMS[name].unit == "example")
# With a reserve for truncated batches.
TRUNCATED = "poisson", "cyclic-poisson", "balls-in-bins", "b-min-sep"
STOPS, SHARE = 1e-9, 1e-3  # probability of a stopped run, and the most of delta that its reserve takes
EPSILON, DELTA, SIZE = 2.0, 1e-5, 40_000


def claim_of(scheme, *, epsilon=EPSILON, delta=DELTA, size=SIZE, truncate_to=None) -> Claim:
    """The claim of the scheme with independent noise; one that dictates its data set has that."""
    mechanism = Mechanism(scheme, BandedToeplitz.identity(), 1.0)
    return Claim(
        mechanism, ClaimedTarget.at(epsilon, delta), scheme.required_dataset_size or size, truncate_to
    )


def expected(claim: Claim) -> dict:
    """The same numbers by the formulas of the proofs."""
    scheme, size = claim.mechanism.scheme, claim.dataset_size
    stops = not (claim.truncate_to or scheme.batch_size_cap or scheme.patterns)
    times = 1 if scheme.others_are_independent else 1 + math.exp(claim.target.epsilon)
    reserve = min(STOPS * times, SHARE * claim.target.delta)
    numbers = {"stops": reserve / times if stops else None, "reserve": reserve if stops else None}
    largest = claim.truncate_to or scheme.batch_size_cap
    if scheme.patterns:
        largest = math.ceil(scheme.expected_batch_sizes(size).mean())
    elif stops:  # at most this probability that any step exceeds it, by the union over steps
        rates = scheme.max_rate if scheme.batch_rates is None else scheme.participation_probabilities()
        tails = stats.binom.sf(np.arange(size + 1)[:, None], size, rates).mean(axis=1)
        largest = int(np.argmax(tails <= numbers["stops"] / scheme.iterations))
        largest = min(size, largest + 1)  # one more than that, for the rounding of the tail
    mean = scheme.expected_batch_sizes(size).mean()
    return numbers | {"largest": largest, "mean": pytest.approx(float(mean), rel=1e-12)}


def found(claim: Claim) -> dict:
    stops = claim.overflow
    mean, largest = claim.batch_sizes
    numbers = {"stops": None, "reserve": None}
    if stops is not None:
        numbers = {"stops": stops.probability, "reserve": stops.delta}
    return numbers | {"largest": largest, "mean": mean}


def near(one, other) -> bool:
    return one == (other if not isinstance(other, float) else pytest.approx(other, rel=1e-12, abs=0))


def test_every_scheme_is_in_the_table():
    assert set(SCHEMES_OF_CLAIMS) == set(SCHEMES)
    independent = [SCHEMES_OF_CLAIMS[name].others_are_independent for name in USERS_FIRST]
    assert not independent[0] and set(independent) == {True, False}, "the column of users is not empty"


@pytest.mark.parametrize("name", USERS_FIRST)
def test_each_field_of_a_claim_changes_its_numbers(name):
    scheme = SCHEMES_OF_CLAIMS[name]
    fixed = scheme.required_dataset_size is not None
    stops = not (scheme.batch_size_cap or scheme.patterns)
    by_epsilon = stops and not scheme.others_are_independent
    table = {
        "epsilon": ({"epsilon": 6.0}, {"stops", "reserve"} if by_epsilon else set()),
        "delta": ({"delta": 1e-11}, {"stops", "reserve"} if stops else set()),
        "dataset_size": ({"size": 2 * SIZE}, {"mean"} if scheme.batch_size_cap else {"mean", "largest"}),
    }
    if fixed:  # another size is another scheme
        del table["dataset_size"]
    if stops:
        table["truncate_to"] = ({"truncate_to": 17}, {"stops", "reserve", "largest"})
    base = claim_of(scheme)
    numbers = found(base)
    for key, value in expected(base).items():
        assert near(numbers[key], value), key
    for field, (change, must_change) in table.items():
        other = claim_of(scheme, **change)
        changed = found(other)
        assert other.digest != base.digest, field
        for key, value in expected(other).items():
            assert near(changed[key], value), (field, key)
        really = {key for key in numbers if not near(changed[key], numbers[key])}
        # A rarer stop has a larger batch, where batches are random.
        if "stops" in must_change and scheme.max_rate < 1:
            must_change = must_change | {"largest"}
        assert really == must_change, field


@pytest.mark.parametrize("name", USERS_FIRST)
def test_the_budget_shows_every_reserve(name):
    """Items of the budget and of the file add up to what the claim reserves, no more and no less."""
    scheme = SCHEMES_OF_CLAIMS[name]
    for change in ({}, {"truncate_to": 39_000}):
        if change and name not in TRUNCATED:
            continue
        claim = claim_of(scheme, **change)
        verdict = check(claim, Bound("revealed-pattern"))
        items = dict(budget_items(verdict))
        reserve, truncated = expected(claim)["reserve"], claim.truncation_delta
        assert items.get("runs stopped by a batch too large") == (reserve and pytest.approx(reserve))
        assert items.get("truncated batches") == truncated
        assert claim.reserved == pytest.approx((reserve or 0) + (truncated or 0))
        assert sum(items.values()) == pytest.approx((verdict.bound or 0.0) + claim.reserved)
        notes = Plan(claim, Bound("revealed-pattern")).to_json()["notes"]
        assert notes["overflow_delta"] == (reserve and pytest.approx(reserve))
        assert notes["max_batch_size"] == expected(claim)["largest"]
        assert f" {claim.batch_sizes[1]} at most" in dict(mechanism_rows(claim))["batch size"]


@pytest.mark.parametrize("name", [name for name in USERS_FIRST if SCHEMES_OF_CLAIMS[name].unit == "user"])
def test_a_budget_that_leaves_no_room_for_stopped_users_is_refused(name):
    """At epsilon 6 the reserve of a user's claim is 404 times that of an example's."""
    claim = claim_of(SCHEMES_OF_CLAIMS[name], epsilon=6.0)
    if claim.mechanism.scheme.others_are_independent:
        return
    refused("the budget spends", claim.check_reserves)
    target = ClaimedTarget.at(6.0, DELTA, reserved=expected(claim)["reserve"] * (1 + 1e-9))
    dataclasses.replace(claim, target=target).check_reserves()
    target = ClaimedTarget.at(6.0, DELTA, reserved=expected(claim)["reserve"] * 0.5)
    refused("the budget spends", lambda: dataclasses.replace(claim, target=target).check_reserves())
