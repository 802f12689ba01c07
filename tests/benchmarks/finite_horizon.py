"""The noise of the n x n mechanism beside that of the extended horizon: balls-in-bins, 64 bands, 64 bins.

    PYTHONPATH=. python tests/benchmarks/finite_horizon.py [GRID_RATIO]

The last column is what no accountant can go below: the noise multiplier at which delta is the target's, by
float64 draws in NumPy from the Gram matrix of the phases' means on n rows, with no other part of the project.
"""

import sys
import time

import jax
import numpy as np

from jaxacct import BallsInBins
from jaxacct.calibration import calibrate as calibration
from jaxacct.core.plan import Plan
from jaxacct.strategies import by_name, ending
from tests.oracles.enumeration import strategy_matrix

BINS, EPSILON, DELTA = 64, 2.0, 1e-2
DRAWS, CHUNK = 800_000, 20_000


def delta_of(gram: np.ndarray, sigma: float) -> float:
    """The divergence of the remove direction, the larger one here; the same draws for every sigma."""
    generator, total = np.random.default_rng(7), 0.0
    factor, norms = np.linalg.cholesky(gram + 1e-13 * np.eye(len(gram))), np.diag(gram) / 2
    for _ in range(DRAWS // CHUNK):
        scores = sigma * generator.standard_normal((CHUNK, len(gram))) @ factor.T
        scores += gram[generator.integers(len(gram), size=CHUNK)] - norms
        loss = np.log(np.exp(scores / sigma**2).mean(axis=1))
        total += np.maximum(0.0, -np.expm1(EPSILON - loss)).sum()
    return total / DRAWS


def min_noise(strategy, n: int, above: float) -> float:
    """The noise multiplier at which delta is the target's, to about 0.2 %; at most `above`."""
    phases = (np.arange(n) % BINS == np.arange(BINS)[:, None]).astype(float)
    means = phases @ strategy_matrix(strategy.array, n, n).T
    low, high = above / 1.05, above
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if delta_of(means @ means.T, middle) > DELTA else (low, middle)
    return (low * high) ** 0.5


def timed(scheme, strategy, ratio: float) -> tuple[Plan, float]:
    started = time.perf_counter()
    plan = calibration.calibrate(
        scheme, strategy, epsilon=EPSILON, delta=DELTA, grid_ratio=ratio, key=jax.random.key(3)
    )
    return plan, time.perf_counter() - started


def main(ratio: float) -> None:
    for n in (64, 128, 256):
        for name in ("square-root", "optimal"):
            scheme = BallsInBins(n, BINS)
            strategy = by_name(name, BINS, scheme)
            cells, released = [], 3.0
            for rule in (lambda strategy, scheme: strategy, ending):
                calibration.ending = rule
                plan, seconds = timed(scheme, strategy, ratio)
                draws = f"{plan.evidence.num_samples:,} draws" if plan.is_sampled else "analytic"
                released = plan.mechanism.noise_multiplier
                cells.append(f"{released:.4f} ({draws}, {seconds:.0f} s, error {plan.prefix_sum_error:.3f})")
            least = f"{min_noise(strategy, n, released):.4f}"
            print("| " + " | ".join([f"{n}", name, *cells, least]) + " |", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.01)
