"""Matrices made for the noise that they need with sampling, against the other two, at estimated noise."""

import time
from typing import Any

from jaxacct import BMinSep, Poisson
from jaxacct.recommendation.matrices import matrix
from jaxacct.recommendation.noise_estimate import Estimates
from jaxacct.strategies.workload import PREFIX_SUMS

CASES = [  # steps, examples, batch, epsilon, delta, separation, bands
    (1000, 50_000, 200, 8.0, 1e-5, 64, 16),
    (1000, 50_000, 200, 2.0, 1e-5, 64, 16),
    (1000, 50_000, 200, 1.0, 1e-5, 32, 16),
    (1000, 12_800, 200, 8.0, 1e-5, 64, 16),
    (2000, 50_000, 200, 4.0, 1e-5, 64, 64),
    (2000, 50_000, 200, 1.0, 1e-6, 128, 64),
    (2000, 25_600, 200, 8.0, 1e-5, 128, 64),
]


def main():
    for n, examples, batch, epsilon, delta, separation, bands in CASES:
        numbers: dict[str, Any] = dict(dataset_size=examples, batch_size=batch, iterations=n)
        scheme = BMinSep.from_batch_size(**numbers, min_separation=separation)
        estimates = Estimates.at(Poisson.from_batch_size(**numbers), epsilon, delta)
        cells, errors = [], []
        for name in ("square-root", "optimal", "amplified"):
            start = time.perf_counter()
            made = matrix(name, bands, scheme, PREFIX_SUMS, estimates.mu)
            seconds = time.perf_counter() - start
            place = estimates.of(scheme, made, name, None, PREFIX_SUMS)
            assert place is not None
            cells.append(f"{place.noise_multiplier:.4f} | {place.error:.4g}")
            errors.append(place.error)
        gain = 100 * (1 - errors[2] / min(errors[:2]))
        target = f"{n}, {examples / batch:g}, {bands}, {separation} | {epsilon:g}, {delta:g}"
        print(f"| {target} | {' | '.join(cells)} | {gain:.1f} | {made.bands} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
