"""Matrices with a banded inverse: error x squared sensitivity for several participations, by both bounds."""

import time

import numpy as np

from jaxacct import BandedInverse, prefix_sum_error

BANDS = 8
ELSEWHERE = {(128, 1): 6.131, (128, 4): 28.61, (128, 16): 209.6}


def exact(strategy, n: int, separation: int, k: int) -> float:
    """`||C x||^2` of evenly spaced participations, the worst where the column never rises."""
    x = np.zeros(n)
    x[: k * separation : separation] = 1
    return float(np.square(np.convolve(x, strategy.array)[:n]).sum())


def main():
    for n, k in [(128, 1), (128, 4), (128, 16), (1000, 1), (1024, 16), (7200, 28)]:
        b = n // k
        bisr = BandedInverse.bisr(iterations=n, bands=BANDS)
        once = BandedInverse.optimal(iterations=n, bands=BANDS)
        start = time.perf_counter()
        best = BandedInverse.optimal(iterations=n, bands=BANDS, min_separation=b, participations=k)
        seconds = time.perf_counter() - start
        cells = []
        for strategy in (bisr, once, best):
            error = prefix_sum_error(strategy, iterations=n, noise_multiplier=1.0)
            overlaps = 1 + 2 * float(strategy.cross_terms(n, b))
            cells += [error * exact(strategy, n, b, k), error * k * overlaps]
        cells[-1] = error * best.squared_sensitivity(n, b, k)
        shown = " | ".join(f"{cell:.4g}" for cell in cells)
        print(f"| {n} | {k} | {shown} | {ELSEWHERE.get((n, k), '')} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
