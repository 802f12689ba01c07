"""`jaxacct tradeoff`: numbers, one-line refusals, plans."""

import json

import pytest

from jaxacct.cli import main as cli


def run(capsys, *words, command=("tradeoff",)):
    with pytest.raises(SystemExit) as left:
        cli.main([*command, *words])
    seen = capsys.readouterr()
    return left.value.code, seen.out, seen.err


GENERAL = ["general", "--dataset-size", "50000", "--num-epochs", "10", "--delta", "1e-5"]
GENERAL += ["--microbatch-size", "500", "--group-size", "4"]
CYCLIC = ["last-iterate", "cgd", "--num-examples", "60000", "--stepsize", ".05", "--grad-sensitivity", "10"]
CYCLIC += ["--smoothness", "32.5", "--strong-convexity", ".002", "--delta", "1e-5", "--steps", "2000"]
CYCLIC += ["--batch-size", "1500"]


def test_general_evaluates_and_calibrates(capsys):
    code, out, _ = run(capsys, *GENERAL, "--sigma", "2", "--json")
    found = json.loads(out)
    assert code == 0 and found["epsilon"] == pytest.approx(17.71041, abs=1e-4)
    assert found["adversary"] == "sampling-revealed" and found["adjacency"] == "replace"
    assert found["group_size"] == 4 and found["kind"] == "exact" and len(found["warnings"]) == 2
    code, out, _ = run(capsys, *GENERAL, "--epsilon", "17.7104", "--json")
    assert json.loads(out)["sigma"] == pytest.approx(2.0, rel=1e-4)


def test_last_iterate(capsys):
    code, out, _ = run(capsys, *CYCLIC, "--noise-std", ".01", "--json")
    found = json.loads(out)
    assert code == 0 and found["epsilon"] == pytest.approx(4.339159, rel=1e-6)
    assert found["theorem"] == "theorem 4.5" and found["adversary"] == "last-iterate"
    code, out, _ = run(capsys, *CYCLIC, "--epsilon", "4.339159", "--json")
    assert json.loads(out)["noise_std"] == pytest.approx(0.01, rel=1e-5)


def test_bad_input_is_one_line_and_2(capsys):
    for words, name in [
        (["nope"], 'Unknown command "nope". Available commands: general, last-iterate.'),
        ([*GENERAL, "--nonsense", "3"], "Unknown option: --nonsense"),
        (["last-iterate"], "METHOD"),
        (["last-iterate", "gd"], "--delta"),
        ([*GENERAL], "sigma"),
        ([*GENERAL, "--sigma", "0"], "sigma"),
        ([*GENERAL, "--sigma", "2", "--epsilon", "2"], "sigma"),
        ([*GENERAL, "--sigma", "2", "--num-microbatches", "3"], "divide"),
        ([*GENERAL, "--sigma", "2", "--sampling", "poisson"], "jaxacct.Poisson"),
        ([*GENERAL, "--epsilon", "-2"], "epsilon"),
        ([*CYCLIC], "noise_std"),
        ([*CYCLIC, "--noise-std", "-1"], "noise_std"),
        ([*CYCLIC[:-3], "5", *CYCLIC[-2:], "--noise-std", "1"], "whole epochs"),
        ([*CYCLIC, "--noise-std", "1", "--diameter", "0"], "diameter"),
        ([*CYCLIC[:-1], "7", "--noise-std", "1"], "batch_size"),
    ]:
        code, out, err = run(capsys, *words)
        assert code == 2 and out == "" and err.count("\n") == 1 and name in err


def test_alone_it_prints_its_help(capsys):
    code, out, err = run(capsys)
    assert code == 0 and "last-iterate" in out and err == ""


def test_plans_are_written(capsys, tmp_path):
    from jaxacct.accountants.tradeoff.plan import GeneralPlan, LastIteratePlan

    path = tmp_path / "plan.json"
    assert run(capsys, *GENERAL, "--epsilon", "8", "--out", str(path))[0] == 0
    assert GeneralPlan.load(path).epsilon == 8 and GeneralPlan.load(path).run.clip == "batch"
    code, _, error = run(capsys, *CYCLIC, "--epsilon", "4", "--out", str(path))
    assert code == 2 and "a plan of this kind" in error and error.count("\n") == 1
    path.unlink()
    words = [*CYCLIC, "--epsilon", "4", "--out", str(path)]
    words[words.index("--grad-sensitivity") : words.index("--strong-convexity")] = []
    code, _, error = run(capsys, *words)
    assert code == 2 and "num_classes and feature_norm, must be given" in error and not path.exists()
    assert run(capsys, *words, "--num-classes", "10", "--feature-norm", "8")[0] == 0
    made = LastIteratePlan.load(path)
    assert (made.steps, made.smoothness) == (2000, pytest.approx(32.502))
    assert made.grad_sensitivity == pytest.approx(2 * 130**0.5)
    code, _, error = run(capsys, *CYCLIC, "--noise-std", ".1", "--out", str(path))
    assert code == 2 and "out must not be given with noise_std" in error


def test_a_stored_plan_is_shown_and_an_edited_one_refused(capsys, tmp_path):
    """`show` computes the distribution of participations again."""
    path = tmp_path / "plan.json"
    words = ["general", "--dataset-size", "24", "--num-epochs", "2", "--delta", "1e-3", "--group-size", "3"]
    words += ["--num-microbatches", "2", "--microbatch-size", "3", "--epsilon", "6", "--json"]
    code, out, _ = run(capsys, *words, "--out", str(path))
    assert code == 0
    code, shown, _ = run(capsys, "show", str(path), command=())
    assert code == 0 and "sampling-revealed" in shown
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sigma": json.loads(out)["sigma"] * 0.99}))
    for given, said in (
        (["show", str(path)], "plan must be valid"),
        (["show", str(tmp_path / "none.json")], "cannot be read"),
    ):
        code, _, error = run(capsys, *given, command=())
        assert code == 2 and said in error and error.count("\n") == 1
    path.write_text("{}")
    assert "plan must have the schema" in run(capsys, "show", str(path), command=())[2]
