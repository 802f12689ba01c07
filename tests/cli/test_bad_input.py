"""Bad input, hundreds of cases: one line that names the argument, exit 2 or ValueError, nothing written."""

import json
import time

import jax
import numpy as np
import pytest

import jaxacct
from jaxacct.cli import main as cli
from jaxacct.kernels import randomness

PROBLEM = {
    "--scheme": "b-min-sep",
    "--iterations": "60",
    "--dataset-size": "3000",
    "--batch-size": "50",
    "--bands": "6",
    "--strategy": "square-root",
}
CALIBRATE = {**PROBLEM, "--epsilon": "2", "--delta": "1e-2"}
ESTIMATE = {**PROBLEM, "--epsilon": "2", "--noise-multiplier": "1"}
PROBABILITY = {"--iterations": "60", "--strategy": "square-root"}

NO_INTEGER = ("0", "-3", "1.5", "x", "nan", "", "1e-3", "15e-1", "1k5", "1" + 25 * "0")
NOT_POSITIVE = ("0", "-1", "nan", "inf", "x", "")
# What one flag is refused for, each is: they are read by one function for all flags of a kind.
SOME_INTEGERS, SOME_NUMBERS, SOME_SIGMAS = ("0", "1.5", "x"), ("0", "nan", "inf"), ("-1", "nan", "1e-300")
NO_PROBABILITY = ("0", "1", "-0.1", "2", "nan", "inf", "x")
BAD_SIGMA = (*NOT_POSITIVE, "1e300", "1e-300")
BAD_VALUES = [
    (command, base, flag, values)
    for command, base, flags in (
        (
            "calibrate",
            CALIBRATE,
            {
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
            },
        ),
        (
            "estimate",
            ESTIMATE,
            {
                "--iterations": SOME_INTEGERS,
                "--epsilon": ("-1", "nan", "inf", "x"),
                "--delta": ("1e-2",),  # and epsilon
                "--noise-multiplier": SOME_SIGMAS,
                "--samples": SOME_INTEGERS,
                "--confidence": NO_PROBABILITY,
                "--batch-size": SOME_NUMBERS,
            },
        ),
        (
            "estimate",
            {k: v for k, v in ESTIMATE.items() if k != "--epsilon"} | {"--delta": "1e-3"},
            {"--delta": NO_PROBABILITY},
        ),
        (
            "calibrate",
            {**PROBABILITY, "--scheme": "poisson", "--epsilon": "2", "--delta": "1e-2"},
            {"--sampling-probability": ("0", "-0.1", "1.5", "nan", "inf", "x", "1e-300")},
        ),
    )
    for flag, values in flags.items()
]

P = ["--sampling-probability", "0.1"]
SIZES = ["--dataset-size", "3000", "--batch-size", "50"]
TARGET = ["--epsilon", "2", "--delta", "1e-2"]
LINES = [
    # (arguments, a word of the line)
    (["calibrat"], 'Did you mean "calibrate"?'),
    (["calibrate"], "--iterations"),
    (["calibrate", "--iteration", "5"], "Did you mean --iterations instead of --iteration?"),
    (["calibrate", "--iterations"], "--iterations"),
    (
        ["calibrate", "--iterations", "60", *P, "--epsilon", "1", "--epsilon", "8"],
        "--epsilon specified multiple times",
    ),
    (["calibrate", "--epochs", "5"], "did you mean --iterations, which are steps: epochs times"),
    (["calibrate", "--steps", "5"], "did you mean --iterations?"),
    (["calibrate", "--sigma=5"], "did you mean --noise-multiplier?"),
    (["calibrate", "--eps", "5"], "did you mean --epsilon?"),
    (["verify", "--steps", "5"], "Unknown option: --steps"),
    (["calibrate", "--scheme", "bminsep"], "(bminsep: did you mean b-min-sep?)"),
    (["calibrate", "--scheme", "dp-sgd"], "(dp-sgd: did you mean poisson, with --bands 1?)"),
    (["calibrate", "--iterations", "60", *TARGET, *P, "--strategy", "sqrt"], "did you mean square-root?"),
    (["calibrate", "--iterations", "1.0005k", *TARGET, *P], "iterations"),
    (["calibrate", "--iterations", "9e99", *TARGET, *P], "iterations must be at most"),
    (["calibrate", "--iterations", "60", *SIZES], "--epsilon"),
    (["calibrate", "--iterations", "60", *TARGET], "dataset_size and batch_size"),
    (["calibrate", "--iterations", "60", *TARGET, *SIZES[:2]], "dataset_size and batch_size"),
    (["calibrate", "--iterations", "60", *TARGET, *SIZES[2:]], "dataset_size and batch_size"),
    (["calibrate", "--iterations", "60", *TARGET, *SIZES, "extra"], "extra"),
    (["calibrate", "--iterations", "60", *TARGET, *SIZES, "--json", "3"], "3"),
    (["calibrate", "--iterations", "60", *TARGET, *SIZES, "--force"], "force must not be given"),
    # Ignored in silence before.
    (["calibrate", "--iterations", "60", *TARGET, *SIZES, *P], "batch_size must not be given"),
    (["calibrate", "--iterations", "60", *TARGET, *P, "--scheme", "balls-in-bins"], "sampling_probability"),
    (
        ["calibrate", "--iterations", "60", *TARGET, *P, "--scheme", "poisson", "--min-separation", "2"],
        "min_separation does not apply to poisson",
    ),
    (
        [
            *["calibrate", "--iterations", "60", *TARGET, *SIZES],
            *["--scheme", "balls-in-bins", "--min-separation", "60"],
        ],
        "min_separation must not be given together with dataset_size",
    ),
    (
        ["calibrate", "--iterations", "60", *TARGET, *SIZES[2:], "--scheme", "balls-in-bins"],
        "dataset_size and batch_size must be given together",
    ),
    (["calibrate", "--iterations", "60", *TARGET, *P, "--scheme", "poisson", "--cold-start"], "cold_start"),
    (
        ["calibrate", "--iterations", "60", *TARGET, *P, "--strategy", "coefficients.txt", "--bands", "2"],
        "bands must not be given with the coefficients",
    ),
    (["estimate", "--iterations", "60", *P, "--noise-multiplier", "1"], "epsilon or delta must be given"),
    (
        ["estimate", "--iterations", "60", *P, *SIZES[:2], "--noise-multiplier", "1", "--epsilon", "1"],
        "dataset_size must not be given together with sampling_probability",
    ),
    (
        ["calibrate", "--iterations", "60", *TARGET, *P, "--bands", "1", "--max-batch-size", "90"],
        "dataset_size must be given with max_batch_size",
    ),
    (
        ["calibrate", "--iterations", "60", *TARGET, *P, "--scheme", "multi-attribution"],
        "examples_per_user must be given",
    ),
    (
        ["calibrate", "--iterations", "60", *TARGET, *P, "--scheme", "truncated-b-min-sep"],
        "truncate_to must be given",
    ),
    # Files.
    (["show"], '"show" parameter PLAN requires an argument'),
    (["show", "/no/such/plan.json"], "cannot be read"),
    (["show", "."], "cannot be read"),
    (["show", "text.json"], "not valid JSON"),
    (["show", "deep.json"], "not valid JSON"),
    (["show", "list.json"], "must hold a JSON object"),
    (["show", "empty.json"], "not valid JSON"),
    (["show", "other.json"], "schema"),
    (["verify", "/no/such/plan.json"], "cannot be read"),
    (["verify", "deep.json"], "not valid JSON"),
    (["verify", "other.json", "--max-samples", "0"], "max_samples must be"),
    (["verify", "other.json", "--max-samples", "-5"], "max_samples must be"),
    (["verify", "other.json", "--rule", "never"], "rule"),
    (["calibrate", "--iterations", "60", *TARGET, *P, "--out", "text.json"], "out must be new or a plan"),
    (["calibrate", "--iterations", "60", *TARGET, *P, "--out", "link.json"], "out must be new or a plan"),
    (["check", "--seconds", "3"], "Unknown option: --seconds"),
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
    return folder


def contents(folder):
    return {path.name: (path.is_symlink(), path.read_bytes()) for path in sorted(folder.iterdir())}


def refused(arguments, folder, monkeypatch, capsys):
    """The line on standard error."""
    monkeypatch.chdir(folder)
    before, started = contents(folder), time.thread_time()
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert time.thread_time() - started < 10
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxacct: ") and captured.err.count("\n") == 1, captured.err
    assert contents(folder) == before
    return captured.err


def test_a_bad_value_is_named(folder, monkeypatch, capsys):
    for command, base, flag, values in BAD_VALUES:
        names = {flag, flag[2:].replace("-", "_")}
        if flag in ("--bands", "--dataset-size", "--batch-size", "--min-separation"):
            names |= {"batch_size", "bands"}  # they are refused together
        for value in values:
            arguments = [word for pair in (base | {flag: value}).items() for word in pair]
            line = refused([command, *arguments], folder, monkeypatch, capsys)
            assert any(name in line for name in names), (value, line)


def test_a_bad_line(folder, monkeypatch, capsys):
    for arguments, words in LINES:
        assert words in refused(arguments, folder, monkeypatch, capsys), arguments


SCHEME, STRATEGY_MATRIX = jaxacct.BMinSep(8, 3, 0.2), jaxacct.BandedToeplitz.square_root(2)
MECHANISM = jaxacct.Mechanism(SCHEME, STRATEGY_MATRIX, 1.0)
NO_NUMBER = (0, -1.0, float("nan"), float("inf"), "1", None, [1.0], True, 10**400)
NO_COUNT = (0, -1, 1.5, "3", None, [3], True, float("nan"))
GIVEN_COUNT = tuple(value for value in NO_COUNT if value is not None)  # None is the default
NO_CHANCE = (0, 1, -0.1, float("nan"), "0.1", None, [0.1])
NO_MECHANISM = (None, "mechanism", 1.0, SCHEME, [MECHANISM])
CALLS = [
    (call, name, values)
    for name, values, call in (
        (
            "scheme",
            (None, "poisson", STRATEGY_MATRIX, [SCHEME]),
            lambda v: jaxacct.Mechanism(v, STRATEGY_MATRIX, 1),
        ),
        ("strategy", (None, "bisr", SCHEME, [1.0, 0.5]), lambda v: jaxacct.Mechanism(SCHEME, v, 1.0)),
        (
            "noise_multiplier",
            (*NO_NUMBER, 1e300, 1e-300),
            lambda v: jaxacct.Mechanism(SCHEME, STRATEGY_MATRIX, v),
        ),
        ("mechanism", NO_MECHANISM, lambda v: jaxacct.estimate_delta(v, 1.0)),
        ("mechanism", NO_MECHANISM, lambda v: jaxacct.estimate_epsilon(v, 1e-3)),
        ("mechanism", NO_MECHANISM, lambda v: jaxacct.privacy_profile(v, [1.0])),
        ("mechanism", NO_MECHANISM, lambda v: jaxacct.verify(v, 1.0, 1e-3)),
        ("mechanism", NO_MECHANISM, lambda v: jaxacct.privacy_loss(v, np.zeros(8))),
        ("mechanism", NO_MECHANISM, lambda v: jaxacct.sample_privacy_loss(jax.random.key(0), v, 5)),
        ("epsilon", NO_NUMBER[1:], lambda v: jaxacct.estimate_delta(MECHANISM, v)),
        ("num_samples", GIVEN_COUNT, lambda v: jaxacct.estimate_delta(MECHANISM, 1.0, num_samples=v)),
        ("confidence", NO_CHANCE, lambda v: jaxacct.estimate_delta(MECHANISM, 1.0, confidence=v)),
        ("key", (1, "key", [1, 2], np.zeros(3)), lambda v: jaxacct.estimate_delta(MECHANISM, 1.0, key=v)),
        ("proposal", ("nope", 3), lambda v: jaxacct.estimate_delta(MECHANISM, 1.0, proposal=v)),
        ("compose_with", ("gaussian", 1.0), lambda v: jaxacct.estimate_delta(MECHANISM, 1.0, compose_with=v)),
        ("delta", NO_CHANCE, lambda v: jaxacct.estimate_epsilon(MECHANISM, v)),
        ("num_samples", GIVEN_COUNT, lambda v: jaxacct.estimate_epsilon(MECHANISM, 1e-3, num_samples=v)),
        ("confidence", NO_CHANCE, lambda v: jaxacct.estimate_epsilon(MECHANISM, 1e-3, confidence=v)),
        (
            "epsilons",
            ([], [1.0, 1.0], [-1.0], [np.nan], [[1.0]], None, ["a"]),
            lambda v: jaxacct.privacy_profile(MECHANISM, v),
        ),
        (
            "scheme",
            (None, "poisson", STRATEGY_MATRIX),
            lambda v: jaxacct.calibrate(v, STRATEGY_MATRIX, epsilon=1.0, delta=1e-3),
        ),
        (
            "strategy",
            (None, "bisr", SCHEME, [1.0, 0.5]),
            lambda v: jaxacct.calibrate(SCHEME, v, epsilon=1.0, delta=1e-3),
        ),
        ("epsilon", NO_NUMBER, lambda v: jaxacct.calibrate(SCHEME, STRATEGY_MATRIX, epsilon=v, delta=1e-3)),
        ("delta", NO_CHANCE, lambda v: jaxacct.calibrate(SCHEME, STRATEGY_MATRIX, epsilon=1.0, delta=v)),
        ("max_samples", NO_COUNT[:4], lambda v: jaxacct.verify(MECHANISM, 1.0, 1e-3, max_samples=v)),
        ("epsilon", NO_NUMBER[1:], lambda v: jaxacct.verify(MECHANISM, v, 1e-3)),
        (
            "advantage",
            NO_CHANCE,
            lambda v: jaxacct.calibrate(SCHEME, STRATEGY_MATRIX, target=jaxacct.Target.advantage(v)),
        ),
        ("delta", NO_CHANCE, lambda v: jaxacct.verify(MECHANISM, 1.0, v)),
        ("rule", (None, "never", 3), lambda v: jaxacct.verify(MECHANISM, 1.0, 1e-3, rule=v)),
        (
            "outputs",
            ("x", np.zeros(7), np.zeros((2, 2, 8)), None),
            lambda v: jaxacct.privacy_loss(MECHANISM, v),
        ),
        (
            "direction",
            ("sideways", None),
            lambda v: jaxacct.sample_privacy_loss(randomness.fresh_key(), MECHANISM, 5, v),
        ),
        ("iterations", (*NO_COUNT, 10**20), lambda v: jaxacct.Poisson(v, 0.1)),
        (
            "sampling_probability",
            (0, 1.5, -1, float("nan"), "x", None, 1e-300),
            lambda v: jaxacct.Poisson(5, v),
        ),
        ("min_separation", NO_COUNT, lambda v: jaxacct.BMinSep(5, v, 0.1)),
        ("warm_start", (1, None, "yes"), lambda v: jaxacct.BMinSep(5, 2, 0.1, v)),
        ("cycle_length", NO_COUNT, lambda v: jaxacct.BallsInBins(5, v)),
        ("examples_per_user", NO_COUNT, lambda v: jaxacct.MultiAttribution(5, 2, 0.1, v)),
        (
            "dataset_size",
            (*NO_COUNT, 10**20),
            lambda v: jaxacct.Poisson.from_batch_size(dataset_size=v, batch_size=1, iterations=5),
        ),
        (
            "batch_size",
            (*NO_NUMBER[:7], 11),
            lambda v: jaxacct.Poisson.from_batch_size(dataset_size=10, batch_size=v, iterations=5),
        ),
        ("bands", NO_COUNT, jaxacct.BandedToeplitz.square_root),
        ("coefficients", ((), (0.0,), (1.0, -0.5), (float("nan"),), "ab", None, 3), jaxacct.BandedToeplitz),
        ("delta", NO_CHANCE, jaxacct.Budget.split),
        ("plan", ("/no/such/plan", "/", ""), jaxacct.Plan.load),
        ("plan", ({}, [], "x", None, {"schema": "jaxacct-plan"}), jaxacct.Plan.from_json),
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
