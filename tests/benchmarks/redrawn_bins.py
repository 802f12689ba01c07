"""Redrawn bins (C = I): certified noise for an advantage of 0.1 beside the published exact one.

python -m tests.benchmarks.redrawn_bins
"""

import time

from jaxacct.accountants.redrawn_bins import redrawn_bins_noise_multiplier
from tests.benchmarks.results import record

EXACT = {
    (100, 10): 1.4262,
    (250, 20): 1.3094,
    (500, 20): 1.0260,
    (500, 40): 1.3101,
    (100, 40): 2.6105,
    (100, 1): 0.6770,
    (1000, 1): 0.4520,
    (10_000, 1): 0.3532,
    (100_000, 1): 0.2970,
}


def main():
    rows = []
    for (steps, epochs), exact in EXACT.items():
        started = time.process_time(), time.perf_counter()
        found = redrawn_bins_noise_multiplier(steps, epochs, 0.0, 0.1, tolerance=2e-4)
        spent = time.process_time() - started[0], time.perf_counter() - started[1]
        rows.append(
            [f"{steps:,}", str(epochs), f"{exact:.4f}", f"{found:.5f}", f"{100 * (found / exact - 1):+.3f} %"]
            + [f"{one:.1f}" for one in spent]
        )
        print(*rows[-1], flush=True)
    record(
        "redrawn_bins",
        question="Redrawn bins: certified noise multiplier for an advantage of 0.1",
        order=56,
        columns=["steps an epoch", "epochs", "published exact", "certified", "above", "CPU-s", "s"],
        rows=rows,
        note="C = I, epsilon 0, delta 0.1, both directions, every error included.",
    )


if __name__ == "__main__":
    main()
