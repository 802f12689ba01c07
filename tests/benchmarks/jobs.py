"""Runs that people have, by the command line: time to the first and the last certified number, and a peer.

    PYTHONPATH=. python -m tests.benchmarks.jobs [names]

Every job is a process of its own, stopped after `MAX_CPU` seconds of CPU time. All times are CPU seconds of
that process, with the import, so that other processes do not matter; the first certified number is the line
that `calibrate` writes at once. The peer is what installs here: dp-accounting's PLD accountant, for
independent noise. Rows of jobs that are not named stay as they are recorded.
"""

import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant
from scipy import stats

from tests.benchmarks.results import record, rows_of

MAX_CPU = 120
"""CPU seconds after which a job is stopped; its noise multiplier is then that of the bound."""
POISSON = "--scheme poisson"
USERS = "--scheme independent-attribution --examples-per-user 16 --bands 1 --min-separation 1"
COLUMNS = ["job", "calibrate", "first, CPU s", "last, CPU s", "first, MB", "last, MB", "first noise"]
COLUMNS += ["last noise", "by"]
COLUMNS += ["dp-accounting's epsilon at the last noise", "its CPU s"]


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
    "redrawn bins": run(50_000, 1000, 1000, 2, 1e-8, "--scheme epochwise-allocation --bands 1"),
    "redrawn bins, long": run(1e6, 1000, 20_000, 2, 1e-8, "--scheme epochwise-allocation --bands 1"),
    "balls in bins": run(50_000, 500, 1000, 1, 1e-6, "--scheme balls-in-bins --bands 1"),
    "k of n": run(20_000, 1000, 1000, 2, 1e-5, "--scheme balanced-min-sep --bands 1 --min-separation 1"),
    "users with 16 examples": run(1e5, 512, 2000, 4, 1e-6, USERS),
    "a baseline": run(50_000, 1000, 1000, 1000, 1e-5, "--bands 1"),
    "replace one": poisson(0.01, 1000, 1, 1e-6) + " --adjacency replace-one",
}


def measured(arguments: str, max_cpu: int = MAX_CPU) -> dict[str, Any]:
    """Return the seconds, megabytes and noise multipliers of one command, and its plan if it ended."""
    command = [sys.executable, "-m", "jaxacct", "calibrate", *arguments.split(), "--json"]
    first, before, bound, last = None, None, None, ""
    pipes, began = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE), time.perf_counter()
    with subprocess.Popen(command, text=True, **pipes) as process:
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (max_cpu, max_cpu))
        assert process.stderr is not None and process.stdout is not None
        for line in process.stderr:
            found = re.search(r"certified without samples: noise multiplier (\S+) \(accountant (\S+)\)", line)
            if found and first is None:
                first, before = cpu_seconds(process.pid), peak_megabytes(process.pid)
                bound = found.groups()
            last = line.strip() if line.startswith("jaxacct: ") else last
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds, wall = [first, usage.ru_utime + usage.ru_stime], time.perf_counter() - began
    numbers = dict(seconds=seconds, wall=wall, megabytes=[before, usage.ru_maxrss / 1024])
    numbers |= dict(first_noise=bound and float(bound[0]), plan=None)
    if process.returncode:
        stopped = f"{'none' if bound is None else bound[1]}, stopped at {max_cpu} s"
        return numbers | dict(noise=numbers["first_noise"], by=stopped if process.returncode < 0 else last)
    plan = json.loads(text)
    noise, by = plan["claim"]["noise_multiplier"], plan["evidence"].get("accountant", "samples")
    return numbers | dict(noise=noise, by=by, plan=plan)


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a running process (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def peak_megabytes(process: int) -> float:
    """Return the largest memory of a running process so far (Linux)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def peer(plan: dict[str, Any] | None) -> list[str]:
    """Return dp-accounting's epsilon at a plan's noise and its CPU seconds; empty where it has no event."""
    if plan is None or plan["evidence"].get("accountant") != "pld":
        return ["", ""]
    claim = plan["claim"]
    scheme, noise = dict(claim["scheme"]), claim["noise_multiplier"]
    q, users = scheme.get("sampling_probability"), scheme.get("examples_per_user", 1)
    is_independent = scheme["name"] in ("poisson", "independent-attribution")
    if not is_independent or claim["adjacency"] != "zero-out":
        return ["", ""]
    event = PoissonSampledDpEvent(q, GaussianDpEvent(noise))
    if users > 1:
        counts = range(users + 1)
        weights = stats.binom.pmf(counts, users, q)
        event = MixtureOfGaussiansDpEvent(noise, list(map(float, counts)), weights.tolist())
    began = time.process_time()
    epsilon = PLDAccountant().compose(event, scheme["iterations"]).get_epsilon(claim["delta"])
    return [f"{epsilon:.5g}", f"{time.process_time() - began:.1f}"]


def main(names: list[str]) -> None:
    rows = rows_of("jobs")
    for name in names or JOBS:
        own = measured(JOBS[name])
        noises = [own["first_noise"], own["noise"]]
        kinds = zip((own["seconds"], own["megabytes"], noises), (".1f", ".0f", ".5g"), strict=True)
        numbers = ["none" if one is None else f"{one:{how}}" for pair, how in kinds for one in pair]
        rows[name] = [name, f"`{JOBS[name]}`", *numbers, own["by"], *peer(own["plan"])]
        print(*rows[name], sep=" | ", flush=True)
        record(
            "jobs",
            question="How long do the runs of people take, to the first and to the last certified number?",
            order=26,
            columns=COLUMNS,
            rows=[rows[job] for job in JOBS if job in rows],
            note="First is the time to the bound that is certified without samples: of the run, or, where "
            "its sampler is open, of Poisson sampling with independent noise, which has more error. One run "
            "each; stopped ones have the noise of the bound. dp-accounting is the only peer that installs "
            "here.",
        )


if __name__ == "__main__":
    main(sys.argv[1:])
