"""Balls-in-bins with C = I: both bounds where delta is 1e-5, and noise released with and without draws.

PYTHONPATH=. python tests/benchmarks/random_allocation.py
"""

import time

import scipy

from jaxacct import BallsInBins, BandedToeplitz, calibrate
from jaxacct.accountants.lognormal_lattice import Mixture, Phases
from jaxacct.accountants.lognormal_sums import divergence_bound


def width(terms: int, epsilon: float) -> tuple[float, float, float]:
    """(mu at which the upper bound is 1e-5, lower and upper bound there), the larger direction."""

    def above(mu, side=1):
        return max(
            divergence_bound(Mixture((Phases(terms, mu),)), epsilon, direction, side)
            for direction in ("remove", "add")
        )

    mu = scipy.optimize.brentq(lambda mu: above(mu) - 1e-5, 0.05, 4.0, xtol=1e-4)
    return mu, above(mu, -1), above(mu)


def main():
    print("n, cycle, epsilon, delta: noise without draws (CPU-s); with draws (CPU-s, samples)")
    for n, cycle, epsilon, delta in (
        (1000, 100, 2.0, 1e-5),
        (64, 64, 2.0, 1e-2),
        (300, 128, 1.0, 1e-6),
        (7200, 256, 8.0, 1e-8),
    ):
        problem = BallsInBins(n, cycle), BandedToeplitz.identity()
        target = dict(epsilon=epsilon, delta=delta)
        started = time.process_time()
        known = calibrate(*problem, **target)
        middle = time.process_time()
        line = f"{n}, {cycle}, {epsilon:g}, {delta:g}: {known.mechanism.noise_multiplier:.4f} "
        line += f"({middle - started:.1f} s)"
        if n < 1000:  # others take many minutes with draws
            drawn = calibrate(*problem, **target, max_samples=2_000_000)
            drew = drawn.evidence.num_samples
            line += f"; {drawn.mechanism.noise_multiplier:.4f} ({time.process_time() - middle:.1f} s, "
            line += f"{drew} samples, {'drawn' if drawn.is_sampled else drawn.evidence.accountant})"
        print(line, flush=True)
    print("phases  epsilon  mu      lower      upper      upper / lower - 1")
    for terms in (2, 10, 100, 1000):
        for epsilon in (1.0, 2.0, 4.0, 8.0):
            mu, low, high = width(terms, epsilon)
            print(f"{terms:6d}  {epsilon:7g}  {mu:.4f}  {low:.4e} {high:.4e} {high / low - 1:.1e}")


if __name__ == "__main__":
    main()
