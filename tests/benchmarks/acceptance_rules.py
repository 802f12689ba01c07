"""Samples until acceptance, by rule and by distribution of the terms; prints a Markdown table.

Run `python tests/benchmarks/acceptance_rules.py > tests/benchmarks/acceptance_rules.md`. Terms are
drawn as histograms over `TERM_EDGES`, block by block: the only input of these rules.
"""

import math

import numpy as np
from scipy import optimize, stats

from jaxacct.statistics import bounds

Q, RUNS, BLOCKS_PER_ORACLE = 1e-10, 41, 100
CAPTION = f"""\
Median number of terms until `mean <= theta` is accepted at q = {Q:g}; {RUNS} runs a row.
*oracle*: ln(1/q) over the log growth of the best bet for the true distribution. *fixed KL* and *Bernstein*:
the number fixed beforehand, the true distribution known, at which acceptance is an even chance.
*pilot + grid*: `default_bets` with 20/theta pilot terms (not counted). *adaptive*: one bet a block,
tuned on the blocks before. In brackets, the excess over the oracle.
"""
RULES = ("fixed KL", "pilot + grid", "grid only", "adaptive", "Bernstein")


def coin(mean):
    return lambda x: np.where(x >= 1, 1.0, 1 - mean)


def uniform(mean):
    """Zero, or with probability `2 mean` uniform on [0, 1]."""
    return lambda x: 1 - 2 * mean + 2 * mean * x


def beta(mean):
    """Beta(2, 2/mean - 2): every term is about as small as the mean."""
    return lambda x: stats.beta.cdf(x, 2, 2 / mean - 2)


def hockey_stick(mean):
    """(1 - e^(eps - L))_+ of the Gaussian mechanism at sigma = 1, with eps set by the mean."""

    def delta(epsilon):
        remove, add = stats.norm.cdf(0.5 - epsilon), stats.norm.cdf(-0.5 - epsilon)
        return remove - math.exp(epsilon) * add

    epsilon = optimize.brentq(lambda e: delta(e) - mean, -5, 15)
    return lambda x: stats.norm.cdf(epsilon - np.log1p(-np.minimum(x, 1 - 1e-16)) - 0.5)


def samples_to_acceptance(distribution, theta, oracle, rng):
    """Median number of terms at acceptance for the three sequential rules, in order of RULES."""
    used = np.flatnonzero(distribution)
    values, block = bounds.TERM_EDGES[used], math.ceil(oracle / BLOCKS_PER_ORACLE)
    payoffs = (theta - values) / (1 - theta)

    def dense(held):
        counts = np.zeros(distribution.size, np.int64)
        counts[used] = held
        return counts

    def log_wealth(held, bets, weights):
        with np.errstate(divide="ignore"):  # a finite stand-in for log 0, so that 0 terms cost 0
            logs = np.maximum(np.log1p(np.outer(payoffs, bets)), -1e12)
        return np.logaddexp.reduce(np.cumsum(held, axis=0) @ logs + np.log(weights), axis=1)

    found = []
    for _ in range(RUNS):
        pilot = dense(rng.multinomial(math.ceil(20 / theta), distribution[used]))
        held = rng.multinomial(block, distribution[used], size=3 * BLOCKS_PER_ORACLE)
        times = []
        for bets, weights in (bounds.default_bets(theta, pilot), bounds.default_bets()):
            accepted = log_wealth(held, bets, weights) >= -math.log(Q)
            time = int(np.argmax(accepted)) + 1 if accepted.any() else math.inf
            if accepted.any():  # the module agrees on the first block that is enough
                for blocks, verdict in ((time, True), (time - 1, False)):
                    counts = dense(held[:blocks].sum(axis=0))
                    assert bounds.accepts(counts, theta, Q, bets, weights) == verdict
            times.append(time)
        times.append(_adaptive(held, payoffs, theta, dense))
        found.append([block * time for time in times])
    return np.median(found, axis=0)


def _adaptive(held, payoffs, theta, dense):
    """One bet a block, tuned on all the blocks before it."""
    past, wealth = np.zeros(held.shape[1], np.int64), 0.0
    for time, counts in enumerate(held, 1):
        bet = bounds.default_bets(theta, dense(past))[0][0]
        wealth += counts @ np.log1p(bet * payoffs)
        past += counts
        if wealth >= -math.log(Q):
            return time
    return math.inf


def bernstein(mean, variance, theta):
    """Terms for the empirical Bernstein bound to meet theta, were mean and variance as expected."""
    log_term = math.log(2 / Q)

    def excess(log_n):
        n = math.exp(log_n)
        width = math.sqrt(2 * variance * log_term / n) + 7 * log_term / (3 * (n - 1))
        return mean + width - theta

    return math.exp(optimize.brentq(excess, math.log(10), math.log(1e15)))


def main():
    rng = np.random.default_rng(20261120)
    print(CAPTION)
    print("| distribution | theta | theta / mean | oracle | " + " | ".join(RULES) + " |")
    print("|---|---|---|---|" + "---|" * len(RULES))
    over = []
    for make in (coin, uniform, hockey_stick, beta):
        for theta in (0.5, 0.1, 1e-2, 1e-3):
            for ratio in (2, 1.2):
                distribution = np.diff(make(theta / ratio)(bounds.TERM_EDGES), prepend=0).clip(0)
                distribution /= distribution.sum()
                mean = distribution @ bounds.TERM_EDGES
                variance = distribution @ (bounds.TERM_EDGES - mean) ** 2
                large = np.round(distribution * 1e15).astype(np.int64)
                oracle = bounds.predicted_samples(theta, large, 2 * Q)
                row = [-math.log(Q) / bounds.kl(mean, theta)]
                row += list(samples_to_acceptance(distribution, theta, oracle, rng))
                row += [bernstein(mean, variance, theta)]
                over.append(np.array(row) / oracle)
                cells = [f"{n:,.0f} ({round(100 * n / oracle - 100):+d}%)" for n in row]
                name = make.__name__.replace("_", "-")
                head = f"| {name} | {theta:g} | {ratio} | {oracle:,.0f} |"
                print(head, " | ".join(cells), "|")
    mean_over = np.exp(np.mean(np.log(over), axis=0))
    excess = " | ".join(f"{100 * m - 100:+.0f}%" for m in mean_over)
    print("| geometric mean | | | |", excess, "|")


if __name__ == "__main__":
    main()
