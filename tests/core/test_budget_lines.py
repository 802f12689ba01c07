"""Every budget item of every family against the proofs, recomputed by `tests/oracles/budget`.

Allowances are far above measured errors, so that a term which is left out of one is not seen by draws.
Nothing is drawn here. Every `draw_error` and every error of a replica module is compared from both sides.
"""

import functools
import math

import numpy as np
import pytest

import jaxacct as ja
from jaxacct.kernels.likelihoods import epochs
from jaxacct.kernels.likelihoods.interacting_recurrence import numbers_kept
from jaxacct.likelihood import rounding
from jaxacct.proposals.base import plain
from jaxacct.proposals.families import replica_lines
from jaxacct.proposals.families.replicas import log_normalizer
from jaxacct.proposals.threshold import budget_lines, weight_line
from jaxacct.schemes.replicas import table as replica_table
from jaxacct.schemes.users import independent_attribution
from jaxacct.statistics.lines import Item
from jaxacct.strategies.stationary import adds_windows
from tests.oracles import budget
from tests.proposals_by_name import proposal_by_name

DELTA_V = 1e-5
ROOT, IDENTITY = ja.BandedToeplitz.square_root, ja.BandedToeplitz.identity()
OVERLAPPING = ja.Toeplitz((0.8, 0.5, 0.33))
SETTINGS = {
    "one band": ja.Mechanism(ja.Poisson(200, 0.01), IDENTITY, 1.0),
    "one step": ja.Mechanism(ja.Poisson(1, 0.5), IDENTITY, 1.0),
    "transforms": ja.Mechanism(ja.BMinSep(300, 4, 0.02), ROOT(4), 1.2),
    "seldom": ja.Mechanism(ja.BMinSep(400, 4, 0.002), ROOT(4), 1.0),
    "cold": ja.Mechanism(ja.BMinSep(50, 4, 0.4, False), ROOT(3), 0.7),
    "low noise": ja.Mechanism(ja.BMinSep(2000, 4, 0.02), ROOT(4), 0.05),
    "windows": ja.Mechanism(ja.BMinSep(7200, 8, 2e-5), ja.BandedToeplitz((2.0, 1.0, 0.5)), 1.0),
    "phases": ja.Mechanism(ja.CyclicPoisson(96, 4, 0.1), ROOT(4), 1.0),
    "certain": ja.Mechanism(ja.BMinSep(60, 4, 1.0), ROOT(4), 2.0),
    "certain phases": ja.Mechanism(ja.BallsInBins(40, 4), ROOT(3), 2.0),
    "counts": ja.Mechanism(ja.MultiAttribution(60, 4, 0.02, 3), ROOT(4), 2.0),
    "two examples": ja.Mechanism(ja.IndependentAttribution(60, 4, 0.02, 2), ROOT(4), 2.0),
    "three examples, long blocks": ja.Mechanism(ja.IndependentAttribution(300, 32, 0.01, 3), ROOT(8), 2.0),
    "certain examples": ja.Mechanism(ja.IndependentAttribution(40, 3, 1.0, 2), ROOT(3), 4.0),
    "truncated": ja.Mechanism(ja.TruncatedBMinSep(120, 4, 0.1, 50, 600), ROOT(3), 2.5),
    "overlapping": ja.Mechanism(ja.Poisson(40, 0.05), OVERLAPPING, 2.0),
    "overlapping, dense": ja.Mechanism(ja.Poisson(6, 0.05), ja.Dense(np.eye(6) + 0.2 * np.eye(6, k=-1)), 2.0),
    "rows of the run": ja.Mechanism(ja.BMinSep(40, 4, 0.05), ja.FiniteToeplitz((1.0, 0.5, 0.2), 40), 1.5),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", SETTINGS)


def compare(lines, expected: dict, settled=None):
    """Every (name, kind) once, and amounts as expected; `settled`: errors of the sampling distribution."""
    found = {(line.name, line.kind): line.amount for line in lines}
    assert len(found) == len(lines)
    wanted = {(name, kind): amount for name, (kind, amount) in expected.items()}
    for kind, amount in zip(("relative", "total variation"), settled or (), strict=False):
        wanted["sampling distribution", kind] = amount
    assert set(found) == set(wanted)
    for key, amount in wanted.items():
        assert found[key] == pytest.approx(amount, rel=1e-6, abs=0), key
    assert all(line.source.startswith("proofs/") for line in lines)


@EACH
def test_items_of_losses(name):
    """One replica and more, few and many rare outputs allowed."""
    mechanism = SETTINGS[name]
    for m, delta_v in [(1, DELTA_V), (3, DELTA_V), (2, 1e-12), (1, 1e-12)]:
        compare(rounding.loss_lines(mechanism, delta_v, m), budget.loss_items(mechanism, delta_v, m))
    for lowest in (0.0, 30.0, 1e4):
        line = weight_line(mechanism, DELTA_V, 3, -4.5, lowest)
        compare([line], budget.weight_items(mechanism, DELTA_V, 3, -4.5, lowest))


@pytest.mark.parametrize("name", ["truncated", "seldom"])
def test_how_many_participations_count(name):
    """At rare outputs of many sizes, so that every factor of their probability decides somewhere."""
    for delta_v in np.geomspace(1e-14, 1e-2, 13):
        lines = rounding.loss_lines(SETTINGS[name], float(delta_v))
        compare(lines, budget.loss_items(SETTINGS[name], float(delta_v)))


def test_every_branch_is_among_the_settings():
    """Each of these would otherwise be compared nowhere."""
    distributions = {name: budget.distribution_of(m, DELTA_V, 1, 2.0**-20) for name, m in SETTINGS.items()}
    fewer = {name for name, m in SETTINGS.items() if distributions[name].count < budget.most(m.scheme)}
    assert {"one band", "transforms", "phases", "counts", "two examples", "truncated"} <= fewer
    assert {"overlapping", "certain", "low noise"}.isdisjoint(fewer - {"low noise"})
    assert {name for name in SETTINGS if distributions[name].above} >= {"transforms", "counts", "phases"}
    assert adds_windows(SETTINGS["windows"].scheme, SETTINGS["windows"].strategy, 3)
    shares = {line.amount for line in rounding.loss_lines(SETTINGS["low noise"], DELTA_V)
              if line.kind == "relative"}  # fmt: skip
    assert shares and max(shares) < 2.0**-20, "an error of vectors beyond the count exceeds 1"


@pytest.fixture
def forget():
    """Lines are kept by mechanism, which does not say how many tables fit."""
    caches = [rounding.loss_lines, replica_lines.pair_lines]
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def bounded(monkeypatch, forget):
    """As if the tables of the likelihood of more than one example did not fit."""
    monkeypatch.setattr(independent_attribution, "MAX_NUMBERS", 0)
    return ja.Mechanism(ja.IndependentAttribution(60, 4, 0.02, 3), ROOT(4), 2.5)


def test_items_of_bounded_likelihoods(bounded):
    assert bounded.scheme.sums.times == 3
    for m in (1, 2):
        compare(rounding.loss_lines(bounded, DELTA_V, m), budget.loss_items(bounded, DELTA_V, m))
    compare(replica_lines.pair_lines(bounded, 6, 3.0, DELTA_V), budget.pair_items(bounded, DELTA_V, 6, 3.0))


@pytest.mark.parametrize("examples", [3, 4])
def test_items_of_pairs_of_examples(examples, monkeypatch, forget):
    """As if the tables of two examples did fit, and of more did not."""
    monkeypatch.setattr(independent_attribution, "MAX_NUMBERS", numbers_kept(4, 2, True))
    mechanism = ja.Mechanism(ja.IndependentAttribution(60, 4, 0.02, examples), ROOT(4), 2.5)
    assert mechanism.scheme.pair_bound is not None and mechanism.scheme.sums.times == examples
    plain = proposal_by_name(mechanism, 1.0, "remove", "replicas:1")
    expected = budget.by_pairs(mechanism, DELTA_V, budget.loss_items(mechanism, DELTA_V), 1)
    compare(budget_lines(plain, DELTA_V), expected, distribution(plain))
    assert plain.relative_error == mechanism.scheme.draw_errors[0] > 0
    for m in (6, 8):
        found = proposal_by_name(mechanism, 1.0, "remove", f"replicas:{m}")
        expected = budget.pair_items(mechanism, DELTA_V, m, found.log_normalizer)
        expected = budget.by_pairs(mechanism, DELTA_V, expected, -(-m // examples))
        compare(budget_lines(found, DELTA_V), expected, distribution(found))


def distribution(proposal) -> tuple[float, float]:
    return proposal.relative_error, proposal.total_variation


@functools.cache
def proposal(setting: str, epsilon: float, direction: str, name: str):
    return proposal_by_name(SETTINGS[setting], epsilon, direction, name)


@pytest.mark.parametrize("setting", ["one band", "transforms", "phases", "counts", "overlapping", "windows"])
def test_items_of_replicas(setting):
    mechanism = SETTINGS[setting]
    plain = proposal(setting, 1.0, "remove", "plain")
    expected = budget.loss_items(mechanism, DELTA_V)
    compare(budget_lines(plain, DELTA_V), expected, mechanism.scheme.draw_errors)
    drawn = proposal(setting, 1.0, "remove", "replicas:2")
    module = mechanism.scheme.replicas(mechanism)
    expected = budget.loss_items(mechanism, DELTA_V, 2)
    expected |= budget.weight_items(mechanism, DELTA_V, 2, module.log_normalizer(mechanism))
    compare(budget_lines(drawn, DELTA_V), expected, module.errors(mechanism))


@pytest.mark.parametrize("p", [0.001, 0.01])
@pytest.mark.parametrize("sigma", [0.4, 0.6, 1.0, 2.0])
def test_items_of_two_losses(sigma, p):
    """Where Z_2 is large and where it is not, which decides how many participations count in either loss."""
    mechanism = ja.Mechanism(ja.IndependentAttribution(300, 4, p, 3), ROOT(4), sigma)
    for delta_v in (1e-4, 1e-9):
        lines = replica_lines.pair_lines(mechanism, 4, 2.0, delta_v)
        compare(lines, budget.pair_items(mechanism, delta_v, 4, 2.0))
    one = ja.Mechanism(ja.BMinSep(300, 4, p), ROOT(4), sigma)
    for times in (2, 8):
        found = replica_lines.inflated_lines(one, times, 3, 2.0, DELTA_V)
        compare(found, budget.inflated_items(one, DELTA_V, 3, times, 2.0))


def test_items_of_few_participations_of_another_example():
    """They are added by a transform, however few; others as windows."""
    mechanism, times, m = SETTINGS["windows"], 3, 3
    lines = replica_lines.inflated_lines(mechanism, times, m, 2.0, DELTA_V)
    compare(lines, budget.inflated_items(mechanism, DELTA_V, m, times, 2.0))


def test_no_number_depends_on_a_sentence(monkeypatch, forget):
    """Every sentence reworded: the same amounts in all families, of which two read items of others."""
    monkeypatch.setattr(independent_attribution, "MAX_NUMBERS", numbers_kept(4, 2, True))
    users = ja.Mechanism(ja.IndependentAttribution(60, 4, 0.02, 4), ROOT(4), 2.5)

    def amounts():
        proposals = [proposal_by_name(users, 1.0, "remove", name) for name in ("replicas:1", "replicas:6")]
        proposals.append(proposal_by_name(users, 1.0, "remove", "plain"))
        rounding.loss_lines.cache_clear()
        return [[(line.kind, line.amount) for line in budget_lines(one, DELTA_V)] for one in proposals]

    expected = amounts()
    assert len({item.sentence for item in Item}) == len(Item)
    for i, item in enumerate(Item):
        monkeypatch.setattr(item, "sentence", f"reworded {i}")
    assert amounts() == expected
    plain = proposal_by_name(users, 1.0, "remove", "plain")
    assert all(": reworded " in line.in_words for line in budget_lines(plain, DELTA_V))


@pytest.mark.parametrize("setting", ["two examples", "transforms"])
def test_items_of_pairs(setting):
    mechanism, m = SETTINGS[setting], 6
    found = proposal(setting, 1.0, "remove", f"replicas:{m}")
    one, k = mechanism.scheme.parts or (mechanism.scheme, 1)
    alone = ja.Mechanism(one, mechanism.strategy, mechanism.noise_multiplier / math.sqrt(m - 1))
    module = one.replicas(alone)
    log_z = m / 2 * module.log_normalizer(alone)
    if k > 1:
        expected = budget.pair_items(mechanism, DELTA_V, m, log_z)
    else:
        expected = budget.loss_items(mechanism, DELTA_V, m)
        expected |= budget.weight_items(mechanism, DELTA_V, m, log_z)
    relative, variation = module.errors(alone)
    settled = (1 + relative) ** (m / 2) - 1, m / 2 * variation
    compare(budget_lines(found, DELTA_V), expected, settled)


@pytest.mark.parametrize(("m", "times"), [(2, 4), (4, 16)])
def test_items_of_a_inflated_example(m, times):
    mechanism = ja.Mechanism(ja.BMinSep(60, 2, 0.001), ja.BandedToeplitz((2.0, 1.0)), 1.0)
    found = proposal_by_name(mechanism, 0.3, "remove", f"replicas:{m},{times}")
    inflated = ja.Mechanism(mechanism.scheme.inflated(times)[0], mechanism.strategy, (m - 1) ** -0.5)
    expected = budget.inflated_items(mechanism, DELTA_V, m, times, m / 2 * log_normalizer(inflated))
    relative, variation = inflated.scheme.replicas(inflated).errors(inflated)
    settled = (1 + relative) ** (m / 2) - 1, m / 2 * variation
    compare(budget_lines(found, DELTA_V), expected, settled)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_items_of_truncated_batches(direction):
    mechanism = SETTINGS["truncated"]
    found = proposal("truncated", 8.0, direction, "truncated")
    untruncated = mechanism.scheme.independent_truncation.untruncated
    # ln Z, the tilt of every truncated step that there may be, and the floor of the other likelihood
    tilt = 0.0 if direction == "add" else float(found.tables()["log_tilt"])
    assert tilt == pytest.approx(0.0 if direction == "add" else -math.log1p(-0.1), rel=1e-6)
    parts = abs(found.log_normalizer) + tilt * untruncated.iterations - untruncated.log_probability_of_none()
    expected = budget.truncation_items(mechanism, DELTA_V, parts)
    # Eight outcomes of two that are eligible, waits of both, and the coin of every step.
    each = 8 * 2.0**-51 + (untruncated.iterations + 1) * 2.0**-62
    variation = 2 * untruncated.max_participations * each + untruncated.iterations * 2.0**-32
    compare(budget_lines(found, DELTA_V), expected, (found.relative_error, variation))
    event = 2 * untruncated.max_participations * 2.0**-38
    assert event < found.relative_error < 100 * event


U = 2.0**-24
SHARE = 2.0**-51  # of a choice's probability; of its own, for each of the choices


def product(*errors):
    return math.expm1(sum(map(math.log1p, errors)))


def waits(p, most, n, start=0.0):
    """Two ends of a wait, 2^-38 together, over the chance of its step; the last wait; hazards of n steps."""
    return math.expm1(most * 2.0**-38 / p + 2.0**-38 + n * 2.0**-44 + start)


def share(number, least):
    """Of a choice among so many, of this probability at least."""
    return SHARE * (1 / least + number)


DRAW_ERRORS = [
    (ja.Poisson(40, 0.3), waits(0.3, 40, 40)),
    (ja.Poisson(40, 1e-5), waits(1e-5, 40, 40)),
    (ja.BMinSep(41, 4, 1.0, False), 0.0),
    (ja.CyclicPoisson(41, 4, 0.3), math.expm1(11 * share(2, 0.3) + share(4, 1 / 4))),
    (ja.BallsInBins(41, 4), math.expm1(share(4, 1 / 4))),
    (ja.BMinSep(41, 4, 0.3, False), waits(0.3, 11, 41)),
    (ja.BMinSep(41, 4, 0.3), waits(0.3, 11, 41, share(4, 0.3 / 1.9))),
    # One participation is left from step 8 on, with 33 steps for it.
    (ja.BalancedMinSep(41, 4, 3), waits(1 / 33, 3, 41)),
    (ja.BalancedMinSep(41, 4, 2.5), waits(1 / 33, 3, 41, 3 * share(2, 1 / 6))),
    (ja.EpochwiseAllocation(41, 8, 3), waits(1 / 8, 6, 41)),
    # Counts 1 and 2, p^2 / (1 - (1-p)^2) for the latter.
    (ja.MultiAttribution(41, 4, 0.2, 2, False), waits(0.36, 11, 41, 11 * share(2, 0.04 / 0.36))),
]


@pytest.mark.parametrize("scheme, expected", DRAW_ERRORS, ids=str)
def test_errors_of_draws(scheme, expected):
    assert scheme.draw_errors[0] == pytest.approx(expected, rel=1e-9, abs=0)
    at = ja.Mechanism(scheme, ja.BandedToeplitz.identity(), 1.0)
    assert plain(at, "remove").relative_error == pytest.approx(expected, rel=1e-9, abs=0)
    assert scheme.draw_errors[1] == scheme.max_participations * (scheme.iterations + 1) * 2.0**-62
    assert plain(at, "remove").total_variation == scheme.draw_errors[1]


def test_counts_too_rare_to_draw_are_a_distance():
    scheme = ja.MultiAttribution(20, 4, 0.01, 40)
    weights = scheme.count_weights()
    rare = int(((weights > 0) & (weights < 2.0**-30)).sum())
    assert rare > 20 and scheme.draw_errors[1] == 5 * (21 * 2.0**-62 + rare * SHARE)


def test_errors_of_batch_sizes_and_of_participations_multiply():
    scheme = ja.TruncatedBMinSep(120, 4, 0.1, 50, 600)
    relative, variation = scheme.side_information.error()
    of = plain(ja.Mechanism(scheme, ja.BandedToeplitz.identity(), 2.5), "remove")
    assert relative > 0
    assert of.relative_error == pytest.approx(product(relative, scheme.draw_errors[0]), rel=1e-9)
    assert of.total_variation == variation + scheme.draw_errors[1]


def one(scheme, sigma=1.5, bands=1):
    return ja.Mechanism(scheme, ja.BandedToeplitz.square_root(bands), sigma)


def errors(scheme, sigma=1.5):
    at = one(scheme, sigma)
    return scheme.replicas(at).errors(at)


def test_errors_of_first_steps_of_pairs():
    """Relative where both phases are likely; where attraction makes two phases rare, as a distance."""
    scheme, of_choices = ja.BallsInBins(40, 4), 2 * 10 * 3 * SHARE
    for sigma, rare in ((3.0, 0), (0.6, 12)):  # two phases that differ
        relative, variation = errors(scheme, sigma)
        of_starts = SHARE * (16 + rare) + SHARE * (4 if rare else (3 + math.exp(10 / sigma**2)) * 4)
        waits = math.expm1(2 * 2.0**-38 + 42 * 2.0**-43 + 2 * 10 * 2.0**-38 + of_starts)
        assert relative == pytest.approx(waits, rel=1e-2)
        known = 2 * scheme.draw_errors[1] + of_choices + rare * SHARE
        assert variation == pytest.approx(known, rel=1e-9)


def test_errors_of_pairs_of_a_table():
    """Waits and outcomes of both replicas over their chances, which attraction makes smaller by a ratio."""
    scheme = ja.CustomScheme([0.05] * 400, 20)
    log_z, (relative, variation) = log_normalizer(one(scheme, 50.0)), errors(scheme, 50.0)
    least = 2 * 20 * 2.0**-38 / 0.05  # without attraction
    assert least < relative < 1.1 * least + 402 * 2.0**-48 and 0 < log_z < 0.1
    # 20 outcomes of each replica, of three in a state of two: that one, the other or both participate.
    assert variation == pytest.approx(2 * (scheme.draw_errors[1] + 20 * 3 * SHARE), rel=1e-12)
    assert errors(scheme, 0.7)[0] > 1.1 * least


def test_rounding_of_sums_over_epochs():
    count, M, b, ratio, error = 5, 100, 30, 3.0, 7.0
    offset, largest = -(b - 1) * math.log((M - b) / (M - b + 1)), count * ratio
    items = [
        error,
        11 * (2 * largest + offset),
        7 * largest + 6 * offset + 8 * 7 + 12,
        4 * largest + 2 * offset,
    ]
    assert epochs.rounding_bound(count, M, b, ratio, error) == pytest.approx(U * count * sum(items), rel=1e-9)


def test_errors_of_two_replicas_have_those_of_their_starts(monkeypatch):
    """The choice of both first eligible steps is drawn, too, with an error of either kind."""
    mechanism = ja.Mechanism(ja.BMinSep(41, 4, 0.3), ja.BandedToeplitz.square_root(4), 1.0)
    assert replica_table._start_errors(mechanism)[0] > 0

    def errors(of_starts):
        monkeypatch.setattr(replica_table, "_start_errors", lambda _: of_starts)
        monkeypatch.setattr(replica_table, "_relative_error", replica_table._relative_error.__wrapped__)
        return replica_table.errors(mechanism)

    real = replica_table._relative_error
    without = errors((0.0, 0.0))
    monkeypatch.setattr(replica_table, "_relative_error", real)
    relative, variation = errors((1e-3, 1e-3))
    assert relative - without[0] >= 1e-3 and variation - without[1] >= 0.99e-3
