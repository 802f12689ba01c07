"""Balls-in-bins with C = I, 300 bins: what a certificate at epsilon 8 takes, beside jax-privacy's.

python -m tests.benchmarks.balls_in_bins_peer

Processor seconds. jax-privacy 2.0.0 draws from the mechanism itself: samples by its own rule, time from its
measured rate. Its newer research code has importance weights of at most 0.0125 here, and is in no release.
"""

import math
import time

import jax
import numpy as np
from jax_privacy import batch_selection
from jax_privacy.experimental.monte_carlo import delta_calculation, sample_generation

from jaxacct import BallsInBins, BandedToeplitz, Mechanism, verify
from jaxacct.accountants.analytic import delta_by
from jaxacct.accountants.random_allocation import RandomAllocation
from tests.benchmarks.results import record

BINS, EPSILON, DELTA, SHARE = 300, 8.0, 1e-5, 0.8
SAMPLES = 20_000


def mechanism_at(sigma: float) -> Mechanism:
    """One cycle of independent noise."""
    return Mechanism(BallsInBins(BINS, BINS), BandedToeplitz.identity(), sigma)


def noise_at(delta: float) -> float:
    """Return the noise multiplier at which the deterministic bound is `delta`, by bisection."""
    low, high = 0.1, 1.0
    while high / low > 1 + 1e-5:
        middle = math.sqrt(low * high)
        low, high = (
            (middle, high)
            if delta_by(RandomAllocation.name, mechanism_at(middle), EPSILON) > delta
            else (low, middle)
        )
    return high


def main() -> None:
    sigma = noise_at(SHARE * DELTA)
    mechanism = mechanism_at(sigma)
    started = time.process_time()
    delta = delta_by(RandomAllocation.name, mechanism_at(sigma * (1 + 1e-9)), EPSILON)  # not cached
    exact = time.process_time() - started
    rows = [["jaxacct, deterministic", "0", f"{exact:.1f}", f"delta(8) <= {delta:.3g}"]]
    for turn in range(2):  # the second one is compiled
        started = time.process_time()
        found = verify(mechanism, EPSILON, DELTA, key=jax.random.key(turn), max_samples=10_000_000)
        seconds = time.process_time() - started
    assert found.certified
    rows.append(
        [
            f"jaxacct, {found.remove.proposal}",
            f"{found.num_samples:,}",
            f"{seconds:.1f}",
            "certified, both directions",
        ]
    )
    peer = batch_selection.BallsInBinsSampling(iterations=BINS, cycle_length=BINS)
    started = time.process_time()
    sample_generation.get_privacy_loss_sample(peer, sigma, np.ones(1), seed=0, num_samples=SAMPLES)
    rate = SAMPLES / (time.process_time() - started)
    needed = 2 * delta_calculation.minimum_samples_to_calibrate(SHARE * DELTA, DELTA)
    rows.append(
        [
            "jax-privacy 2.0.0",
            f"{needed:,} (its rule)",
            f"{needed / rate:,.0f} (predicted)",
            "both directions",
        ]
    )
    for row in rows:
        print(" | ".join(row), flush=True)
    record(
        "balls_in_bins_peer",
        question="Balls-in-bins, C = I, 300 bins: what a certificate at epsilon 8 takes",
        order=55,
        columns=["by", "samples", "CPU-s", "result"],
        rows=rows,
        note=f"Noise multiplier {sigma:.4f}, at which delta(8) is {SHARE:g} of the target 1e-5. jax-privacy "
        f"drew {rate:,.0f} samples a processor second.",
    )


if __name__ == "__main__":
    main()
