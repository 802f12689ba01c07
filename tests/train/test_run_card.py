"""`jaxacct check-run` finds every forged run; model, card and plan of an honest one belong together."""

import dataclasses
import hashlib
import json
import shutil

import pytest

from jaxacct import Plan
from jaxacct.common.files import json_digest
from jaxacct.report.run_card import RunCard, about_plan, digest_of_files, read_plan
from tests.commands import exit_code
from tests.train.runs import PARAMS, ROWS, data, fit, loss, plan
from train.optimizers import sgd

pytestmark = pytest.mark.usefixtures("shared_programs")


def covered(epsilon=1e9, **changed) -> Plan:
    return plan("poisson", dataset_size=ROWS, iterations=4, epsilon=epsilon, **changed)


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """A folder with a plan, a run of it and the run of another plan with the same noise."""
    folder = tmp_path_factory.mktemp("runs")
    for name, made in (("", covered()), ("other-", covered(epsilon=2e9))):
        made.save(folder / f"{name}plan.json")
        fit(made, PARAMS, loss, data(), sgd(0.1, 4), out=folder / f"{name}run", steps=3)
    return folder


def edit(path, digest=None, **changed):
    """Change values of a JSON file; with `digest` make its digest that of the new values."""
    values = json.loads(path.read_text())
    values |= {name: change(values[name]) for name, change in changed.items()}
    if digest:
        values["digest"] = digest(values)
    path.write_text(json.dumps(values))


def card(folder, **changed):
    """Edit the card and compute its digest again."""

    def digest(values):
        return json_digest({name: value for name, value in values.items() if name != "digest"})

    edit(folder / "run/result.json", digest, **changed)


def in_plan(**changed):
    return lambda about: about | changed


def less_noise(folder):
    digest = lambda values: json_digest([values["claim"], values["evidence"]])  # noqa: E731
    edit(folder / "plan.json", digest, claim=lambda claim: claim | {"noise_multiplier": 0.9})


def of_other(folder):
    """Name the other plan in the card, with all that follows from it."""
    card(folder, plan=lambda _: about_plan(read_plan(folder / "other-plan.json")))


def parameter(folder):
    return folder / "run/model/model.safetensors"


FORGERIES = {
    "edited plan": lambda at: edit(at / "plan.json", claim=lambda claim: claim | {"dataset_size": 7}),
    "plan with less noise and its digest": less_noise,
    "other plan with the same noise": lambda at: shutil.copy(at / "other-plan.json", at / "plan.json"),
    "edited card": lambda at: edit(at / "run/result.json", steps=lambda _: 2),
    "more steps than the plan": lambda at: card(at, steps=lambda _: 5),
    "smaller epsilon in the card": lambda at: card(at, plan=in_plan(epsilon=1.0)),
    "other data size in the card": lambda at: card(at, plan=in_plan(dataset_size=ROWS - 1)),
    "other guarantee in the card": lambda at: card(
        at, guarantee=lambda words: words.replace("1000000000", "1")
    ),
    "card of the other plan": of_other,
    "nothing is uncovered": lambda at: card(at, not_covered=lambda _: []),
    "no clip norm": lambda at: card(at, clip_norm=lambda _: 0.0),
    "changed byte of the model": lambda at: parameter(at).write_bytes(parameter(at).read_bytes() + b" "),
    "missing file of the model": lambda at: parameter(at).unlink(),
    "file added to the model": lambda at: (at / "run/model/w2").write_text(""),
    "model of another run": lambda at: (
        shutil.rmtree(at / "run/model"),
        shutil.copytree(at / "other-run/model", at / "run/model"),
    ),
    "no model": lambda at: shutil.rmtree(at / "run/model"),
    "no card": lambda at: (at / "run/result.json").unlink(),
    "model elsewhere": lambda at: (
        (at / "run/model").rename(at / "elsewhere"),
        (at / "run/model").symlink_to(at / "elsewhere"),
    ),
}


def check(folder, *options) -> int:
    return exit_code("check-run", folder / "run", folder / "plan.json", *options)


def test_an_honest_run_and_a_copy_of_what_is_published(honest, tmp_path, capsys):
    made = Plan.load(honest / "plan.json")
    assert check(honest) == 0
    said = capsys.readouterr().out
    for words in ("belong together", made.digest, made.statement(), "3 of 4 steps", "on trust", "verify"):
        assert words in said
    (tmp_path / "run").mkdir()
    shutil.copy(honest / "plan.json", tmp_path)
    shutil.copy(honest / "run/result.json", tmp_path / "run")
    shutil.copytree(honest / "run/model", tmp_path / "run/model")
    assert check(tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["plan"] == made.digest
    kept = (honest / "run/.gitignore").read_text().split()
    assert kept == ["/*", "!/model", "!/metrics.jsonl", "!/result.json"]


def test_a_plan_that_is_not_certified_belongs_to_no_run(honest):
    made = Plan.load(honest / "plan.json")
    less = dataclasses.replace(made.mechanism, noise_multiplier=1e-6)
    forged = dataclasses.replace(made, claim=dataclasses.replace(made.claim, mechanism=less))
    run_card = RunCard.load(honest / "run")
    assert run_card.flaws(honest / "run", made) == []
    assert run_card.flaws(honest / "run", forged) == ["plan is not certified"]


def test_two_files_have_another_digest_than_one_whose_name_lists_both(tmp_path):
    for name, content in (("a", b"1"), ("b", b"2")):
        (tmp_path / name).write_bytes(content)
    of_two = digest_of_files(tmp_path)
    (tmp_path / "a").rename(tmp_path / f"a\n{hashlib.sha256(b'2').hexdigest()} b")
    (tmp_path / "b").unlink()
    assert digest_of_files(tmp_path) != of_two


def test_a_forged_run_is_found(honest, tmp_path, capsys):
    for number, (forgery, forge) in enumerate(FORGERIES.items()):
        forged = tmp_path / str(number)
        shutil.copytree(honest, forged)
        forge(forged)
        assert check(forged) in (1, 2), forgery
        said = capsys.readouterr()
        assert "do NOT belong" in said.out or said.err.count("\n") == 1
        assert "Traceback" not in said.err


def test_a_report_shows_a_run_of_its_plan_and_refuses_others(honest, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxacct.report.html._pictures", lambda *_: "")

    def report(run):
        arguments = ["--out", str(tmp_path / "r.html"), "--run", str(honest / run), "--draws", "0"]
        return exit_code("report", honest / "plan.json", *arguments)

    assert report("run") == 0
    text = (tmp_path / "r.html").read_text()
    assert f"SHA-256 {RunCard.load(honest / 'run').model} of its files" in text
    assert report("other-run") == 2 and "another plan" in capsys.readouterr().err


def test_the_card_has_no_time_and_every_kind_of_plan_has_one(honest):
    stored = json.loads((honest / "run/result.json").read_text())
    assert {"plan", "steps", "clip_norm", "versions", "assumptions", "not_covered", "model"} <= {*stored}
    assert stored["plan"]["scheme"].startswith("Poisson") and stored["plan"]["adjacency"] == "zero-out"
    assert not {"created", "time", "date"} & {*stored, *stored["plan"]}
