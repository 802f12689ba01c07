"""Sixty more bad inputs: one line with the argument, what it was and what is allowed, before any work.

Searches are replaced by failures, so that a refusal after their start is seen.
"""

import json
import shlex

import numpy as np
import pytest

import jaxacct
from jaxacct.cli import main as cli
from tests import calibrating
from train import load_model

RUN = "--dataset-size 3000 --batch-size 50 --iterations 60"
TARGET = "--epsilon 2 --delta 1e-2"
BOTH = f"{RUN} {TARGET}"
LINES = [
    # Targets in words of risk.
    (f"calibrate {RUN} --tpr 0.1", "tpr and fpr", "given were tpr"),
    (f"calibrate {RUN} --fpr 0.01", "tpr and fpr", "given were fpr"),
    (f"calibrate {RUN} --tpr 0.01 --fpr 0.1", "tpr must be above fpr, got 0.01 and 0.1"),
    (f"calibrate {RUN} --tpr 1.5 --fpr 0.1", "tpr must be in (0, 1), got 1.5"),
    (f"calibrate {RUN} --tpr 0.5 --fpr 0", "fpr must be in (0, 1), got 0.0"),
    (f"calibrate {RUN} --tpr 0.5 --fpr 0.1 --epsilon 2", "must be one of", "given were epsilon, tpr, fpr"),
    (f"calibrate {RUN} --advantage 1", "advantage must be in (0, 1), got 1.0"),
    (f"calibrate {RUN} --advantage 0.1 --delta 1e-5", "advantage must not be given together with delta"),
    (f"calibrate {RUN} --mu 1", "mu and delta", "given were mu"),
    (f"calibrate {RUN} --mu -1 --delta 1e-5", "mu must be a finite number above 0, got -1.0"),
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
    (
        f"calibrate {BOTH} --proposal pairs:3,0",
        "proposal family must be one of plain, replicas, joint-replicas, truncated",
    ),
    # How a plan is certified.
    (f"calibrate {BOTH} --accountant rdp", '"rdp" for --accountant. Choose from: "analytic"'),
    (f"calibrate {BOTH} --accountant pld --rule fixed", "rule must not be given together with accountant"),
    (f"calibrate {BOTH} --adjacency add", '"add" for --adjacency. Choose from: "zero-out"'),
    (f"calibrate {BOTH} --checkpoint-dir other.json", "checkpoint_dir must be a folder, got the file other"),
    (
        f"calibrate {BOTH} --scheme truncated-b-min-sep --truncate-to 0 --bands 2",
        "truncate_to must be an integer of at least 1, got 0",
    ),
    (
        f"calibrate {BOTH} --scheme truncated-b-min-sep --truncate-to 20 --bands 2",
        "truncate_to",
        "must be at least the largest expected batch size 50, got 20",
    ),
    (
        f"calibrate {BOTH} --scheme multi-attribution --examples-per-user 4000 --bands 2",
        "examples_per_user must be at most 1000, got 4000",
    ),
    # Other commands.
    (f"estimate {RUN} --bands 2 --epsilon 1 --noise-multiplier 0", "noise_multiplier must be", "got 0.0"),
    (f"estimate {RUN} --epsilon 1 --noise-multiplier 1", "bands must be given here"),
    ("report other.json --out nowhere/r.html", "out must be in a folder that exists, got 'nowhere/r.html'"),
    ("report other.json --out r.html", "plan must have the schema 'jaxacct-plan', got 'another'"),
    ("check nowhere.json", "plan nowhere.json cannot be read"),
    ("verify other.json --replay --rule fixed", "rule must not be given together with replay"),
    (
        "tradeoff general --dataset-size 50k --num-epochs 0 --epsilon 3 --delta 1e-5",
        "num_epochs must be an integer of at least 1, got 0",
    ),
    ("train --plan nowhere.json --out run/", "plan nowhere.json cannot be read"),
    ("train --plan other.json --out run/ --data imagenet", '"imagenet" for --data. Choose from: "digits"'),
    ("train --plan other.json --out run/ --clipping fast", '"fast" for --clipping. Choose from: "auto"'),
]


SCHEME, MATRIX = jaxacct.BMinSep(60, 6, 0.1), jaxacct.BandedToeplitz.square_root(6)
NUMBERS = dict(dataset_size=3000, batch_size=50, iterations=60, epsilon=2.0, delta=1e-2)


def calibrate(**options):
    return calibrating.calibrate(SCHEME, MATRIX, **(dict(epsilon=2.0, delta=1e-2) | options))


def recommend(**options):
    return jaxacct.recommend(**(NUMBERS | options))


CALLS = [
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
    (lambda: recommend(target=jaxacct.Target(2.0)), "epsilon and delta must not be given together with tar"),
    (lambda: jaxacct.risk.true_positive_rate([1.0], [0.1], 1.5), "false_positive_rate must be", "got 1.5"),
    (lambda: jaxacct.risk.advantage([-1.0], [0.1]), "epsilons must be at least 0", "-1"),
    (lambda: load_model("nowhere", {"w": np.zeros(3)}), "run must be", "nowhere"),
]


@pytest.fixture(autouse=True)
def nothing_is_computed(monkeypatch, tmp_path):
    def started(*_, **__):
        raise AssertionError("work was started")

    for place in ("jaxacct.recommendation.search.Estimates.at", "jaxacct.calibration.calibrate.Route"):
        monkeypatch.setattr(place, started)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text(json.dumps({"schema": "another"}))


def test_a_bad_line_is_refused_before_any_work(tmp_path, capsys):
    for case in LINES:
        line, *words = case
        with pytest.raises(SystemExit) as ended:
            cli.main(shlex.split(line))
        seen = capsys.readouterr()
        assert (ended.value.code, seen.out, seen.err.count("\n")) == (2, "", 1), seen
        assert all(word in seen.err for word in words), seen.err
        assert [path.name for path in tmp_path.iterdir()] == ["other.json"]


def test_a_bad_argument_is_refused_before_any_work(tmp_path):
    for case in CALLS:
        call, *words = case
        with pytest.raises(ValueError) as caught:
            call()
        message = str(caught.value)
        assert "\n" not in message and all(word in message for word in words), message
        assert [path.name for path in tmp_path.iterdir()] == ["other.json"]
