"""The best of K runs under stored plans, the draw of K, and the command."""

import json
import math
import stat

import numpy as np
import pytest

from jaxacct import BandedToeplitz, Mechanism, Plan, Poisson
from jaxacct.accountants import analytic
from jaxacct.accountants.gaussian import gaussian_delta
from jaxacct.accountants.selection import CertifiedProfile, PoissonRuns, select_best, with_mean
from jaxacct.calibration.tuning import certified_points, tuning
from jaxacct.cli.commands.tuning import _rounded
from jaxacct.cli.main import main
from jaxacct.core.claim import Claim, Target
from jaxacct.core.evidence import Bound
from tests.stored_plans import FOLDER, whole

RUNS = with_mean("logarithmic", 20.0)


def gaussian_plan(noise: float, epsilon: float = 1.0, slack: float = 1.01) -> Plan:
    """One full batch: the Gaussian mechanism, whose profile is known."""
    delta = gaussian_delta(epsilon, noise, 1.0) * slack
    claim = Claim(
        Mechanism(Poisson(1, 1.0), BandedToeplitz((1.0,)), noise), Target.at(epsilon, delta), None, None
    )
    return Plan(claim, Bound("unamplified"))


def test_a_plan_of_samples_gives_one_point_and_its_failure_probability_once():
    plan = whole("replicas")
    points, failure = certified_points(plan)
    budget = plan.target.budget
    assert points == [(plan.epsilon, budget.delta_v + plan.claim.reserved)]
    assert failure == budget.failure_probability
    found = tuning([plan], RUNS)
    assert found.delta == pytest.approx(20 * points[0][1] + failure, rel=1e-6)
    assert plan.epsilon < found.epsilon <= 2 * plan.epsilon + 1e-9


def test_an_accountant_gives_the_whole_profile():
    plan = gaussian_plan(2.0)
    points, failure = certified_points(plan)
    assert failure == 0
    for epsilon, delta in points:
        assert gaussian_delta(epsilon, 2.0, 1.0) <= delta <= gaussian_delta(epsilon, 2.0, 1.0) * (1 + 1e-9)
    from_all = tuning([plan], RUNS, 1e-3)
    assert (
        from_all.delta == 1e-3
    )  # below the mean of K times that of the plan: another epsilon of its profile
    assert from_all.epsilon > plan.epsilon
    with pytest.raises(ValueError, match="delta must be at least"):
        select_best(CertifiedProfile([plan.epsilon], [plan.delta]), RUNS, 1e-3)


@pytest.mark.parametrize("name", ["half", "logarithmic", "geometric", "poisson"])
def test_the_best_of_gaussian_runs_stays_below_the_bound(name):
    """Densities of the best of K outcomes of N(1, 2^2) and of N(0, 2^2), ranked upwards and downwards."""
    plan, runs = gaussian_plan(2.0), with_mean(name, 4.0)
    found = tuning([plan], runs, 1e-2)
    x = np.linspace(-14, 15, 20_001)
    step = x[1] - x[0]
    density = [np.exp(-(((x - mean) / 2) ** 2) / 2) / math.sqrt(8 * math.pi) for mean in (1.0, 0.0)]
    for order in (1, -1):
        best = []
        for each in density:
            below = np.minimum(np.cumsum(each[::order]) * step, 1.0)
            slope = np.exp(runs.log_slope_ratio(below, np.ones_like(below)))
            best.append(each[::order] * 4.0 / slope)
        for first, second in (best, best[::-1]):
            truth = np.maximum(0, first - math.exp(found.epsilon) * second).sum() * step
            assert truth <= found.delta


def test_several_points_of_one_mechanism_tighten_and_another_mechanism_loosens():
    one, other = gaussian_plan(2.0), gaussian_plan(2.0, 0.3)
    noisier, louder = gaussian_plan(4.0), gaussian_plan(1.5)
    alone = tuning([one], RUNS, 2e-3).epsilon
    assert tuning([one, other], RUNS, 2e-3).epsilon <= alone + 1e-9
    assert tuning([one, noisier], RUNS, 2e-3).epsilon == pytest.approx(alone, rel=1e-6)
    assert tuning([one, louder], RUNS, 2e-3).epsilon > alone


def test_reserves_of_batch_sizes_are_part_of_every_point():
    """Truncated batches and runs that stop: more than the accountant's bound alone."""
    truncated = whole("cut")
    assert (
        certified_points(truncated)[0][0][1]
        > truncated.target.budget.delta_v + truncated.truncation_delta / 2
    )
    plan = whole("analytic")
    accountant = plan.evidence.accountant
    for epsilon, delta in certified_points(plan)[0]:
        bound = analytic.delta_by(accountant, plan.mechanism, epsilon)
        assert delta == min(1.0, bound + (plan.claim.overflow.probability if plan.claim.overflow else 0.0))


def test_what_is_not_covered_is_refused():
    with pytest.raises(ValueError, match="at least one plan"):
        tuning([], RUNS)
    with pytest.raises(ValueError, match="composed with another"):
        tuning([whole("composed")], RUNS)
    with pytest.raises(ValueError, match="same unit"):
        tuning([whole("replicas"), whole("users")], RUNS)
    with pytest.raises(ValueError, match="must be certified"):
        tuning([gaussian_plan(2.0, slack=0.9)], RUNS)


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["tuning", *map(str, arguments)])
    return stop.value.code


def test_the_command_draws_once(tmp_path, capsys):
    plan, out = FOLDER / "analytic.json", tmp_path / "draw.json"
    draw = [plan, "--mean-runs", "5", "--distribution", "geometric", "--candidates", "3", "--out", out]
    assert run(*draw) == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    drawn = json.loads(out.read_text())
    assert len(drawn["candidates"]) == drawn["num_runs"] >= 1
    assert set(drawn["candidates"]) <= {0, 1, 2} and drawn["plans"] == [whole("analytic").claim.digest]
    assert drawn["statement"] in capsys.readouterr().out
    assert run(*draw) == 2
    assert "must be a new file" in capsys.readouterr().err
    assert json.loads(out.read_text()) == drawn


def test_the_command_shows_all_distributions_and_targets(capsys):
    assert run(FOLDER / "replicas.json", "--mean-runs", "20", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["distribution"] for row in found["distributions"]] == [
        "half",
        "logarithmic",
        "geometric",
        "poisson",
    ]
    assert found["distributions"][1]["epsilon"] == tuning([whole("replicas")], RUNS).epsilon
    assert run("--mean-runs", "20", "--epsilon", "8", "--delta", "1e-5") == 0
    # 4.29469 and 4.999999995e-07 rounded down: the best of runs with the printed target is (8, 1e-5).
    assert "logarithmic              4.294   4.999e-07" in capsys.readouterr().out
    printed = CertifiedProfile(np.array([4.294]), np.array([4.999e-07]))
    assert select_best(printed, RUNS, 1e-5, 0.0).epsilon <= 8


@pytest.mark.parametrize("value", [4.29469, 4.2941, 4.294, 1e-5, 5e-7, 0.30000000000000004, 12345.6, 1 / 3])
def test_printed_numbers_are_rounded_to_the_safe_side(value):
    """A guarantee is never printed smaller than it is, a target of a run never larger."""
    up, down = float(_rounded(value, True)), float(_rounded(value, False))
    assert down <= value <= up <= value * 1.0011 and down >= value / 1.0011
    if value in (4.294, 1e-5, 5e-7):
        assert up == down == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mean-runs", "20"], "plans, or epsilon and delta, must be given"),
        (["--mean-runs", "20", "--epsilon", "8"], "plans, or epsilon and delta, must be given"),
        (["PLAN", "--mean-runs", "20", "--epsilon", "8"], "epsilon must not be given together with plans"),
        (["PLAN", "--mean-runs", "0"], "mean_runs must be in"),
        (
            ["PLAN", "--mean-runs", "20", "--distribution", "half", "--delta", "1e-9"],
            "delta must be at least",
        ),
        (["PLAN", "--mean-runs", "20", "--candidates", "3"], "candidates and out must be given together"),
        (["PLAN", "--mean-runs", "20", "--candidates", "3", "--out", "x"], "out must be given together with"),
        (["PLAN", "--mean-runs", "20", "--distribution", "fixed"], "distribution"),
        (["missing.json", "--mean-runs", "20"], "missing.json"),
        (["PLAN", "--mean-runs", "20", "--delta", "1e-9"], "delta must be at least"),
        (["PLAN", "USERS", "--mean-runs", "20"], "plans must protect the same unit"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    files = {"PLAN": FOLDER / "replicas.json", "USERS": FOLDER / "users.json"}
    assert run(*(files.get(word, word) for word in arguments)) == 2
    found = capsys.readouterr()
    assert found.out == "" and message in found.err and found.err.count("\n") == 1


def test_poisson_may_release_nothing():
    assert min(PoissonRuns(0.5).draw() for _ in range(60)) == 0  # false alarms: (1 - e^-1/2)^60 < 1e-24
