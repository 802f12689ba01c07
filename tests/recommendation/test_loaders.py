"""recommend for a loader of one's own: exact noise, all matrices, and the command that certifies it."""

import dataclasses
import json
import math

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from jaxacct import BufferedToeplitz, CalibrationOptions, FixedOrder, Mechanism, Poisson, Toeplitz
from jaxacct.accountants import unamplified
from jaxacct.accountants.analytic import delta_by
from jaxacct.calibration.calibrate import calibrate
from jaxacct.calibration.choice import choice_of
from jaxacct.core.evidence import Bound
from jaxacct.core.shares import RANKED_SHARES
from jaxacct.recommendation import noise_estimate, result
from jaxacct.recommendation.search import recommend
from tests.commands import exit_code

RUN = dict(dataset_size=500, batch_size=50, iterations=30, epsilon=4.0, delta=1e-5)
SHORT = dict(dataset_size=600, batch_size=60, iterations=20, epsilon=4.0, delta=1e-4)


@dataclasses.dataclass(frozen=True)
class Certified:
    noise_multiplier: float
    choice: dict | None = None


@pytest.mark.parametrize("separation", [1, 10])
def test_candidates_have_the_noise_that_is_certified(separation):
    found = recommend(**RUN, scheme="fixed-order", min_separation=separation)
    assert {each.matrix for each in found.candidates} == {"optimal", "square-root", "buffered"}
    assert found.one_band is not None and found.chosen.error < found.one_band.error
    for each in found.candidates:
        assert isinstance(each.scheme, FixedOrder) and each.scheme.steps_per_epoch == 10
        assert each.accountant == "unamplified"
        if each.matrix != "buffered" and each.strategy.bands > separation:
            assert isinstance(each.strategy, Toeplitz)
    plan = calibrate(found.chosen.scheme, found.chosen.strategy, epsilon=4.0, delta=1e-5, dataset_size=500)
    least = unamplified.noise_multiplier_for(plan.mechanism, 4.0, plan.target.budget.delta)
    assert found.chosen.noise_multiplier <= least * (1 + 1e-3)
    assert least <= plan.noise_multiplier <= 1.011 * least


def test_a_fixed_order_of_epochs_needs_less_noise_than_shuffling_anew():
    """No two candidates have the same number of buffers."""
    anew, same = (recommend(**RUN, scheme="fixed-order", min_separation=b).chosen for b in (1, 10))
    assert isinstance(anew.strategy, BufferedToeplitz) and same.error < 0.9 * anew.error
    found = recommend(**RUN, scheme="fixed-order").candidates
    buffers = [each.strategy.named_bands for each in found if each.matrix == "buffered"]
    assert len(buffers) == len(set(buffers)) > 0


NUMBERS = "--dataset-size 500 --batch-size 50 --iterations 30 --epsilon 4 --delta 1e-5".split()


def test_the_command_says_how_to_certify(capsys):
    """At the noise of the adjacency, as text and as JSON."""
    given = "--scheme fixed-order --min-separation 10"
    options = [*NUMBERS, *given.split(), "--adjacency", "add-or-remove-one", "--memory-copies", "3"]
    assert exit_code("recommend", *options) == 0
    said = capsys.readouterr().out
    assert f"{given} " in said and "--adjacency add-or-remove-one --out plan.json" in said
    assert exit_code("recommend", *options, "--json") == 0
    assert json.loads(capsys.readouterr().out)["choice"]["adjacency"] == "add-or-remove-one"


@pytest.mark.parametrize("scheme", ["poisson", "fixed-order"])
def test_replace_one_is_ranked_at_its_own_noise(scheme):
    """DP-SGD's is exact, revealed participations need twice as much, and the recommendation certifies it."""
    found = recommend(**RUN, scheme=scheme, adjacency="replace-one")
    zero_out = recommend(**RUN, scheme=scheme)
    assert "adjacency" not in zero_out.choice.to_json()  # as plans were stored
    white = found.one_band
    assert white is not None
    name = "pld" if scheme == "poisson" else "unamplified"
    for factor, is_enough in ((0.97, False), (1.01, True)):
        step = Mechanism(white.scheme, white.strategy, factor * white.noise_multiplier, "replace-one")
        assert (delta_by(name, step, 4.0) <= 1e-5) == is_enough
    if scheme == "poisson":
        assert 1.05 < white.noise_multiplier / zero_out.one_band.noise_multiplier < 2
        return
    noises = [{each.matrix: each.noise_multiplier for each in one.candidates} for one in (found, zero_out)]
    assert noises[0] == pytest.approx({name: 2 * each for name, each in noises[1].items()})
    plan = found.calibrate()
    assert plan.certified and plan.mechanism.is_replace_one and choice_of(plan) == found.choice


def test_one_band_of_a_named_sampler_is_kept():
    for scheme in ("balls-in-bins", "b-min-sep"):
        assert {row.scheme.name for row in recommend(**SHORT, bands=1, scheme=scheme).candidates} == {scheme}


def test_one_band_of_redrawn_bins_is_certified_without_an_estimate():
    """Estimates rank larger separations, which nothing certifies with less noise, and are slow."""
    said = []
    how = dict(bands=1, scheme="epochwise-allocation", progress=lambda *report: said.append(report[0]))
    found = recommend(**SHORT, **how)
    assert found.chosen.scheme.min_separation == 1 and found.chosen.accountant == "redrawn-bins"
    certified = f"noise multiplier {found.chosen.noise_multiplier:.5g} (accountant redrawn-bins)"
    assert [text for text in said if text.startswith("certified")] == [
        f"certified without samples: {certified}, scheme epochwise-allocation, bands 1"
    ]


@pytest.mark.parametrize("scheme, accountant", [("balanced-min-sep", "unamplified"), (None, "pld")])
def test_a_bound_is_said_before_any_estimate(scheme, accountant, monkeypatch):
    """And it stands where no estimate can be had: no run is refused for it."""
    monkeypatch.setattr(noise_estimate, "MAX_TABLE_SIZE", 0)
    said, bands = [], {} if scheme is None else dict(bands=4)
    found = recommend(**SHORT, **bands, scheme=scheme, progress=lambda *report: said.append(report[0]))
    assert said[1].startswith("certified without samples: noise multiplier ")
    assert f"(accountant {accountant})" in said[1] and said[0] == "choosing: independent noise"
    if scheme is not None:
        plan = found.calibrate(CalibrationOptions(accountant="analytic"))
        assert plan.evidence == Bound(accountant) and plan.mechanism.strategy.bands == 4
        assert plan.noise_multiplier == pytest.approx(found.chosen.noise_multiplier, rel=1e-3)


@pytest.fixture(scope="module")
def small():
    return recommend(**SHORT)


def as_if_certified(found, excesses, monkeypatch) -> list:
    """Certify candidates at multiples of their estimates, others for real; return the ones that are asked."""
    real, asked, shares = result.calibrate, [], []

    def calibrated(scheme, strategy, **options):
        rows = [row for row in found.candidates if (row.scheme, row.strategy) == (scheme, strategy)]
        asked.append(rows[0] if rows else scheme)
        shares.append(options["options"].share)
        if scheme.name == "poisson":
            return real(scheme, strategy, **options)
        excess = excesses[min(len(asked), len(excesses)) - 1]
        return Certified(excess * rows[0].noise_multiplier)

    monkeypatch.setattr(result, "calibrate", calibrated)
    return asked, shares


@pytest.mark.parametrize("excesses, best", [((1.04,), 0), ((1.06, 1.0), 1), ((1.06, 1.1), 0), ((2, 2, 1), 2)])
def test_the_next_candidate_is_certified_where_one_exceeds_its_estimate(small, excesses, best, monkeypatch):
    """By 5 % at most it stays; with more, the next in rank that promises a smaller error is certified."""
    others = [row for row in small.candidates if row.strategy.bands > 1 and row != small.chosen]
    order = [small.chosen, *others]
    # Errors that fall by 3 %, so that a candidate of 1.06 times the noise is behind the next one.
    rows = []
    for i, row in enumerate(order):
        noise = row.noise_multiplier * math.sqrt(0.97**i * small.chosen.error / row.error)
        rows.append(dataclasses.replace(row, noise_multiplier=noise))
    found, said = dataclasses.replace(small, candidates=(*rows, small.one_band), place=0), []
    asked, shares = as_if_certified(found, excesses, monkeypatch)
    plan = found.calibrate(progress=lambda *report: said.append(report[0]))
    tried = rows[: 1 + min(2, sum(excess > 1.05 for excess in excesses))]
    assert [row for row in asked if row in rows] == tried
    assert shares == list(RANKED_SHARES[: len(asked)]) and sum(RANKED_SHARES) <= 1 + 1e-12
    assert plan.noise_multiplier == excesses[best] * rows[best].noise_multiplier
    assert bool(said) == (excesses[0] > 1.05)
    if best:
        assert "more than 5 % above the estimate" in said[0] and rows[1].describe() in said[0]
        assert said[-1].startswith(rows[best].describe()) and "takes the place" in said[-1]


@pytest.mark.parametrize("spent, tried", [(20, [60, 40]), (29, [60, 31]), (31, [60])])
def test_candidates_share_the_seconds(small, spent, tried, monkeypatch):
    """The next one has those that are left, if they are half; Poisson sampling needs none."""
    asked, seconds, now = as_if_certified(small, (2,), monkeypatch)[0], [], [0.0]

    def calibrated(scheme, strategy, *, options, **others):
        now[0] += spent
        if options.accountant is None:
            seconds.append(options.seconds)
        return certified(scheme, strategy, options=options, **others)

    certified = result.calibrate
    monkeypatch.setattr(result, "calibrate", calibrated)
    monkeypatch.setattr(result.Clock, "now", lambda self: now[0])
    small.calibrate()
    assert seconds == tried and asked[-1].name == "poisson"


def test_a_candidate_that_cannot_be_certified_leaves_the_plan_as_it_is(small, monkeypatch):
    real, said = result.calibrate, []

    def calibrated(scheme, strategy, **options):
        if (scheme, strategy) != (small.chosen.scheme, small.chosen.strategy):
            return real(scheme, strategy, **options | {"max_batch_size": 1})
        return Certified(20 * small.chosen.noise_multiplier)

    monkeypatch.setattr(result, "calibrate", calibrated)
    plan = small.calibrate(progress=lambda *report: said.append(report[0]))
    assert plan.noise_multiplier == 20 * small.chosen.noise_multiplier
    assert sum("max_batch_size must" in line for line in said) == 3


@pytest.mark.slow
def test_one_band_is_the_sampler_with_the_least_certified_noise():
    """Estimates rank others first that samples cannot reach: they end at 1.22 where this is .83."""
    run = dict(dataset_size=1_000_000, batch_size=1000, iterations=10_000, epsilon=1.0, delta=1e-7)
    found = recommend(**run, bands=1)
    rows = {row.scheme.name: row for row in found.candidates}
    assert found.chosen is rows["epochwise-allocation"]
    assert (
        found.chosen.noise_multiplier
        < rows["poisson"].noise_multiplier
        < rows["balls-in-bins"].noise_multiplier
    )
    plan = found.calibrate()
    assert plan.evidence == Bound("redrawn-bins")
    assert plan.noise_multiplier == pytest.approx(found.chosen.noise_multiplier, rel=1e-3)
    # Those of the others are certified, too: of Poisson sampling by the peer.
    assert (rows["poisson"].accountant, rows["balls-in-bins"].accountant) == ("pld", "random-allocation")
    events = PoissonSampledDpEvent(1e-3, GaussianDpEvent(rows["poisson"].noise_multiplier))
    assert 0.97e-7 < PLDAccountant().compose(events, 10_000).get_delta(1.0) < 1.003e-7


def test_dp_sgd_is_released_where_all_others_exceed_their_estimates(small, monkeypatch):
    said: list[str] = []
    asked, _ = as_if_certified(small, [20.0], monkeypatch)
    plan = small.calibrate(progress=lambda *report: said.append(report[0]))
    assert plan.evidence == Bound("pld") and plan.mechanism.scheme == Poisson(20, 0.1)
    assert len(asked) == 4, "two others, then Poisson sampling"
    assert choice_of(plan).bands == 1 and choice_of(plan).scheme == "poisson"
    assert "more than 5 % above the estimate" in said[0] and "poisson" in said[-1]
    named = small.calibrate(CalibrationOptions(accountant="unamplified"))
    assert named.noise_multiplier == 20 * small.chosen.noise_multiplier, "options are kept"
