"""Bad input, hundreds of cases: one line that names the argument, exit 2 or ValueError, nothing written.

Searches are replaced by failures, so that a refusal after their start is seen.
"""

import functools
import json
import shlex
import time

import jax
import numpy as np
import pytest

import jaxacct as ja
from tests import calibrating
from tests.commands import exit_code
from tests.train.runs import plan
from train import load_model


def options_of(words: str) -> dict[str, str]:
    """The options of a command line, each with a value."""
    pairs = words.split()
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


RUN = "--dataset-size 3000 --batch-size 50 --iterations 60"
TARGET = "--epsilon 2 --delta 1e-2"
BOTH = f"{RUN} {TARGET}"
PROBLEM = f"{RUN} --scheme b-min-sep --bands 6 --strategy square-root"
CALIBRATE, ESTIMATE = f"{PROBLEM} {TARGET}", f"{PROBLEM} --epsilon 2 --noise-multiplier 1"
POISSON = f"--iterations 60 --strategy square-root --scheme poisson {TARGET}"

NO_INTEGER = ("0", "-3", "1.5", "x", "nan", "", "1e-3", "15e-1", "1k5", "1" + 25 * "0")
NOT_POSITIVE = ("0", "-1", "nan", "inf", "x", "")
# What one flag is refused for, each is: they are read by one function for all flags of a kind.
SOME_INTEGERS, SOME_NUMBERS, SOME_SIGMAS = ("0", "1.5", "x"), ("0", "nan", "inf"), ("-1", "nan", "1e-300")
NO_PROBABILITY = ("0", "1", "-0.1", "2", "nan", "inf", "x")
BAD_SIGMA = (*NOT_POSITIVE, "1e300", "1e-300")
OF_CALIBRATE = {
    "--iterations": NO_INTEGER,
    "--dataset-size": (*SOME_INTEGERS, "100000000000000000000", "40"),
    "--bands": (*SOME_INTEGERS, "61"),
    "--min-separation": (*SOME_INTEGERS, "5", "61"),
    "--batch-size": (*SOME_NUMBERS, "3001", "1e300"),
    "--epsilon": (*NOT_POSITIVE, "1e300", "10001"),
    "--delta": (*NO_PROBABILITY, "1e-400"),
    "--noise-multiplier": BAD_SIGMA,
    "--max-samples": SOME_INTEGERS,
    "--max-batch-size": SOME_INTEGERS,
    "--rule": ("sometimes", ""),
    "--scheme": ("poison", ""),
    "--strategy": ("optimall", "/no/such/file", ".", ""),
    "--out": ("/no/such/folder/plan.json", ".", "/proc/plan.json", 300 * "x"),
    "--truncate-to": ("50",),
    "--examples-per-user": ("2",),
}
OF_ESTIMATE = {
    "--iterations": SOME_INTEGERS,
    "--epsilon": ("-1", "nan", "inf", "x"),
    "--delta": ("1e-2",),  # and epsilon
    "--noise-multiplier": SOME_SIGMAS,
    "--samples": SOME_INTEGERS,
    "--confidence": NO_PROBABILITY,
    "--batch-size": SOME_NUMBERS,
}
# A command, the options that it has, and values of others or of one of these that it is refused for.
BAD_VALUES = [
    ("calibrate", CALIBRATE, OF_CALIBRATE),
    ("estimate", ESTIMATE, OF_ESTIMATE),
    ("estimate", f"{PROBLEM} --noise-multiplier 1", {"--delta": NO_PROBABILITY}),
    ("calibrate", POISSON, {"--sampling-probability": ("0", "-0.1", "1.5", "nan", "inf", "x", "1e-300")}),
]

STEPS = f"--iterations 60 {TARGET}"
RATE = f"{STEPS} --sampling-probability 0.1"
BINS = f"{BOTH} --scheme balls-in-bins"
CUT, USERS = (f"{BOTH} --bands 2 --scheme {name}" for name in ("truncated-b-min-sep", "multi-attribution"))
ONE_RUN = "--scheme poisson --bands 1 --sampling-probability 0.1 --iterations 5 --noise-multiplier 2"
ONE_RUN += " --delta 1e-5"
# A command line, and words of the one line that refuses it.
LINES = [
    ("calibrat", 'Did you mean "calibrate"?'),
    ("calibrate", "--iterations"),
    ("calibrate --iteration 5", "Did you mean --iterations instead of --iteration?"),
    ("calibrate --iterations", "--iterations"),
    (f"calibrate {RATE} --epsilon 8", "--epsilon specified multiple times"),
    ("calibrate --epochs 5", "did you mean --iterations, which are steps: epochs times"),
    ("calibrate --steps 5", "did you mean --iterations?"),
    ("calibrate --sigma=5", "did you mean --noise-multiplier?"),
    ("calibrate --eps 5", "did you mean --epsilon?"),
    ("verify --steps 5", "Unknown option: --steps"),
    ("check --seconds 3", "Unknown option: --seconds"),
    ("calibrate --scheme bminsep", "(bminsep: did you mean b-min-sep?)"),
    ("calibrate --scheme dp-sgd", "(dp-sgd: did you mean poisson, with --bands 1?)"),
    (f"calibrate {RATE} --strategy sqrt", "did you mean square-root?"),
    (f"calibrate --iterations 1.0005k {TARGET} --sampling-probability 0.1", "iterations"),
    (f"calibrate --iterations 9e99 {TARGET} --sampling-probability 0.1", "iterations must be at most"),
    (f"calibrate {RUN}", "--epsilon"),
    (f"calibrate {STEPS}", "dataset_size and batch_size"),
    (f"calibrate {STEPS} --dataset-size 3000", "dataset_size and batch_size"),
    (f"calibrate {STEPS} --batch-size 50", "dataset_size and batch_size"),
    (f"calibrate {BOTH} extra", "extra"),
    (f"calibrate {BOTH} --json 3", "3"),
    (f"calibrate {BOTH} --force", "force must not be given"),
    # Options that exclude or need each other.
    (f"calibrate {BOTH} --sampling-probability 0.1", "batch_size must not be given"),
    (f"calibrate {RATE} --scheme balls-in-bins", "sampling_probability"),
    (f"calibrate {RATE} --scheme poisson --min-separation 2", "min_separation does not apply to poisson"),
    (f"calibrate {BINS} --min-separation 60", "min_separation must not be given together with dataset_size"),
    (f"calibrate {STEPS} --batch-size 50 --scheme balls-in-bins", "must be given together"),
    (f"calibrate {RATE} --scheme poisson --cold-start", "cold_start"),
    (f"calibrate {RATE} --strategy coefficients.txt --bands 2", "bands must not be given with the coeffic"),
    ("estimate --iterations 60 --sampling-probability 0.1 --noise-multiplier 1", "epsilon or delta must be"),
    (f"estimate {ONE_RUN} --dataset-size 9", "dataset_size must not be given together with sampling_proba"),
    (f"calibrate {RATE} --bands 1 --max-batch-size 90", "dataset_size must be given with max_batch_size"),
    (f"calibrate {RATE} --scheme multi-attribution", "examples_per_user must be given"),
    (f"calibrate {RATE} --scheme truncated-b-min-sep", "truncate_to must be given"),
    # Files.
    ("show", '"show" parameter PLAN requires an argument'),
    ("show /no/such/plan.json", "cannot be read"),
    ("show .", "cannot be read"),
    ("show text.json", "not valid JSON"),
    ("show deep.json", "not valid JSON"),
    ("show list.json", "must hold a JSON object"),
    ("show empty.json", "not valid JSON"),
    ("show other.json", "schema"),
    ("verify /no/such/plan.json", "cannot be read"),
    ("verify deep.json", "not valid JSON"),
    ("verify other.json --max-samples 0", "max_samples must be"),
    ("verify other.json --max-samples -5", "max_samples must be"),
    ("verify other.json --rule never", "rule"),
    (f"calibrate {RATE} --out text.json", "out must be new or a plan"),
    (f"calibrate {RATE} --out link.json", "out must be new or a plan"),
    # Targets in words of risk.
    (f"calibrate {RUN} --tpr 0.1", "tpr and fpr", "given were tpr"),
    (f"calibrate {RUN} --tpr 0.01 --fpr 0.1", "tpr must be above fpr, got 0.01 and 0.1"),
    (f"calibrate {RUN} --tpr 0.5 --fpr 0.1 --epsilon 2", "must be one of", "given were epsilon, tpr, fpr"),
    (f"calibrate {RUN} --advantage 1", "advantage must be in (0, 1), got 1.0"),
    (f"calibrate {RUN} --advantage 0.1 --delta 1e-5", "advantage must not be given together with delta"),
    (f"calibrate {RUN} --mu 1", "mu and delta", "given were mu"),
    (f"recommend {RUN} --mu inf --delta 1e-5", "mu must be a finite number above 0, got inf"),
    (f"recommend {RUN} --mu 1 --delta 1e-5 --epsilon 2", "given were epsilon, delta, mu"),
    # What the search keeps.
    (f"calibrate {BOTH} --memory-copies -1", "memory_copies must be an integer of at least 0, got -1"),
    (f"calibrate {BOTH} --memory-copies 1.5", "--memory-copies: must be an integer", "'1.5'"),
    (f"calibrate {BOTH} --memory-copies 4 --bands 8", "bands must be at most memory_copies 4, got 8"),
    (f"calibrate {BOTH} --scheme poisson --memory-copies 4", "memory_copies must not be given where nothing"),
    (f"calibrate {BOTH} --workload speed", "workload must be prefix-sum, or a list", "got 'speed'"),
    (f"calibrate {BOTH} --workload momentum:2", "momentum must be from 0 to below 1, got 2.0"),
    (f"recommend {BOTH} --workload warmup:100", "warmup must be below iterations 60, got 100"),
    (f"recommend {BOTH} --strategy bisr", "strategy must be optimal", "got 'bisr'"),
    # Proposals.
    (f"calibrate {BOTH} --proposal replicas:65", "must be replicas:1..48,2..32, got 'replicas:65'"),
    (f"calibrate {BOTH} --proposal plain:2", "proposal must be plain, got 'plain:2'"),
    (f"calibrate {BOTH} --proposal pairs:3,0", "proposal family must be one of plain, replicas, joint-repl"),
    # How a plan is certified.
    (f"calibrate {BOTH} --accountant rdp", '"rdp" for --accountant. Choose from: "analytic"'),
    (f"calibrate {BOTH} --accountant pld --rule fixed", "rule must not be given together with accountant"),
    (f"calibrate {BOTH} --adjacency add", '"add" for --adjacency. Choose from: "zero-out"'),
    (f"calibrate {BOTH} --checkpoint-dir other.json", "checkpoint_dir must be a folder, got the file other"),
    (f"calibrate {CUT} --truncate-to 0", "truncate_to must be an integer of at least 1, got 0"),
    (f"calibrate {CUT} --truncate-to 20", "truncate_to", "least the largest expected batch size 50, got 20"),
    (f"calibrate {USERS} --examples-per-user 4000", "examples_per_user must be at most 1000, got 4000"),
    # Events.
    (f"estimate {ONE_RUN} --event 1,2", "event must be NOISE,RATE,STEPS or JSON of an event, got '1,2'"),
    (f"estimate {ONE_RUN} --event 1,2,5", "events[0] must be an event that can be composed"),
    (f"estimate {ONE_RUN} --event 1,0.1,5 --adjacency replace-one", "compose_with must not be given with"),
    ("spent", "a plan must be given with --step, or --event, and not both"),
    ("spent --event 1,2 --delta 0.1", "event must be NOISE,RATE,STEPS or JSON of an event"),
    ("spent --event 1,0.1,5", "epsilon or delta must be given with --event"),
    ("spent --event 1,0.1,5 --step 3 --delta 0.1", "step must not be given with --event"),
    ("spent --event 1,1.5,5 --delta 0.1", "probability must be"),
    # Other commands.
    (f"recommend {BOTH} --scheme fixed-order --strategy amplified", "strategy must be optimal, square-root"),
    (f"recommend {BOTH} --scheme fixed-order --strategy buffered --memory-copies 2", "must be at least 3"),
    (f"estimate {RUN} --bands 2 --epsilon 1 --noise-multiplier 0", "noise_multiplier must be", "got 0.0"),
    (f"estimate {RUN} --epsilon 1 --noise-multiplier 1", "bands must be given here"),
    ("report other.json --out nowhere/r.html", "out must be in a folder that exists, got 'nowhere/r.html'"),
    ("report other.json --out r.html", "plan must have the schema 'jaxacct-plan', got 'another'"),
    ("check nowhere.json", "plan nowhere.json cannot be read"),
    ("verify other.json --replay --rule fixed", "rule must not be given together with replay"),
    (f"tradeoff general --dataset-size 50k --num-epochs 0 {TARGET}", "num_epochs must be an integer of at l"),
    ("train --plan nowhere.json --out run/", "plan nowhere.json cannot be read"),
    ("train --plan digits.json --out run/ --data mnist", "data_folder"),
    ("train --plan digits.json --out run/ --learning-rate -1", "learning_rate"),
    ("train --plan digits.json --out run/ --steps 1000", "steps must be at most"),
    ("train --plan other.json --out run/ --data imagenet", '"imagenet" for --data. Choose from: "digits"'),
    ("train --plan other.json --out run/ --clipping fast", '"fast" for --clipping. Choose from: "auto"'),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    (folder / "text.json").write_text("not ours\n")
    (folder / "deep.json").write_text(100_000 * '{"a":')
    (folder / "list.json").write_text("[1, 2]")
    (folder / "empty.json").write_text("")
    (folder / "other.json").write_text(json.dumps({"schema": "another"}))
    (folder / "coefficients.txt").write_text("1\n0.5\n")
    (folder / "link.json").symlink_to("text.json")
    plan(dataset_size=1440).save(folder / "digits.json")
    return folder


def contents(folder):
    return {path.name: (path.is_symlink(), path.read_bytes()) for path in sorted(folder.iterdir())}


@pytest.fixture(autouse=True)
def nothing_is_computed(monkeypatch, folder):
    def started(*_, **__):
        raise AssertionError("work was started")

    for place in ("jaxacct.recommendation.search.Estimates.at", "jaxacct.calibration.calibrate.Route"):
        monkeypatch.setattr(place, started)
    monkeypatch.chdir(folder)


def refused(arguments, folder, capsys):
    """The line on standard error."""
    before, started = contents(folder), time.thread_time()
    assert exit_code(*arguments) == 2
    assert time.thread_time() - started < 10
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxacct: ") and captured.err.count("\n") == 1, captured.err
    assert contents(folder) == before
    return captured.err


def test_a_bad_value_is_named(folder, capsys):
    cases = [(command, base, *case) for command, base, flags in BAD_VALUES for case in flags.items()]
    for command, base, flag, values in cases:
        names = {flag, flag[2:].replace("-", "_")}
        if flag in ("--bands", "--dataset-size", "--batch-size", "--min-separation"):
            names |= {"batch_size", "bands"}  # they are refused together
        for value in values:
            arguments = [word for pair in (options_of(base) | {flag: value}).items() for word in pair]
            line = refused([command, *arguments], folder, capsys)
            assert any(name in line for name in names), (value, line)


def test_a_bad_line(folder, capsys):
    for line, *words in LINES:
        seen = refused(shlex.split(line), folder, capsys)
        assert all(word in seen for word in words), (line, seen)


SCHEME, MATRIX = ja.BMinSep(8, 3, 0.2), ja.BandedToeplitz.square_root(2)
MECHANISM = ja.Mechanism(SCHEME, MATRIX, 1.0)
NO_NUMBER = (0, -1.0, float("nan"), float("inf"), "1", None, [1.0], True, 10**400)
NO_COUNT = (0, -1, 1.5, "3", None, [3], True, float("nan"))
GIVEN_COUNT = tuple(value for value in NO_COUNT if value is not None)  # None is the default
NO_CHANCE = (0, 1, -0.1, float("nan"), "0.1", None, [0.1])
NO_MECHANISM = (None, "mechanism", 1.0, SCHEME, [MECHANISM])
NO_GRID = ([], [1.0, 1.0], [-1.0], [np.nan], [[1.0]], None, ["a"])
certify = functools.partial(ja.calibrate, epsilon=1.0, delta=1e-3)
of_sizes = functools.partial(ja.Poisson.from_batch_size, iterations=5)
CALLS = [
    (call, name, values)
    for name, values, call in (
        ("scheme", (None, "poisson", MATRIX, [SCHEME]), lambda v: ja.Mechanism(v, MATRIX, 1)),
        ("strategy", (None, "bisr", SCHEME, [1.0, 0.5]), lambda v: ja.Mechanism(SCHEME, v, 1.0)),
        ("noise_multiplier", (*NO_NUMBER, 1e300, 1e-300), lambda v: ja.Mechanism(SCHEME, MATRIX, v)),
        ("mechanism", NO_MECHANISM, lambda v: ja.estimate_delta(v, 1.0)),
        ("mechanism", NO_MECHANISM, lambda v: ja.estimate_epsilon(v, 1e-3)),
        ("mechanism", NO_MECHANISM, lambda v: ja.privacy_profile(v, [1.0])),
        ("mechanism", NO_MECHANISM, lambda v: ja.verify(v, 1.0, 1e-3)),
        ("mechanism", NO_MECHANISM, lambda v: ja.privacy_loss(v, np.zeros(8))),
        ("mechanism", NO_MECHANISM, lambda v: ja.sample_privacy_loss(jax.random.key(0), v, 5)),
        ("epsilon", NO_NUMBER[1:], lambda v: ja.estimate_delta(MECHANISM, v)),
        ("num_samples", GIVEN_COUNT, lambda v: ja.estimate_delta(MECHANISM, 1.0, num_samples=v)),
        ("confidence", NO_CHANCE, lambda v: ja.estimate_delta(MECHANISM, 1.0, confidence=v)),
        ("key", (1, "key", [1, 2], np.zeros(3)), lambda v: ja.estimate_delta(MECHANISM, 1.0, key=v)),
        ("proposal", ("nope", 3), lambda v: ja.estimate_delta(MECHANISM, 1.0, proposal=v)),
        ("compose_with", ("gaussian", 1.0), lambda v: ja.estimate_delta(MECHANISM, 1.0, compose_with=v)),
        ("delta", NO_CHANCE, lambda v: ja.estimate_epsilon(MECHANISM, v)),
        ("num_samples", GIVEN_COUNT, lambda v: ja.estimate_epsilon(MECHANISM, 1e-3, num_samples=v)),
        ("confidence", NO_CHANCE, lambda v: ja.estimate_epsilon(MECHANISM, 1e-3, confidence=v)),
        ("epsilons", NO_GRID, lambda v: ja.privacy_profile(MECHANISM, v)),
        ("scheme", (None, "poisson", MATRIX), lambda v: certify(v, MATRIX)),
        ("strategy", (None, "bisr", SCHEME, [1.0, 0.5]), lambda v: certify(SCHEME, v)),
        ("epsilon", NO_NUMBER, lambda v: ja.calibrate(SCHEME, MATRIX, epsilon=v, delta=1e-3)),
        ("delta", NO_CHANCE, lambda v: ja.calibrate(SCHEME, MATRIX, epsilon=1.0, delta=v)),
        ("max_samples", NO_COUNT[:4], lambda v: ja.verify(MECHANISM, 1.0, 1e-3, max_samples=v)),
        ("epsilon", NO_NUMBER[1:], lambda v: ja.verify(MECHANISM, v, 1e-3)),
        ("advantage", NO_CHANCE, lambda v: ja.calibrate(SCHEME, MATRIX, target=ja.Target.advantage(v))),
        ("delta", NO_CHANCE, lambda v: ja.verify(MECHANISM, 1.0, v)),
        ("rule", (None, "never", 3), lambda v: ja.verify(MECHANISM, 1.0, 1e-3, rule=v)),
        ("proposal", ("magic", 3), lambda v: ja.verify(MECHANISM, 1.0, 1e-3, proposal=v)),
        ("outputs", ("x", np.zeros(7), np.zeros((2, 2, 8)), None), lambda v: ja.privacy_loss(MECHANISM, v)),
        ("direction", ("up", None), lambda v: ja.sample_privacy_loss(jax.random.key(0), MECHANISM, 5, v)),
        ("iterations", (*NO_COUNT, 10**20), lambda v: ja.Poisson(v, 0.1)),
        ("sampling_probability", (0, 1.5, -1, float("nan"), "x", None, 1e-300), lambda v: ja.Poisson(5, v)),
        ("min_separation", NO_COUNT, lambda v: ja.BMinSep(5, v, 0.1)),
        ("warm_start", (1, None, "yes"), lambda v: ja.BMinSep(5, 2, 0.1, v)),
        ("cycle_length", NO_COUNT, lambda v: ja.BallsInBins(5, v)),
        ("examples_per_user", NO_COUNT, lambda v: ja.MultiAttribution(5, 2, 0.1, v)),
        ("dataset_size", (*NO_COUNT, 10**20), lambda v: of_sizes(dataset_size=v, batch_size=1)),
        ("batch_size", (*NO_NUMBER[:7], 11), lambda v: of_sizes(dataset_size=10, batch_size=v)),
        ("bands", NO_COUNT, ja.BandedToeplitz.square_root),
        ("coefficients", ((), (0.0,), (1.0, -0.5), (float("nan"),), "ab", None, 3), ja.BandedToeplitz),
        ("delta", NO_CHANCE, ja.Budget.split),
        ("plan", ("/no/such/plan", "/", ""), ja.Plan.load),
        ("plan", ({}, [], "x", None, {"schema": "jaxacct-plan"}), ja.Plan.from_json),
    )
]


def test_a_bad_argument_is_named():
    for call, name, values in CALLS:
        for value in values:
            started = time.thread_time()
            with pytest.raises(ValueError) as caught:
                call(value)
            message = str(caught.value)
            assert name in message and "\n" not in message, value
            assert time.thread_time() - started < 10


NUMBERS = dict(dataset_size=3000, batch_size=50, iterations=60, epsilon=2.0, delta=1e-2)


def calibrate(**options):
    return calibrating.calibrate(SCHEME, MATRIX, **(dict(epsilon=2.0, delta=1e-2) | options))


def recommend(**options):
    return ja.recommend(**(NUMBERS | options))


REFUSED = [
    (lambda: calibrate(tpr=0.5, fpr=0.1), "target must be one of", "given were epsilon, delta, tpr, fpr"),
    (lambda: calibrate(mu=1.0), "target must be one of", "given were epsilon, delta, mu"),
    (lambda: calibrate(max_batch_size=0), "max_batch_size must be an integer of at least 1, got 0"),
    (lambda: calibrate(grid_ratio=1.0), "grid_ratio must be in [1.00001, 2], got 1.0"),
    (lambda: calibrate(rule="soon"), "rule must be one of anytime, fixed, got 'soon'"),
    (lambda: calibrate(proposal="pairs:9"), "proposal family must be one of plain, replicas"),
    (lambda: calibrate(accountant="rdp"), "accountant must be one of analytic, unamplified", "got 'rdp'"),
    (lambda: calibrate(adjacency="add"), "adjacency must be one of zero-out", "got 'add'"),
    (lambda: calibrate(checkpoint_dir="other.json"), "checkpoint_dir must be a folder, got the file other"),
    (lambda: calibrate(estimate=-1.0), "estimate must be a finite number above 0, got -1.0"),
    (lambda: calibrate(dataset_size=0), "dataset_size must be an integer of at least 1, got 0"),
    (lambda: recommend(memory_copies=-1), "memory_copies must be an integer of at least 0, got -1"),
    (lambda: recommend(bands=61), "bands must be", "61"),
    (lambda: recommend(scheme="poison"), "scheme must be one of poisson", "got 'poison'"),
    (lambda: recommend(strategy="sqrt"), "strategy must be", "got 'sqrt'"),
    (lambda: recommend(workload="speed"), "workload must be prefix-sum, or a list", "got 'speed'"),
    (lambda: recommend(target=ja.Target(2.0)), "epsilon and delta must not be given together with tar"),
    (lambda: ja.risk.true_positive_rate([1.0], [0.1], 1.5), "false_positive_rate must be", "got 1.5"),
    (lambda: ja.risk.advantage([-1.0], [0.1]), "epsilons must be at least 0", "-1"),
    (lambda: load_model("nowhere", {"w": np.zeros(3)}), "run must be", "nowhere"),
]


def test_a_bad_combination_is_refused_with_its_values(folder):
    before = contents(folder)
    for call, *words in REFUSED:
        with pytest.raises(ValueError) as caught:
            call()
        message = str(caught.value)
        assert "\n" not in message and all(word in message for word in words), message
    assert contents(folder) == before
