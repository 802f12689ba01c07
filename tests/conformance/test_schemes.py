"""Every registered scheme through one table of requirements. A new scheme needs a line in `MEMBERS`.

Deterministic, with the outputs of two steps by quadrature. Likelihoods, draws and batches of every scheme are
held against one distribution in `test_registry.py`.
"""

import dataclasses
import functools
import json
import math
import typing

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.accountants import ACCOUNTANTS, AccountantName
from jaxacct.core.evidence import RULES, RuleName
from jaxacct.mechanisms.mechanism import ADJACENCIES, AdjacencyName
from jaxacct.schemes import scheme_from_json, scheme_to_json
from jaxacct.schemes.protocol.batch_sizes import OVERFLOW, overflow
from jaxacct.schemes.protocol.numbers import Numbers
from jaxacct.schemes.protocol.scheme import Scheme
from tests.oracles import enumeration
from tests.refusals import refused

# By name: one of four or five steps, and edges (b = 1, p = 1, n < b, one step).
MEMBERS: dict[str, list[Scheme]] = {
    "poisson": [ja.Poisson(4, 0.3), ja.Poisson(2, 1.0), ja.Poisson(1, 0.5)],
    "cyclic-poisson": [ja.CyclicPoisson(5, 2, 0.4), ja.CyclicPoisson(2, 3, 0.7), ja.CyclicPoisson(3, 1, 1.0)],
    "balls-in-bins": [ja.BallsInBins(5, 3), ja.BallsInBins(2, 3), ja.BallsInBins(3, 1)],
    "b-min-sep": [
        ja.BMinSep(5, 2, 0.3),
        ja.BMinSep(5, 2, 0.3, False),
        ja.BMinSep(2, 3, 1.0),
        ja.BMinSep(3, 1, 0.4),
    ],
    "balanced-min-sep": [
        ja.BalancedMinSep(4, 1, 1.5),
        ja.BalancedMinSep(8, 3, 2),
        ja.BalancedMinSep(8, 3, 2.4),
        ja.BalancedMinSep(6, 2, 3),
        ja.BalancedMinSep(5, 2, 0.7),
        ja.BalancedMinSep(3, 3, 1),
    ],
    "epochwise-allocation": [
        ja.EpochwiseAllocation(5, 3, 2),
        ja.EpochwiseAllocation(6, 3, 1),
        ja.EpochwiseAllocation(5, 2, 2),
        ja.EpochwiseAllocation(7, 3, 2),
        ja.EpochwiseAllocation(2, 3),
        ja.EpochwiseAllocation(4, 1),
    ],
    "custom": [
        ja.CustomScheme([0.1, 0.5, 0.2, 0.6], 2),
        ja.CustomScheme([0.3, 1.0, 0.2, 0.4, 0.5], [1, 3, 2, 1, 2], start=[0.5, 0.2, 0.1]),
        ja.CustomScheme([[0, 0.4, 0.7], [0, 0.2, 1], [0, 0.5, 0.5], [0, 1, 1]], 1, keep=0.6),
        ja.CustomScheme([[0, 0.5, 1]] * 2 + [[0, 0.4, 0.6]] * 3, 2, turns=True, start=[0.6, 0.4], keep=0.75),
        ja.CustomScheme([0.7], 3),
    ],
    "multi-attribution": [ja.MultiAttribution(4, 2, 0.3, 2), ja.MultiAttribution(2, 3, 1.0, 2)],
    "independent-attribution": [
        ja.IndependentAttribution(4, 2, 0.3, 2),
        ja.IndependentAttribution(2, 3, 1.0, 2),
    ],
    "truncated-b-min-sep": [ja.TruncatedBMinSep(4, 2, 0.3, 6, 10), ja.TruncatedBMinSep(2, 3, 0.4, 10, 10)],
}
ALL = [scheme for schemes in MEMBERS.values() for scheme in schemes]
TYPICAL = [pytest.param(schemes[0], id=name) for name, schemes in MEMBERS.items()]
IDENTITY = ja.BandedToeplitz.identity()


def test_every_registered_scheme_is_in_the_table():
    """Of fixed-order batches nothing is random: tests/schemes/test_fixed_order.py."""
    for name in {*ja.SCHEMES} - {"fixed-order"}:
        for table in ("MEMBERS", "STATED"):
            assert name in globals()[table], f"add the scheme {name!r} to {table} of {__file__}"
    assert set(MEMBERS) | {"fixed-order"} == set(ja.SCHEMES)
    for name, schemes in MEMBERS.items():
        assert {type(scheme) for scheme in schemes} == {ja.SCHEMES[name]}


def typical_side(scheme, num):
    """Side information under which nothing special happens: no batch is truncated."""
    return None if scheme.side_information is None else np.zeros((num, scheme.iterations), int)


def distribution(scheme):
    """By enumeration: participation vectors, (count, iterations), and their probabilities."""
    return enumeration.vectors(getattr(scheme, "untruncated", scheme))


def test_distribution_against_enumeration():
    for scheme in ALL:
        patterns, weights = distribution(scheme)
        assert weights.sum() == pytest.approx(1, abs=1e-12)
        np.testing.assert_allclose(scheme.participation_probabilities(), weights @ (patterns > 0), atol=1e-12)
        none = weights[~patterns.any(axis=1)].sum()
        log_none = scheme.log_probability_of_none()
        if scheme.side_information is None:
            assert math.exp(log_none) == pytest.approx(none, abs=1e-12)
        else:
            assert log_none == -math.inf
        assert patterns.max() <= scheme.examples_per_unit
        assert 0 <= scheme.draw_errors[0] < 1e-2


def test_sensitivity_covers_every_participation():
    """With columns of norm 1 that overlap as little as the scheme allows."""
    for scheme in ALL:
        strategy = ja.BandedToeplitz.square_root(min(scheme.min_separation, scheme.iterations))
        matrix = enumeration.strategy_matrix(
            strategy.coefficients, scheme.iterations + strategy.bands, scheme.iterations
        )
        patterns, _ = distribution(scheme)
        worst = np.square(patterns @ matrix.T).sum(axis=1).max()
        assert scheme.squared_sensitivity(0.0) >= worst * (1 - 1e-12)


def two_steps(scheme):
    """The same scheme with two steps."""
    if isinstance(scheme, ja.CustomScheme):
        return dataclasses.replace(scheme, join=scheme.join[:2])
    return dataclasses.replace(scheme, iterations=2)


def quadrature(sigma, nodes=48):
    """Outputs of two steps of pure noise, and their probabilities, by Gauss-Hermite quadrature."""
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    weights = weights / weights.sum()
    first, second = np.meshgrid(points, points, indexing="ij")
    return sigma * np.column_stack([first.ravel(), second.ravel()]), np.outer(weights, weights).ravel()


def divergences(scheme, sigma, epsilon):
    """(mass of P, H(P, Q), H(Q, P)) of two steps by quadrature."""
    outputs, chances = quadrature(sigma)
    side = typical_side(scheme, len(outputs))
    ratio = np.exp(ja.privacy_loss(ja.Mechanism(scheme, IDENTITY, sigma), outputs, side))
    remove = chances @ np.maximum(ratio - math.exp(epsilon), 0)
    add = chances @ np.maximum(1 - math.exp(epsilon) * ratio, 0)
    return chances @ ratio, remove, add


@pytest.mark.parametrize("scheme", TYPICAL)
def test_mass_is_one_and_more_noise_is_more_private(scheme, x64):
    small = two_steps(scheme)
    quiet, noisy = (divergences(small, sigma, 0.05) for sigma in (1.0, 2.0))
    assert quiet[0] == pytest.approx(1, abs=1e-9) and noisy[0] == pytest.approx(1, abs=1e-9)
    assert quiet[1] > noisy[1] > 0
    assert quiet[2] >= noisy[2] >= 0


@pytest.mark.parametrize("scheme", TYPICAL[::3])
def test_jit_vmap_precision_and_one_trace(scheme):
    """Row by row is all at once; float32 is near float64; an equal scheme is the same program."""
    strategy, sigma = ja.BandedToeplitz.square_root(scheme.min_separation), 0.9
    outputs = np.random.default_rng(1).normal(0.5, 1.5, (6, scheme.iterations))
    side = typical_side(scheme, 6)
    single = ja.privacy_loss(ja.Mechanism(scheme, strategy, sigma), outputs.astype(np.float32), side)
    assert single.dtype == jnp.float32
    one = ja.privacy_loss(
        ja.Mechanism(scheme, strategy, sigma),
        outputs[0].astype(np.float32),
        None if side is None else side[0],
    )
    assert float(one) == pytest.approx(float(single[0]), rel=1e-5, abs=1e-5)
    with jax.enable_x64(True):
        double = ja.privacy_loss(ja.Mechanism(scheme, strategy, sigma), outputs, side)
    np.testing.assert_allclose(single, double, rtol=2e-5, atol=2e-5)

    chex.clear_trace_counter()

    @functools.partial(jax.jit, static_argnums=0)
    @chex.assert_max_traces(n=1)
    def traced(scheme, x):
        return scheme.max_rate * x

    traced(scheme, 1.0)
    traced(dataclasses.replace(scheme), 2.0)


def test_names_in_types_are_those_of_the_registries():
    """So editors and type checkers offer every accountant, rule and adjacency, and no other."""
    assert set(typing.get_args(AccountantName)) == {"analytic", *ACCOUNTANTS}
    hints = typing.get_type_hints(ja.calibrate) | typing.get_type_hints(ja.CalibrationOptions)
    assert hints["accountant"] == AccountantName | None
    assert (hints["rule"], hints["adjacency"]) == (RuleName, AdjacencyName)
    assert ADJACENCIES == typing.get_args(AdjacencyName) and RULES == typing.get_args(RuleName)


# By option: a value, and what the refusal names.
OPTIONS = {
    "separation": ({"min_separation": 2}, "min_separation"),
    "warm_start": ({"warm_start": False}, "cold_start"),
    "examples_per_user": ({"examples_per_user": 2}, "examples_per_user"),
    "truncate_to": ({"truncate_to": 12}, "truncate_to"),
}


@pytest.mark.parametrize("scheme", TYPICAL)
def test_from_plain_numbers(scheme):
    """By probability or by sizes, with every option that it takes; those it does not take are refused."""
    kind = type(scheme)
    if kind is ja.CustomScheme:
        numbers = Numbers(iterations=6, separation=2, dataset_size=40, batch_size=4.0)
        refused("custom is made from its table", kind.from_numbers, numbers)
        return
    taken = {"separation"} if kind is ja.BallsInBins else set(kind.options) & set(OPTIONS)
    needed = {name: OPTIONS[name][0][name] for name in ("examples_per_user", "truncate_to") if name in taken}
    fields = {field.name for field in dataclasses.fields(scheme)}
    common = dict(iterations=6, separation=2, **needed)
    by_sizes = kind.from_numbers(Numbers(**common, dataset_size=40, batch_size=4.0))
    assert by_sizes.expected_batch_sizes(40).mean() <= 4 + 1e-9 and by_sizes.iterations == 6
    if "sampling_probability" in fields:
        more = dict(dataset_size=40) if "dataset_size" in fields else {}
        made = kind.from_numbers(Numbers(**common, **more, sampling_probability=0.25))
        assert made.sampling_probability == 0.25 and made.min_separation == (2 if taken else 1)
        cold = Numbers(**common, **more, sampling_probability=0.25, warm_start=False)
        if "warm_start" in taken:
            assert not kind.from_numbers(cold).warm_start
        both = Numbers(**common, batch_size=4.0, sampling_probability=0.25)
        refused("batch_size must not be given together", kind.from_numbers, both)
    for name, (value, said) in OPTIONS.items():
        if name not in taken:
            numbers = Numbers(**common | {"dataset_size": 40, "batch_size": 4.0} | value)
            refused(f"{said} does not apply to {kind.name}", kind.from_numbers, numbers)
    for name in needed:
        numbers = Numbers(**common | {name: None})
        refused(f"{name} must be given for {kind.name}", kind.from_numbers, numbers)
    refused("dataset_size and batch_size must", kind.from_numbers, Numbers(**common, batch_size=4.0))


def test_json_round_trip_and_its_refusals():
    for scheme in ALL:
        stored = json.loads(json.dumps(scheme_to_json(scheme)))
        assert scheme_from_json(stored) == scheme and stored["name"] == scheme.name
        fewer = {key: value for key, value in stored.items() if key not in ("iterations", "join")}
        for wrong in (stored | {"surplus": 1}, fewer):
            refused("must have the fields", scheme_from_json, wrong)
        refused("scheme must be one of", scheme_from_json, stored | {"name": "unheard-of"})


@pytest.mark.parametrize("scheme", TYPICAL)
def test_bad_input(scheme):
    bad = {"iterations": (0, -1, 1.5, True, None)}
    if isinstance(scheme, ja.CustomScheme):
        bad = {
            "join": ([], [1.5], [-0.1], [math.nan], [1e-16], ["half"], None, [[0.5, 0.5]] * 3, [[[0.5]]]),
            "lockout": (0, -1, 1.5, True, [2, 2], [0, 1, 1, 1], 2**31),
            "turns": (1, None),
            "start": ([], [0.0], [-0.1, 0.5], [0.9, 0.2], [math.nan], [0.1] * 5, 0.5),
            "keep": (0.0, 1.1, math.nan, "half"),
        }
    names = {field.name for field in dataclasses.fields(scheme)}
    if "sampling_probability" in names:
        bad["sampling_probability"] = (0.0, -0.1, 1.5, math.nan, "half")
    for name in ("min_separation", "cycle_length", "examples_per_user", "max_batch_size", "dataset_size"):
        if name in names:
            bad[name] = (0, 2.5)
    for name, values in bad.items():
        for value in values:
            refused(name, dataclasses.replace, scheme, **{name: value})


def test_a_scheme_must_say_what_the_guarantee_rests_on():
    """A made scheme whose users have five examples: once its sensitivity came out as 3.16, not 15.8."""

    stated = {"name": "made", "unit": "user", "adjacencies": ("zero-out",), "examples_overlap": True}
    stated |= {"others_are_independent": False, "holds_for_shared_examples": False, "examples_per_unit": 5}
    stated |= dict.fromkeys(["max_participations", "side_information", "max_rate", "draw_errors", "sums"])
    for forgotten in stated:
        with pytest.raises(TypeError, match=f"must state its {forgotten}$"):
            type("Made", (Scheme,), {key: value for key, value in stated.items() if key != forgotten})
    made = type("Made", (Scheme,), stated)
    abstract = "participation_probabilities expected_batch_sizes log_probability_of_none squared_sensitivity "
    abstract += "batches draw_participation log_likelihood_ratios from_batch_size"
    assert made.__abstractmethods__ == set(abstract.split())
    with pytest.raises(TypeError, match="squared_sensitivity"):
        made()
    whole = type("Whole", (made,), dict.fromkeys(abstract.split()))()
    with pytest.raises(NotImplementedError, match="made must state its overlap bound"):
        whole.overlap_bound(IDENTITY)
    whole.side_information = MEMBERS["truncated-b-min-sep"][0].side_information
    with pytest.raises(NotImplementedError, match="made must state its counts given batch_sizes"):
        whole.draw_counts(None, 1, "remove")
    for five in (ja.MultiAttribution(10, 1, 0.1, 5), ja.IndependentAttribution(10, 1, 0.1, 5)):
        assert math.sqrt(five.squared_sensitivity(0.0)) == pytest.approx(15.811, abs=1e-3)


@pytest.mark.parametrize("scheme", TYPICAL)
def test_adjacencies_are_stated_and_others_refused(scheme):
    """For independent examples alone zero-out and add-or-remove-one share a pair (proofs/adjacency.md)."""
    independent = scheme.unit == "example" and scheme.others_are_independent and scheme.batch_size_cap is None
    assert scheme.adjacencies == (ADJACENCIES if independent else ADJACENCIES[:1])
    for adjacency in {*ADJACENCIES, "replace-one"} - set(scheme.adjacencies):
        refused("adjacency must be 'zero-out' for scheme", ja.Mechanism, scheme, IDENTITY, 1.0, adjacency)


# What the guarantee takes from a scheme: whether others' batches are independent of the unit, whether the
# pair covers graphs with shared examples, whether examples of one unit may overlap.
STATED = {
    "poisson": (True, False, False),
    "cyclic-poisson": (True, False, False),
    "balls-in-bins": (True, False, False),
    "b-min-sep": (True, False, False),
    "balanced-min-sep": (True, False, False),
    "epochwise-allocation": (True, False, False),
    "custom": (True, False, False),
    "multi-attribution": (False, False, False),
    "independent-attribution": (False, True, True),
    "truncated-b-min-sep": (False, False, False),
}


def test_what_a_scheme_states_of_batches_and_graphs():
    """Where others are not independent of the unit, a batch too large is seen under D, and D' times e^eps."""
    for scheme in ALL:
        stated = scheme.others_are_independent, scheme.holds_for_shared_examples, scheme.examples_overlap
        assert stated == STATED[scheme.name]
        if scheme.batch_size_cap is None:
            booked = overflow(scheme, 3.0, 1.0, 10_000)
            assert booked.probability == pytest.approx(OVERFLOW) or booked.delta == pytest.approx(1e-3)
            times = 1.0 if STATED[scheme.name][0] else 1 + math.exp(3.0)
            assert booked.delta == pytest.approx(times * booked.probability)
        else:
            assert overflow(dataclasses.replace(scheme), 3.0, 1.0, 10_000) is None


def test_batches_of_users_need_their_graph():
    """They are drawn in tests/train/batches."""
    refused("graph must be given", MEMBERS["multi-attribution"][0].batches, 10, np.random.default_rng(0))
