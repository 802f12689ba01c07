"""`jaxacct spent`, and the limits of a fixed order on the command line."""

import json
import math

import pytest

import jaxacct as ja
from jaxacct.accountants import history
from jaxacct.accountants.history import epsilon_of_first_steps
from jaxacct.cli import main as cli
from jaxacct.report.facts import facts
from jaxacct.schemes.protocol.numbers import Numbers
from tests.refusals import refused


def run(capsys, *arguments: str) -> dict:
    assert cli.run(["spent", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fixed_order(**numbers) -> ja.FixedOrder:
    given = dict(iterations=300, separation=20, dataset_size=10_000, batch_size=100, min_separation=20)
    return ja.FixedOrder.from_numbers(Numbers(**given | numbers))


def test_events_of_the_command_line_are_those_of_the_function(capsys):
    found = run(capsys, "--event", "2,1,3", "--event", '{"kind": "ZCDpEvent", "rho": 0.02}', "--epsilon", "2")
    import dp_accounting as dp

    assert found["delta"] == ja.delta([(2.0, 1.0, 3), dp.dp_event.ZCDpEvent(0.02)], epsilon=2.0)
    assert run(capsys, "--event", '{"kind": "NonPrivateDpEvent"}', "--delta", "0.1")["epsilon"] is None


def test_an_estimate_of_a_run_together_with_events(capsys, monkeypatch):
    """Epsilon and delta are those of the run and all events."""
    run = "--scheme poisson --bands 1 --sampling-probability 0.1 --iterations 5 --noise-multiplier 2"
    given, seen = ["estimate", *run.split()], []

    def spy(mechanism, at, *, compose_with, **_):
        seen.append(compose_with)
        raise ValueError("seen")

    for name in ("estimate_epsilon", "estimate_delta"):
        monkeypatch.setattr(f"jaxacct.cli.commands.estimate.{name}", spy)
    event = ["--event", "4,1,1", "--event", '{"kind": "ZCDpEvent", "rho": 0.02}']
    for target in ("--delta 1e-5", "--epsilon 1"):
        assert cli.run([*given, *target.split(), *event]) == 2
        assert cli.run([*given, *target.split()]) == 2
    import dp_accounting as dp

    assert seen == [history.joined([(4.0, 1.0, 1), dp.dp_event.ZCDpEvent(0.02)]), None] * 2


def test_a_plan_of_a_fixed_order_says_its_limits_and_what_is_spent(capsys, tmp_path):
    """A device with a timer alone may join five times where the batches imply three: more noise."""
    assert fixed_order().participations == 3 and fixed_order().steps_per_epoch == 100
    scheme = fixed_order(max_participations=5)
    assert (scheme.participations, scheme.steps_per_epoch) == (5, None)
    plan = ja.calibrate(scheme, ja.BandedToeplitz.square_root(20), epsilon=8, delta=1e-6, dataset_size=10_000)
    rows = dict(facts(plan))
    assert rows["participations"] == "at most 5, at least 20 steps apart"
    rho = float(rows["zCDP"].removeprefix("rho = "))
    assert rho == pytest.approx(2.5 / plan.noise_multiplier**2, rel=1e-9)
    assert rho >= 2.5 / plan.noise_multiplier**2
    plan.save(tmp_path / "plan.json")
    found = run(capsys, str(tmp_path / "plan.json"), "--step", "40")
    expected = ja.epsilon([(plan.noise_multiplier / math.sqrt(2), 1.0, 1)], delta=1e-6)
    assert found["epsilon"] == pytest.approx(expected, rel=1e-3) and found["by"] == "accountant unamplified"
    assert cli.run(["spent", str(tmp_path / "plan.json"), "--step", "301"]) == 2
    assert "steps must be at most the run's 300, got 301" in capsys.readouterr().err


def test_fewer_participations_than_the_batches_have_room_for_are_refused():
    refused("batch_size must be smaller", fixed_order, max_participations=2)
    numbers = Numbers(10, 1, sampling_probability=0.1, max_participations=3)
    refused("max_participations does not apply to poisson", ja.Poisson.from_numbers, numbers)


@pytest.mark.parametrize("event", ["2,1,1", "1.5,1,1", "3,1,1"])
def test_printed_numbers_are_not_below_the_bound(event, capsys):
    """The attack: six digits to the nearest are below every other bound."""
    exact = run(capsys, "--event", event, "--delta", "1e-5")["epsilon"]
    assert cli.run(["spent", "--event", event, "--delta", "1e-5"]) == 0
    shown = float(capsys.readouterr().out.split("epsilon ")[1].split()[0])
    assert exact <= shown <= exact * (1 + 1e-5)


def test_reserves_of_a_plan_are_not_spent_twice(capsys, tmp_path, monkeypatch):
    """Truncated batches: 1.8757 by all of delta, where the divergence of one step is at least 2.028e-3."""
    run_of = dict(epsilon=2.0, delta=2e-3, dataset_size=100, options=ja.CalibrationOptions(accountant="pld"))
    truncated = ja.calibrate(ja.Poisson(1, 0.1), ja.BandedToeplitz.identity(), **run_of, max_batch_size=20)
    truncated.save(tmp_path / "plan.json")
    found = run(capsys, str(tmp_path / "plan.json"), "--step", "1")
    assert (found["epsilon"], found["by"]) == (truncated.epsilon, "the plan's own epsilon")
    stopped = ja.calibrate(ja.Poisson(1, 0.1), ja.BandedToeplitz.identity(), **run_of)
    stopped.save(tmp_path / "plan.json")
    deltas = []

    def spy(*args, delta, **options):
        deltas.append(delta)
        return epsilon_of_first_steps(*args, delta=delta, **options)

    monkeypatch.setattr("jaxacct.accountants.history.epsilon_of_first_steps", spy)
    assert 1.99 < run(capsys, str(tmp_path / "plan.json"), "--step", "1")["epsilon"] <= 2.0
    assert deltas == [stopped.delta - stopped.claim.reserved] and stopped.claim.reserved > 0
