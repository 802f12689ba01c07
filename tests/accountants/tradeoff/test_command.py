"""`jaxacct tradeoff`: numbers, one-line refusals, plans."""

import json
import math

import numpy as np
import pytest

from jaxacct.accountants import tradeoff
from jaxacct.cli.commands import tradeoff as command
from jaxacct.cli.usage import parse
from tests import commands
from tests.refusals import refused


def run(capsys, *words, command=("tradeoff",)):
    return commands.command(capsys, *command, *words)


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


GD = dict(steps=5, stepsize=0.05, noise_std=1.0, grad_sensitivity=1.0, num_examples=10)
GD |= dict(strong_convexity=1.0, smoothness=10.0)
CGD = dict(epochs=5, batches_per_epoch=40, batch_size=1500, stepsize=0.05, noise_std=0.01)
CGD |= dict(grad_sensitivity=10.0, smoothness=32.5, strong_convexity=0.002)
SGD = dict(steps=6, batch_size=2, num_examples=10, stepsize=0.1, noise_std=1.0, grad_sensitivity=1.0)
SGD |= dict(smoothness=1.0)
SIZES = dict(dataset_size=12, num_microbatches=3, microbatch_size=2, num_epochs=1, group_size=2)
SIZES |= dict(sampling="shuffling")
OF_PMF = dict(epsilon=1.0, pmf=tradeoff.participation_pmf(**SIZES))
THIN = tradeoff.Subsampled(tradeoff.Gaussian(1.0), 0.1)

CHANGES = [
    (tradeoff.noisy_gd_gdp, GD, dict(steps=[0], noise_std=[0.0], grad_sensitivity=[-1.0], diameter=[0.0])),
    (tradeoff.noisy_gd_gdp, GD, dict(stepsize=[0.0, math.nan, 0.2, [0.1, 0.1]], num_examples=[2.5])),
    (tradeoff.noisy_gd_gdp, GD, dict(strong_convexity=[11.0])),
    (tradeoff.noisy_gd_gdp, GD | dict(strong_convexity=0.0), dict(stepsize=[0.21])),
    (tradeoff.noisy_cgd_gdp, CGD, dict(batch_index=[41], epochs=[0])),
    (tradeoff.noisy_sgd_accountant, SGD, dict(batch_size=[11], window=[7, 0], noise_split=[1.0])),
    (tradeoff.noisy_sgd_accountant, SGD, dict(noise_std=[-1.0], steps=[0], stepsize=[3.0])),
    (tradeoff.participation_pmf, SIZES, dict(dataset_size=[0], num_microbatches=[0], microbatch_size=[-1])),
    (tradeoff.participation_pmf, SIZES, dict(num_epochs=[1.5], group_size=[13, True], sampling=["random"])),
    (tradeoff.filtered_participation_pmf, SIZES | dict(num_microbatches=1), dict(min_kept=[0, 2])),
    (tradeoff.mixture_delta, OF_PMF, dict(sigma=[0.0, -1.0, math.nan, math.inf])),
]
CALLS = [
    ("batch_size", lambda: tradeoff.noisy_cgd_gdp(**CGD, num_examples=60001)),
    ("delta", lambda: tradeoff.rdp_to_epsilon(1.0, 1.0)),
    ("method", lambda: tradeoff.rdp_to_epsilon(1.0, 0.1, "magic")),
    ("contractions", lambda: tradeoff.shifted_interpolation_gdp([0.0], [1.0], 1.0)),
    ("sensitivities", lambda: tradeoff.shifted_interpolation_gdp([1.0], [math.nan], 1.0)),
    ("method", lambda: tradeoff.calibrate_noise(1.0, 1e-5, method="x")),
    ("noise_std", lambda: tradeoff.calibrate_noise(1.0, 1e-5, method="gd", noise_std=1.0)),
    ("diameter", lambda: tradeoff.exponential_mechanism_gdp(lipschitz=1.0)),
    ("strong_convexity", lambda: tradeoff.contraction_factor(0.1, 2.0, 1.0)),
    ("divide", lambda: tradeoff.participation_pmf(**SIZES | {"dataset_size": 13})),
    ("sum to 1", lambda: tradeoff.ParticipationPMF(np.array([1, 2]), np.array([0.5, 0.4]))),
    ("at least 0", lambda: tradeoff.ParticipationPMF(np.array([1, 2]), np.array([1.5, -0.5]))),
    ("ascending", lambda: tradeoff.ParticipationPMF(np.array([2, 1]), np.array([0.5, 0.5]))),
    ("pmf", lambda: tradeoff.mixture_delta(1.0, None, 1.0)),
    ("tail_mass", lambda: tradeoff.tail_lower_tradeoff(0.1, 1.0, 1.5)),
    ("head_mass", lambda: tradeoff.tail_upper_tradeoff(0.1, 1.0, 1.0)),
    ("mu", lambda: tradeoff.tail_upper_tradeoff(0.1, 0.0, 0.1)),
    ("alpha", lambda: tradeoff.tail_lower_tradeoff(-0.1, 1.0, 0.1)),
    ("weights must", lambda: tradeoff.GaussianMixture(np.array([1.0, 2.0]), np.array([0.3, 0.3]))),
    ("lost must", lambda: tradeoff.GaussianMixture(np.array([1.0, 2.0]), np.array([0.75, 0.75]), -0.5)),
    ("weights must", lambda: tradeoff.GaussianMixture(np.array([1.0, 2.0]), np.array([1.5, -0.5]))),
    ("weights must", lambda: tradeoff.GaussianMixture(np.array([1.0]), np.array([0.5, 0.5]))),
    ("mus must", lambda: tradeoff.GaussianMixture(np.array([math.nan]), np.array([1.0]))),
    ("count must be at most 1000000000", lambda: tradeoff.Composed(((THIN, 10**9 + 1),)).delta(1.0)),
    ("size must be at most 1000, got 1000000", lambda: THIN.group(1_000_000)),
]


@pytest.mark.parametrize(("function", "base", "changes"), CHANGES)
def test_bad_arguments(function, base, changes):
    for name, value in [(name, value) for name, values in changes.items() for value in values]:
        refused(name, function, **base | {name: value})


def test_bad_calls():
    for word, call in CALLS:
        refused(word, call)
    for kind in (tradeoff.participation_pmf, tradeoff.filtered_participation_pmf):
        with pytest.raises(NotImplementedError, match=r"jaxacct\.Poisson"):
            kind(**SIZES | {"sampling": "poisson"})


@pytest.mark.parametrize(
    "words",
    [
        "general --dataset-size 100 --num-epochs 2 --delta 1e-5 --epsilon 1e308",
        "general --dataset-size 100 --num-epochs 2 --delta 1e-5 --sigma 1e-160",
        "general --dataset-size 9 --num-epochs 112589990684262 --delta 1e-5 --sigma 1 --sampling subsampling",
        "last-iterate gd --num-examples 10 --steps 5 --stepsize 1e-300 --grad-sensitivity 1 --smoothness 1 "
        "--diameter 1 --noise-std 1 --delta 1e-5",
        "last-iterate sgd --num-examples 10 --steps 5 --batch-size 2 --stepsize .1 --grad-sensitivity 1 "
        "--smoothness 1 --diameter 1 --epsilon 1e200 --delta 1e-5",
    ],
)
def test_commands_refuse_in_one_line(words):
    refused("must", lambda: parse(command.app, words.split())())
