"""Intervals of estimates for users with several examples whose likelihood is bounded.

PYTHONPATH=. python tests/benchmarks/users_intervals.py EXAMPLES NOISE_MULTIPLIER [epsilon] [delta] [profile]

50,000 examples, batches of 200, 1,000 steps, separation 64, 16 bands, (4, 1e-5), 100,000 draws.
"""

import sys
import time

import jax

from jaxacct import (
    BandedToeplitz,
    IndependentAttribution,
    Mechanism,
    estimate_delta,
    estimate_epsilon,
    privacy_profile,
)


def main() -> None:
    examples, sigma, *wanted = sys.argv[1:]
    scheme = IndependentAttribution.from_batch_size(
        dataset_size=50_000,
        batch_size=200,
        iterations=1000,
        min_separation=64,
        examples_per_user=int(examples),
    )
    mechanism = Mechanism(scheme, BandedToeplitz.square_root(16), float(sigma))
    quantities = {
        "epsilon": lambda **options: estimate_epsilon(mechanism, 1e-5, **options),
        "delta": lambda **options: estimate_delta(mechanism, 4.0, **options),
        "profile": lambda **options: privacy_profile(mechanism, [3.0, 3.5, 4.0], **options),
    }
    for name in wanted or quantities:
        started = time.process_time()
        found = quantities[name](num_samples=100_000, key=jax.random.key(0))
        print(found, f"{time.process_time() - started:.0f} CPU-s", flush=True)


if __name__ == "__main__":
    main()
