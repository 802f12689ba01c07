"""Matrices with a banded inverse: error x squared sensitivity by both bounds; and for workloads."""

import time

import numpy as np
import optax

from jaxacct import BandedInverse, BandedToeplitz, prefix_sum_error
from jaxacct.strategies import Workload, workload_error

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
    workloads()


def workloads():
    """SGD with momentum and a linear decay, as `train.optimizers.sgd`: the matrix made for it or not."""
    n, bands, separation = 1024, 32, 64
    schedule = dict(iterations=n, bands=bands, min_separation=separation, participations=n // separation)
    decay = optax.linear_schedule(1.0, 0.05, n // 2, n // 4)
    for name, workload in [
        ("momentum 0.95", Workload(momentum=0.95)),
        ("weight decay 0.01", Workload(weight_decay=0.01)),
        ("rate falling to 0.05", Workload(decay)),
        ("momentum 0.95, rate falling to 0.05", Workload(decay, momentum=0.95)),
    ]:
        cells = []
        for kind in (BandedToeplitz, BandedInverse):
            for made_for in (Workload(), workload):
                start = time.perf_counter()
                strategy = kind.optimal(**schedule, workload=made_for)
                seconds = time.perf_counter() - start
                error = workload_error(strategy, iterations=n, noise_multiplier=1.0, workload=workload)
                cells.append(error * strategy.squared_sensitivity(n, separation, n // separation))
        ratio = cells[1] / cells[0], cells[3] / cells[2]
        shown = " | ".join(f"{cell:.5g}" for cell in cells)
        print(f"| {name} | {shown} | {ratio[0]:.3f} | {ratio[1]:.3f} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
