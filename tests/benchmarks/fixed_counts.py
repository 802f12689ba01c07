"""Certified noise of samplers with fixed numbers of participations, beside those that draw their number.

python -m tests.benchmarks.fixed_counts README 1      # rows of the README's job at epsilon 1; others are kept
python -m tests.benchmarks.fixed_counts users         # users with five examples
python -m tests.benchmarks.fixed_counts k-of-n        # k of n steps, independent noise
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize, stats
from scipy.special import gammaln

from jaxacct import BalancedMinSep, BandedToeplitz, Mechanism, Plan, Poisson, prefix_sum_error
from jaxacct.accountants import ACCOUNTANTS
from tests.benchmarks.results import FOLDER, record

README = "--dataset-size 50000 --batch-size 200 --iterations 1000 --delta 1e-5"
AMPLIFIED = "--bands 16 --min-separation 64 --strategy amplified --max-samples 1000000"
SCHEMES = {
    "b-min-sep": "b-min-sep",
    "balanced-min-sep": "balanced min-sep, k = 4",
    "epochwise-allocation": "epochwise allocation, 4 epochs",
}


def calibrated(options: str) -> tuple[Plan, str, float]:
    """Return (plan, samples of both directions, processor seconds) of `jaxacct calibrate` with options."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        command = [sys.executable, "-P", "-m", "jaxacct", "calibrate", *options.split(), "--out", str(path)]
        before = _seconds()
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return Plan.load(path), _samples(text), _seconds() - before


def _seconds() -> float:
    """Return processor seconds of finished child processes."""
    times = os.times()
    return times.children_user + times.children_system


def _samples(text: str) -> str:
    """Return the samples of the remove and the add direction, as the command prints them."""
    found = []
    for direction in ("remove", "add"):
        for line in text.splitlines():
            if line.startswith(f"{direction} direction"):
                number = line.rpartition(", ")[2].removesuffix(" samples")
                of_line = " (line)" if "line through" in line else ""
                unsampled = [said for said in ("exactly zero", "no samples needed") if said in line]
                found.append(unsampled[0] if unsampled else number + of_line)
    return " + ".join(found) or "none"


def error_of(plan: Plan) -> float:
    """Return the prefix-sum error of a plan."""
    at = dict(iterations=plan.mechanism.scheme.iterations, noise_multiplier=plan.noise_multiplier)
    return prefix_sum_error(plan.mechanism.strategy, **at)


def in_words(plan: Plan) -> str:
    """Return scheme, separation and bands of a plan."""
    scheme = plan.mechanism.scheme
    return f"{scheme.name}, separation {scheme.min_separation}, {plan.mechanism.strategy.bands} bands"


def readme(epsilon: str) -> None:
    """Certify the README's job at an epsilon, and replace these rows of the stored record."""
    path = FOLDER / "fixed_counts.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    given = f"({epsilon}, 1e-5)"
    jobs = {
        (f"README job, 16 amplified bands, separation 64, {given}", name): f"{AMPLIFIED} --scheme {scheme}"
        for scheme, name in SCHEMES.items()
    }
    jobs[f"README job, independent noise, {given}", "Poisson (pld)"] = "--scheme poisson --bands 1"
    jobs[f"README job, nothing given, {given}", ""] = ""
    rows = {tuple(row[:2]): row for row in stored["rows"]}
    for (job, name), options in jobs.items():
        plan, samples, seconds = calibrated(f"{README} --epsilon {epsilon} {options}")
        key = job, name or in_words(plan)
        rows[key] = [*key, f"{plan.noise_multiplier:.4f}", f"{error_of(plan):.4g}", samples]
        print(*rows[key], f"{seconds:.0f} CPU-s", sep=" | ", flush=True)
    other = stored["command"].partition("; python -m tests.benchmarks.fixed_counts")[0]
    record("fixed_counts", **{name: stored[name] for name in ("question", "order", "columns", "note")},
           rows=_in_order(list(rows.values())))  # fmt: skip
    found = json.loads(path.read_text(encoding="utf-8"))
    found["command"] = f"{other}; python -m tests.benchmarks.fixed_counts README {epsilon}"
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _in_order(rows: list[list[str]]) -> list[list[str]]:
    """Return rows with those of one README target together, in the order of their first row."""

    def target(row):
        return row[0].rpartition(" (")[2] if row[0].startswith("README") else row[0]

    first: dict[str, int] = {}
    for index, row in enumerate(rows):
        first.setdefault(target(row), index)
    return sorted(rows, key=lambda row: first[target(row)])


USERS = "--iterations 1000 --epsilon 8 --delta 1e-5"
ATTRIBUTED = "--dataset-size 60000 --batch-size 200 --min-separation 16 --bands 16 --examples-per-user 5"
# What is a unit and how it is drawn -> (options, units in a mean batch, gradients of examples in it).
USER_JOBS = {
    "examples of one user lock one another out (multi-attribution)": (
        f"{ATTRIBUTED} --scheme multi-attribution", 200, 200),
    "examples are independent (independent-attribution)": (
        f"{ATTRIBUTED} --scheme independent-attribution", 200, 200),
    "a row is a user: b-min-sep": (
        "--dataset-size 12000 --batch-size 200 --scheme b-min-sep", 200, 1000),
    "a row is a user: nothing given": (
        "--dataset-size 12000 --batch-size 200", 200, 1000),
    "a row is a user, as many examples in a batch: b-min-sep": (
        "--dataset-size 12000 --batch-size 40 --scheme b-min-sep", 40, 200),
    "a row is a user, as many examples in a batch: nothing given": (
        "--dataset-size 12000 --batch-size 40", 40, 200),
}  # fmt: skip


def users() -> None:
    """Certify runs that protect users with five examples each."""
    rows = []
    for name, (options, units, gradients) in USER_JOBS.items():
        plan, samples, seconds = calibrated(f"{USERS} {options}")
        noise, error = plan.noise_multiplier, error_of(plan)
        rows.append([name, in_words(plan), f"{noise:.4f}", f"{error:.4g}", f"{1000 * error**0.5 / units:.1f}",
                     f"{gradients}", samples, f"{seconds:.0f}"])  # fmt: skip
        print(*rows[-1], sep=" | ", flush=True)
    record(
        "users_fixed_counts",
        question="Users with five examples: which sampler, and how much noise?",
        order=51,
        columns=["unit and sampler", "selected or given", "noise multiplier", "prefix-sum error",
                 "noise in the running sum of mean gradients, 1e-3 clip norms", "examples in a batch",
                 "samples, remove + add", "CPU-s"],
        rows=rows,
        note="12,000 users with 5 of 60,000 examples each, 1,000 steps, (8, 1e-5) for a user. `recommend` "
        "looks at no attribution schemes, so that nothing is selected for them; where a row of the data is a "
        "user (all five examples, whose mean gradient is clipped) it looks at all others. "
        "The fifth column divides by units in a batch: examples above, users below. A batch of 200 users has "
        "1,000 examples.",
    )  # fmt: skip


# Steps, participations, epsilon, delta.
SUBSETS = [(391, 5, 8.0, 1.25e-5), (1000, 4, 8.0, 1e-5), (10_000, 205, 8.0, 1e-5)]
NUM_DRAWN = 65_536


def bounded(name: str, scheme, epsilon: float, delta: float) -> float:
    """Return the noise multiplier, to 1e-5, at which an accountant's bound is delta."""

    def excess(sigma):
        mechanism = Mechanism(scheme, BandedToeplitz.identity(), sigma)
        return math.log(ACCOUNTANTS[name].delta(mechanism, epsilon) / delta)

    return float(optimize.brentq(excess, 0.3, 5.0, rtol=1e-5))


@jax.jit
def log_ratio_of_subsets(ratios, count):
    """Return ln of the mean over all subsets with `len(count)` steps of e to the sum of their ratios.

    With `p_i` proportional to `x_i / (1 - x_i)` at odds so chosen that k are expected it is the probability
    that k independent coins of these chances show, times a known factor: no number is tiny.
    """
    k = len(count)

    def halve(_, between):
        low, high = between
        middle = (low + high) / 2
        is_low = jax.nn.sigmoid(ratios + middle).sum(0) < k
        return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

    ends = jnp.full(ratios.shape[1], -60.0), jnp.full(ratios.shape[1], 60.0)
    odds = sum(jax.lax.fori_loop(0, 40, halve, ends)) / 2

    def step(chances, p):
        before = jnp.concatenate([jnp.zeros_like(chances[:1]), chances[:-1]])
        return chances + p * (before - chances), None

    start = jnp.zeros((k + 1, ratios.shape[1])).at[0].set(1.0)
    chances, _ = jax.lax.scan(step, start, jax.nn.sigmoid(ratios + odds))
    return jnp.log(chances[k]) + jax.nn.softplus(ratios + odds).sum(0) - k * odds


def estimated(n: int, k: int, epsilon: float, sigma: float) -> tuple[float, float]:
    """Return (H(P, Q), its standard error) of k of n steps with C = I, from two replicas: an estimate.

    The number of common steps j of two uniform subsets is hypergeometric, so `Z_2 = E e^{j / sigma^2}`, and
    of two replicas it has these chances times `e^{j / sigma^2}`; given j both are uniform.
    """
    rng, block = np.random.default_rng(0), 512
    common = np.arange(k + 1)
    logs = stats.hypergeom(n, k, k).logpmf(common) + common / sigma**2
    log_z = float(np.logaddexp.reduce(logs))
    log_subsets = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
    levels, terms = np.cumsum(np.exp(logs - log_z)), []
    for _ in range(NUM_DRAWN // block):
        both = np.minimum(np.searchsorted(levels, rng.random(block)), k)
        x = np.zeros((n, block), np.float32)
        for sample, j in enumerate(both):
            steps = rng.choice(n, 2 * k - j, replace=False)
            x[steps, sample] = 1
            x[steps[:j], sample] = 2
        y = x + sigma * rng.standard_normal(x.shape, dtype=np.float32)
        loss = np.asarray(log_ratio_of_subsets(jnp.asarray((y - 0.5) / sigma**2), jnp.zeros(k))) - log_subsets
        terms.append(np.exp(log_z - loss) * -np.expm1(np.minimum(epsilon - loss, 0)))
    found = np.concatenate(terms)
    return float(found.mean()), float(found.std() / len(found) ** 0.5)


def k_of_n() -> None:
    """Compare bounds for k of n steps with those of Poisson sampling, and with an estimate of the least."""
    rows = []
    for n, k, epsilon, delta in SUBSETS:
        started = time.process_time()
        poisson = bounded("pld", Poisson(n, k / n), epsilon, delta)
        scheme = BalancedMinSep(n, 1, k)
        bound = bounded("redrawn-bins", scheme, epsilon, delta)
        seconds = time.process_time() - started
        # One step of the secant method with the slope between two noise multipliers near the answer.
        ends = 0.97 * bound, 0.99 * bound
        found = [estimated(n, k, epsilon, sigma) for sigma in ends]
        slope = math.log(found[1][0] / found[0][0]) / math.log(ends[1] / ends[0])
        least = ends[1] * (delta / found[1][0]) ** (1 / slope)
        half = 1.96 * found[1][1] / found[1][0] / abs(slope)
        if n * k < 1e4:
            options = (
                f"--dataset-size {100 * n} --batch-size {100 * k} --iterations {n} --epsilon {epsilon:g} "
            )
            options += f"--delta {delta:g} --scheme balanced-min-sep --min-separation 1 --bands 1"
            plan, samples, _ = calibrated(options)
            sampled = f"{plan.noise_multiplier:.4f} ({samples})"
        else:
            sampled = "tables of pairs need 3.4 GB"
        rows.append([f"{n:,}", str(k), f"{epsilon:g}, {delta:g}", f"{poisson:.4f}",
                     f"{bound:.4f} ({100 * (bound / poisson - 1):+.1f} %)", sampled,
                     f"{least:.4f} ± {half * least:.4f}", f"{seconds:.1f}"])  # fmt: skip
        print(*rows[-1], sep=" | ", flush=True)
    record(
        "k_of_n",
        question="k of n steps, independent noise: what a certificate without samples leaves",
        order=56,
        columns=["steps", "k", "epsilon, delta", "Poisson (pld)", "k of n, without samples",
                 "k of n, by samples, grid of 1 %", "remove direction alone, estimate", "CPU-s, bounds"],
        rows=rows,
        note="Noise multipliers. The bound is that of the groups of a random partition "
        "(proofs/random_allocation.md, section 8). The estimate is the noise multiplier at which H(P, Q) is "
        f"delta, by {NUM_DRAWN:,} draws from two replicas whose common steps are hypergeometric, 95 % "
        "interval; it certifies nothing. The first and the last job are settings of arXiv 2605.07072, whose "
        "program searches 0.60 to 0.50 in the first by 2 million samples for each. Without tables (at most 2 "
        "GB) samples are plain draws, 10 million and more, so `calibrate` takes the bound, on its grid of "
        "1 %: 1.4166, as for Poisson sampling.",
    )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["README"] and len(sys.argv) == 3:
        readme(sys.argv[2])
    elif sys.argv[1:] == ["users"]:
        users()
    elif sys.argv[1:] == ["k-of-n"]:
        k_of_n()
    else:
        sys.exit(__doc__)
