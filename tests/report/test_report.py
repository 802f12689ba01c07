"""The reviewer's page, the risk numbers on it and its pictures."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from jaxacct import BandedToeplitz, BMinSep, Dense, Mechanism, Plan, Poisson, estimate_delta
from jaxacct.accountants.dice_plan import DicePlan
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from jaxacct.accountants.tradeoff.curves.parametric import EpsilonDelta
from jaxacct.accountants.tradeoff.plan import GeneralPlan
from jaxacct.core import truncation
from jaxacct.core.text import budget_items, rounded_up
from jaxacct.estimates.profile import Profile, privacy_profile
from jaxacct.report import facts, risk
from jaxacct.report import plots as plot
from jaxacct.report.facts import describe
from jaxacct.report.html import FIRST_LINE, _risk, measure, report
from jaxacct.report.page import ASSUMPTIONS
from jaxacct.statistics.composed import TabulatedProfile
from tests.commands import exit_code
from tests.refusals import refused
from tests.stored_plans import KINDS, analytic, forged, whole
from tests.train.runs import plan_of

VOID = {"meta", "br", "path", "use", "line"}


class Page(HTMLParser):
    """Refuses tags that do not close, and all that a page could load or run."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "iframe", "link", "img", "object", "form")
        for name, value in attrs:
            assert not name.startswith("on")
            assert name not in ("src", "href", "xlink:href") or value.startswith("#"), (tag, name, value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


@pytest.fixture(autouse=True)
def pictures(monkeypatch):
    """All pictures are drawn, without ticks and places of words, which take half of the time."""

    def without_ticks(figure, svg=plot.svg):
        figure.set_layout_engine("none")
        for axes in figure.axes:
            axes.set(xticks=[], yticks=[])
            axes.minorticks_off()
        return svg(figure)

    monkeypatch.setattr(plot, "svg", without_ticks)


def test_every_kind_of_plan_has_a_page():
    """Statement, every budget line and the commands are on it; nothing is loaded, nothing runs."""
    for kind in KINDS:
        plan = whole(kind)
        page = Page(report(plan, "<b>&.json"))
        words = " ".join(page.words.split())
        assert " ".join(plan.statement().split()) in words
        assert all(name in words for name, _ in budget_items(plan.verdict))
        assert "jaxacct verify '<b>&.json'" in words


def test_a_plan_that_is_not_certified_says_so_first_and_promises_nothing():
    mechanism = Mechanism(BMinSep(24, 3, 0.05), BandedToeplitz.square_root(3), 0.3)
    plan = plan_of(mechanism, None, 1.0, 1e-3)
    assert not plan.certified
    text = report(plan)
    assert text.index("NOT CERTIFIED") < text.index("The run")
    promises = Page(text).words.split("How to check")[0].split("What an")[1]
    assert "refused" in text and "at most" not in promises


def test_a_page_without_matplotlib_has_no_pictures(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = report(whole("replicas"))
    assert "<svg" not in text and "matplotlib was not installed" in Page(text).words


def test_the_tests_it_names_exist():
    for _, _, named in ASSUMPTIONS:
        path, function = named.split("::")
        assert f"def {function}(" in (Path(__file__).parents[2] / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("shift", [0.3, 1.0, 3.0])
def test_the_risk_of_a_gaussian_is_that_of_its_best_test(shift):
    """Its trade-off function is known: from the whole profile exactly, from one point a bound above it."""
    rates = np.array([0.0, 1e-4, 0.01, 0.3, 0.9, 1.0])
    exact = stats.norm.cdf(stats.norm.ppf(rates) + shift)
    # Its best tests have thresholds from below -3 to above 3: epsilons up to 3 shift + shift^2 / 2.
    epsilons = np.linspace(0, 4.5 * shift + shift**2 / 2, 4000)
    deltas = np.array([gdp_delta(float(e), shift) for e in epsilons])
    found = risk.true_positive_rate(epsilons, deltas, rates)
    np.testing.assert_allclose(found[1:], exact[1:], rtol=2e-4)
    assert found[0] <= deltas[-1] + 1e-12
    assert risk.advantage(epsilons, deltas) == pytest.approx(2 * stats.norm.cdf(shift / 2) - 1, rel=1e-6)
    for epsilon, delta in zip(epsilons[::500], deltas[::500], strict=True):
        assert np.all(risk.true_positive_rate(epsilon, delta, rates) >= exact - 1e-12)
        assert risk.advantage(epsilon, delta) >= 2 * stats.norm.cdf(shift / 2) - 1 - 1e-12


def test_extreme_points():
    rates = np.array([0.0, 0.5, 1.0])
    for epsilon in (0.0, 5.0, 800.0, math.inf):
        found = risk.true_positive_rate(epsilon, 1e-5, rates)
        assert np.all((found >= rates) & (found <= 1)) and found[2] == 1
        assert found[0] == pytest.approx(1e-5)
        assert 1e-5 <= risk.advantage(epsilon, 1e-5) <= 1


def test_bad_numbers_are_refused():
    for epsilon, delta, match in [
        (math.nan, 0.1, "epsilons must be at least 0"),
        (-1.0, 0.1, "epsilons must be at least 0"),
        (1.0, math.nan, "deltas must be in"),
        (1.0, 1.1, "deltas must be in"),
        ([1.0, 2.0], 0.1, "equally many"),
        ([], [], "got empty"),
    ]:
        refused(match, risk.true_positive_rate, epsilon, delta, 0.5)
        refused(match, risk.advantage, epsilon, delta)
    for rate in (math.nan, 1.5):
        refused("false_positive_rate must be in", risk.true_positive_rate, 1.0, 0.1, rate)


ONE_STEP = Mechanism(Poisson(1, 1.0), BandedToeplitz((1.0,)), 2.0)


def a_gaussian_step() -> Plan:
    """A plan whose profile is known, so that measuring it draws nothing."""
    return plan_of(ONE_STEP, None, 1.0, 0.13)


def test_the_command(tmp_path, capsys):
    plan, out = tmp_path / "plan.json", tmp_path / "report.html"
    a_gaussian_step().save(plan)
    assert exit_code("report", plan, "--out", out, "--draws", "2000") == 0
    assert "differentially private" in capsys.readouterr().out
    assert out.read_text().startswith(FIRST_LINE)
    other = tmp_path / "notes.html"
    other.write_text("mine")
    for target, code in ((other, 2), (out, 0)):
        assert exit_code("report", plan, "--out", target, "--draws", "0") == code
    assert other.read_text() == "mine" and "is another file" in capsys.readouterr().err


def test_bands_of_fresh_draws_are_on_the_page_and_hold_the_truth(key, monkeypatch):
    """One Gaussian step, whose best test is known: above it, and below what the certified point says."""
    plan = a_gaussian_step()
    assert plan.certified
    assert measure(plan, 4000, key).num_samples == 0, "an accountant is exact"
    monkeypatch.setattr("jaxacct.accountants.analytic.exact", lambda *_, **__: None)
    bands = measure(plan, 4000, key)
    rates = np.array([0.01, 0.1, 0.5])
    exact = stats.norm.cdf(stats.norm.ppf(rates) + 0.5)
    assert np.all(risk.true_positive_rate(bands.epsilons, bands.upper, rates) >= exact)
    text = Page(report(plan, bands=bands)).words
    assert "interval, confidence 99.9 %" in text and "4,000 fresh draws" in text
    attacker = Page(report(plan)).words.split("What an attacker can do")[1].split("A sentence")[0]
    assert "estimate" not in attacker
    low, middle = risk.interval_of_tests(bands, rates)
    assert np.all(low <= exact) and np.all(low > rates / 2)
    np.testing.assert_allclose(middle, exact, atol=0.03)


def test_bands_of_a_composed_plan_hold_the_truth(key, monkeypatch):
    """Two Gaussians together are one: of mu 1/2 and 1/3, with the first one drawn."""
    asked = []

    def other(event):
        asked.append(event)
        t = np.linspace(-8, 8, 3201)
        values = stats.norm.cdf(1 / 6 - 3 * t) - np.exp(t) * stats.norm.cdf(-1 / 6 - 3 * t)
        return TabulatedProfile(t, np.minimum.accumulate(np.clip(values, 0.0, 1.0)))

    monkeypatch.setattr("jaxacct.estimates.estimate.event_profile", other)
    grid, together = np.array([0.0, 0.5, 1.0]), math.hypot(1 / 2, 1 / 3)
    options: dict[str, Any] = dict(num_samples=4000, compose_with="another", key=key)
    bands = privacy_profile(ONE_STEP, grid, **options)
    exact = [gdp_delta(float(e), together) for e in grid]
    plain = estimate_delta(ONE_STEP, 0.5, proposal="plain", **options)
    assert plain.high >= exact[1] and plain.value == pytest.approx(exact[1], abs=0.02)
    assert asked == ["another"] * 2 and bands.proposals["remove"].startswith("replicas")
    for side in bands.directions.values():
        assert np.all(side[2] >= exact) and not side[0].any()
        np.testing.assert_allclose(side[1], exact, atol=0.02)
    assert exact[0] - gdp_delta(0.0, 1.0 / 2.0) > 0.03  # without the other one it would be seen

    def one_point(mechanism, grid, **options):
        asked.append(options["compose_with"])
        bands = np.zeros((3, grid.size))
        return Profile(grid, *bands, {"remove": bands, "add": bands}, 0.999, 10, {})

    monkeypatch.setattr("jaxacct.report.html.privacy_profile", one_point)
    measure(whole("composed"), 10)
    assert asked[2:] == [whole("composed").compose_with]


def test_bands_of_a_truncated_plan_are_raised_by_what_truncation_may_add(monkeypatch):
    plan = whole("cut")
    seen = {}

    def drawn(mechanism, grid, **options):
        seen.update(options)
        bands = np.stack([np.full(grid.size, v) for v in (0.01, 0.02, 0.03)])
        return Profile(grid, *bands, {"remove": bands, "add": bands}, 0.999, 10, {})

    monkeypatch.setattr("jaxacct.report.html.privacy_profile", drawn)
    found = measure(plan, 10)
    sizes = plan.dataset_size, plan.max_batch_size
    added = [truncation.reserve(plan.mechanism.scheme, float(e), *sizes) for e in found.epsilons]
    assert min(added) > 0 and max(added) == added[0]
    implied = EpsilonDelta(plan.epsilon, plan.delta).delta(found.epsilons)
    np.testing.assert_allclose(found.upper, np.minimum(0.03 + np.array(added), implied), rtol=1e-12)
    assert found.upper[0] == 0.03 + added[0] > 0.03
    np.testing.assert_allclose(found.directions["add"][2], found.upper)
    assert not found.lower.any() and seen["compose_with"] is None
    monkeypatch.setattr(truncation, "covers", lambda *_: False)
    assert np.all(measure(plan, 10).upper == implied)


def test_reconstruction_is_bounded_and_would_not_be_with_less_noise():
    """One Gaussian step, one of 20 gradients at right angles: naming the likeliest one."""
    m, sigma, draws = 20, 0.5, 20_000
    mu = 1 / sigma
    epsilons = np.linspace(0, 4.5 * mu + mu**2 / 2, 100)
    outputs = sigma * np.random.default_rng(1).standard_normal((draws, m))
    outputs[:, 0] += 1.0
    right = (outputs.argmax(axis=1) == 0).mean()
    error = math.sqrt(math.log(1e6) / (2 * draws))

    def bound(noise):
        deltas = np.array([gdp_delta(float(e), 1.0 / noise) for e in epsilons])
        return float(risk.reconstruction(epsilons, deltas, 1 / m))

    assert right < bound(sigma) + error and right > bound(1.35 * sigma) + error
    assert risk.reconstruction(1.0, 0.01, [0.0, 1.0]).tolist() == pytest.approx([0.01, 1.0])
    refused("baseline must be in", risk.reconstruction, 1.0, 0.1, 1.5)
    assert "reconstruction of what is guessed with probability 1 %" in _risk(whole("plain"), None)


@pytest.mark.parametrize(
    "other",
    [
        GeneralPlan(1440, 1, 36, 1, "shuffling", 1, sigma=1.0, epsilon=50.0, delta=1e-5),
        DicePlan.calibrate(
            8.0, 1e-5, dataset_size=60, batch_size=6, iterations=5, clip_norm=1.0, error_clip_norm=0.5
        ),
    ],
    ids=["trade-off", "dice"],
)
def test_show_reads_plans_of_other_kinds_and_report_names_the_command(other, tmp_path, capsys):
    path = tmp_path / "plan.json"
    other.save(path)
    for arguments, code in ((["show", path], 0), (["report", path, "--out", tmp_path / "r.html"], 2)):
        assert exit_code(*arguments) == code
    said = capsys.readouterr()
    assert other.statement() in said.out
    assert f"`jaxacct show {path}`" in said.err and said.err.count("\n") == 1
    path.write_text(json.dumps(other.to_json() | {"epsilon": other.epsilon / 100}))
    assert exit_code("show", path) == 2 and "must be valid" in capsys.readouterr().err


def test_no_bound_is_rounded_down():
    for bound in (0.03014, 0.0301, 0.99949, 0.9999, 1.0, 1.0001e-5, 9.999e-4):
        assert bound <= float(rounded_up(bound)) <= min(1.0, bound * 1.02)


def test_pictures_of_a_mechanism(key):
    scheme = BMinSep(12, 3, 0.3)
    square_root, steps = BandedToeplitz.square_root(3), np.tri(12) - np.tri(12, k=-3)
    strategies = square_root, Dense(steps / np.sqrt(3))
    assert "<svg" in plot.svg(plot.participation(Mechanism(scheme, square_root, 1.0), key=key))
    for strategy, bands in zip(strategies, (square_root.coefficients, [3**-0.5] * 3), strict=True):
        figure = plot.matrices(Mechanism(scheme, strategy, 1.0), steps=8)
        assert "correlated noise" in plot.svg(figure)
        shown = figure.axes[0].images[0].get_array()
        np.testing.assert_allclose(shown[:3, 0], bands, rtol=1e-6)
        assert shown.shape == (8, 8) and not np.triu(shown, 1).any()


def test_the_interval_of_the_best_test_holds_between_points_of_the_grid():
    """Exact deltas of a Gaussian on a coarse grid: the truth is inside, and the ends meet on a fine one."""
    rates, mu = np.array([1e-3, 0.01, 0.1, 0.6]), 1.3
    exact = stats.norm.cdf(stats.norm.ppf(rates) + mu)
    for count, width in ((6, 1.0), (4000, 1e-3)):
        epsilons = np.linspace(0, 7, count)
        deltas = np.array([gdp_delta(float(e), mu) for e in epsilons])
        side = np.stack([deltas] * 3)
        bands = Profile(epsilons, *side, {"remove": side, "add": side}, 0.9, 1, {})
        low, middle = risk.interval_of_tests(bands, rates)
        high = risk.true_positive_rate(epsilons, deltas, rates)
        assert np.all(low <= exact + 1e-12) and np.all(exact <= high + 1e-12) and np.all(middle >= low)
        assert np.all(high - low < width)


def test_the_page_begins_with_the_statement_and_says_what_identifies_the_run():
    plan = whole("replicas")
    text = report(plan, fresh=plan.verdict)
    first = Page(text.split("<body>")[1].split("</p>")[0] + "</p>").words
    assert first.startswith("Differential privacy of a training run: (1, 0.001)Verified for this page with")
    assert first.endswith(plan.statement())
    words, digest = Page(text).words, plan.to_json()["digest"]
    for found in (digest, *plan.provenance.versions.values(), "clip norm", "no claim of mu-GDP"):
        assert found in words
    assert "name='viewport'" in text and "prefers-color-scheme: dark" in text and "@media print" in text
    assert words.count(digest) == 1


def test_a_forged_plan_is_not_shown_as_certified(tmp_path, capsys, monkeypatch):
    """A plan of 70 % of the noise loads, as its counts are those of more noise; fresh samples refute it."""
    monkeypatch.setattr("jaxacct.report.html._pictures", lambda *_: "")
    honest = whole("replicas")
    plan = forged(honest, noise_multiplier=0.7 * honest.noise_multiplier)
    plan.save(tmp_path / "plan.json")
    arguments = ["report", tmp_path / "plan.json", "--out", tmp_path / "r.html", "--draws", 0]
    assert exit_code(*arguments, "--json") == 1
    expected = {"certified": False, "verified": False, "out": str(tmp_path / "r.html")}
    assert json.loads(capsys.readouterr().out) == expected
    words = Page((tmp_path / "r.html").read_text()).words
    assert "NOT CERTIFIED: fresh samples do not verify this plan" in words.split("The mechanism")[0]
    assert plan.statement() not in words
    assert exit_code(*arguments, "--no-verify") == 0
    words = Page((tmp_path / "r.html").read_text()).words
    assert words.index("NOT VERIFIED: stored counts, which anyone can write") < words.index(plan.statement())


def test_a_plan_by_a_bound_needs_no_samples_to_be_verified(monkeypatch, tmp_path):
    monkeypatch.setattr("jaxacct.report.html._pictures", lambda *_: "")
    monkeypatch.setattr("jaxacct.core.plan.verify_claim", None)
    whole("analytic").save(tmp_path / "plan.json")
    assert exit_code("report", tmp_path / "plan.json", "--out", tmp_path / "r.html", "--draws", 0) == 0
    assert "The bound was computed again for this page" in Page((tmp_path / "r.html").read_text()).words


def test_a_delta_of_one_over_n_or_more_is_warned_of():
    mechanism = Mechanism(Poisson(4, 0.1), BandedToeplitz.identity(), 3.0)
    for delta, warned in ((0.0099, False), (0.01, True), (0.02, True)):
        plan = analytic(mechanism, 8.0, delta, dataset_size=100)
        assert ("Warning: delta" in Page(report(plan)).words.split("The mechanism")[0]) == warned
        assert ("is not below 1/n = 0.01" in describe(plan)) == warned


def test_two_implementations_are_named_where_both_certify_and_only_there():
    plan = whole("replicas")
    words = "Checked by two implementations"
    assert "NOT VERIFIED" in report(plan) and "NOT VERIFIED" not in report(plan, fresh=plan.verdict)
    assert words in report(plan, second={"verdict": "certified"})
    for second in (None, {"verdict": "not covered"}, {"verdict": "not certified", "differences": ["scale"]}):
        assert words not in report(plan, second=second)


def test_no_text_of_a_plan_shows_a_trivial_advantage():
    """The certified point alone bounds it by 0.9993 at epsilon 8; the equivalent mu is one of a Gaussian."""
    plan = Plan.load(Path(__file__).parents[1] / "fixtures/readme_plan.json")
    said = describe(plan)
    assert "advantage" not in said and "0.999" not in said
    mu = float(said.split("mu ")[1].split()[0])
    assert gdp_delta(plan.epsilon, mu) == pytest.approx(plan.delta, rel=0.01)
    assert {name for name, _ in facts.whole(plan)} <= set(facts.TERMS)
