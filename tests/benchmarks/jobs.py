"""Runs that people have, by the command line: time to the first and the last certified number, and peers.

    PYTHONPATH=. python -m tests.benchmarks.jobs [names]

Every job is a process of its own, whose CPU seconds and peak memory are those of the whole process; the first
certified number is the line that `calibrate` writes at once, in wall-clock seconds with the import. Peers are
what installs here: dp-accounting's PLD accountant, for Poisson sampling of independent noise.
"""

import json
import os
import re
import subprocess
import sys
import time
from typing import Any

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from tests.benchmarks.results import record

TIMEOUT = 240.0
"""Seconds after which a job is ended."""
POISSON = "--scheme poisson"


def poisson(q: float, n: int, epsilon: float, delta: float) -> str:
    return f"{POISSON} --sampling-probability {q} --iterations {n} --epsilon {epsilon} --delta {delta}"


def run(size: float, batch: float, n: float, epsilon: float, delta: float, rest: str = "") -> str:
    sizes = f"--dataset-size {size:.0f} --batch-size {batch} --iterations {n:.0f}"
    return f"{sizes} --epsilon {epsilon} --delta {delta} {rest}".strip()


JOBS: dict[str, str] = {
    "VaultGemma, rare": poisson(4e-5, 100_000, 2, 1.1e-10),
    "VaultGemma, often": poisson(5e-3, 100_000, 2, 1.1e-10),
    "small epsilon": poisson(0.01, 5000, 0.1, 1e-10),
    "a million steps": poisson(1e-4, 1_000_000, 4, 1e-9),
    "large batches": poisson(0.1, 100_000, 1, 1e-8),
    "1e9 examples": poisson(4096e-9, 100_000, 2, 1e-10),
    "short": poisson(0.01, 2000, 1, 1e-6),
    "rare participation": poisson(1e-5, 1_000_000, 0.1, 1e-10),
    "1e10 examples": poisson(1e-7, 1_000_000, 1, 1e-12),
    "one band, 1e6": run(1e6, 1000, 1e4, 1, 1e-7, "--bands 1"),
    "one band, 1e7": run(1e7, 2048, 2e4, 2, 1e-8, "--bands 1"),
    "one band, 1e8": run(1e8, 1024, 1e4, 1, 1e-9, "--bands 1"),
    "README": run(50_000, 200, 1000, 8, 1e-5),
    "README, strong": run(50_000, 200, 1000, 0.5, 1e-7),
    "production": run(14_745_600, 1793, 7200, 10, 1.3e-8, "--scheme b-min-sep --bands 16"),
    "b-min-sep, 16 bands": run(
        14_745_600, 1793, 2000, 4, 1e-7, "--scheme b-min-sep --min-separation 16 --bands 16"
    ),
    "b-min-sep, 32 bands": run(1e8, 1024, 20_000, 2, 1e-9, "--scheme b-min-sep --bands 32"),
    "cyclic": run(1e9, 4096, 100_000, 2, 1e-10, "--scheme cyclic-poisson --bands 16 --min-separation 16"),
    "balanced": run(1e9, 4096, 100_000, 2, 1e-10, "--scheme balanced-min-sep --bands 16 --min-separation 16"),
    "selection": run(1e8, 4096, 20_000, 4, 1e-9),
    "redrawn bins": run(50_000, 1000, 1000, 2, 1e-7, "--scheme epochwise-allocation --bands 1"),
    "redrawn bins, long": run(1e6, 1000, 20_000, 2, 1e-8, "--scheme epochwise-allocation --bands 1"),
    "balls in bins": run(50_000, 500, 1000, 1, 1e-6, "--scheme balls-in-bins --bands 1"),
    "k of n": run(20_000, 1000, 1000, 2, 1e-5, "--scheme balanced-min-sep --bands 1 --min-separation 1"),
    "replace one": poisson(0.01, 1000, 1, 1e-6) + " --adjacency replace-one",
}


def measured(arguments: str) -> dict[str, Any]:
    """Return the seconds, CPU seconds, megabytes and noise multiplier of one command."""
    command = [sys.executable, "-m", "jaxacct", "calibrate", *arguments.split(), "--json"]
    began, first, last = time.monotonic(), None, ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        for line in process.stderr:  # a line every ten seconds, so that the time is seen
            if "certified without samples" in line and first is None:
                first = time.monotonic() - began
            last = line.strip() if line.startswith("jaxacct: ") else last
            if time.monotonic() - began > TIMEOUT:
                process.kill()
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    found: dict[str, Any] = dict(first=first, wall=time.monotonic() - began)
    found |= dict(cpu=usage.ru_utime + usage.ru_stime, megabytes=usage.ru_maxrss / 1024)
    if process.returncode:
        return found | dict(noise=None, why="ended" if process.returncode < 0 else last)
    plan = json.loads(text)
    return found | dict(
        noise=plan["claim"]["noise_multiplier"], why=plan["evidence"].get("accountant", "samples")
    )


def peer(arguments: str, noise: float) -> tuple[float, float] | None:
    """Return dp-accounting's epsilon at this noise and its CPU seconds, for Poisson sampling; else None."""
    if not arguments.startswith(POISSON) or "replace-one" in arguments:
        return None
    q, n, _, delta = map(float, re.findall(r" (\d\S*)", arguments)[:4])
    began = time.process_time()
    event = PoissonSampledDpEvent(q, GaussianDpEvent(noise))
    return float(PLDAccountant().compose(event, int(n)).get_epsilon(delta)), time.process_time() - began


def main(names: list[str]) -> None:
    rows = []
    for name in names or JOBS:
        own, other = measured(JOBS[name]), None
        if own["noise"] is not None:
            other = peer(JOBS[name], own["noise"])
        numbers = [f"{own[key]:.1f}" if own[key] is not None else "none" for key in ("first", "wall", "cpu")]
        noise = own["why"] if own["noise"] is None else f"{own['noise']:.5g}"
        peers = ["", ""] if other is None else [f"{other[0]:.5g}", f"{other[1]:.1f}"]
        by = "" if own["noise"] is None else own["why"]
        rows.append([name, f"`{JOBS[name]}`", *numbers, f"{own['megabytes']:.0f}", noise, by, *peers])
        print(*rows[-1], sep=" | ", flush=True)
    record(
        "jobs",
        question="How long do the runs of people take, to the first and to the last certified number?",
        order=26,
        columns=["job", "calibrate", "first, s", "last, s", "CPU, s", "MB", "noise", "by"]
        + ["dp-accounting's epsilon there", "CPU, s of dp-accounting"],
        rows=rows,
        note="First is the time to the bound that is certified without samples, with the import. One run "
        "each; dp-accounting is the only peer that is installed.",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
