"""30 noise multipliers from the same draws beside one, in one process.

python tests/benchmarks/many_multipliers.py [name ...]

Seconds of the processor, the least of a few runs that take turns. "one" is one noise multiplier by the usual
draws (`sample_privacy_loss`), and by the code for many.
"""

import sys
import time

import jax
import numpy as np

from jaxacct import (
    BallsInBins,
    BandedToeplitz,
    BMinSep,
    CyclicPoisson,
    IndependentAttribution,
    Mechanism,
    MultiAttribution,
    Poisson,
)
from jaxacct.estimates.shared_draws import sample_privacy_losses
from jaxacct.proposals.sampling import sample_privacy_loss

REPEATS = 5
SIGMA = 0.6
# Scheme, bands, samples.
SETTINGS = {
    "b-min-sep, 7,200 steps": (
        BMinSep.from_batch_size(
            dataset_size=14_745_600, batch_size=1793, iterations=7200, min_separation=256
        ),
        256,
        2048,
    ),
    "b-min-sep, 1,024 steps": (
        BMinSep.from_batch_size(dataset_size=51_200, batch_size=200, iterations=1024, min_separation=16),
        16,
        4096,
    ),
    "b-min-sep, 1,000 steps": (
        BMinSep.from_batch_size(dataset_size=60_000, batch_size=256, iterations=1000, min_separation=64),
        16,
        4096,
    ),
    "b-min-sep, 100 steps": (BMinSep(100, 8, 0.01), 8, 16_384),
    "balls-in-bins, 1,000 steps": (BallsInBins(1000, 64), 16, 4096),
    "cyclic Poisson, 1,000 steps": (CyclicPoisson(1000, 64, 0.3), 16, 4096),
    "Poisson, 1,000 steps": (Poisson(1000, 0.01), 1, 4096),
    "multi-attribution, 4 examples": (MultiAttribution(1000, 16, 0.005, 4), 16, 2048),
    "multi-attribution, 8 examples": (MultiAttribution(1000, 64, 0.001, 8), 16, 2048),
    "independent, 2 examples, 16 apart": (IndependentAttribution(1000, 16, 0.0042, 2), 16, 512),
    "independent, 2 examples, 64 apart": (IndependentAttribution(1000, 64, 0.0053, 2), 16, 256),
    "independent, 3 examples, 8 apart": (IndependentAttribution(256, 8, 0.01, 3), 8, 512),
    "independent, 4 examples, bounded": (IndependentAttribution(1000, 64, 0.0053, 4), 16, 2048),
}


def seconds(runs) -> list[float]:
    """The least time of each; what is compiled is compiled before."""
    for run in runs:
        run()
    found = []
    for _ in range(REPEATS):
        for run in runs:
            started = time.process_time()
            run()
            found.append(time.process_time() - started)
    return [min(found[i :: len(runs)]) for i in range(len(runs))]


def main() -> None:
    print("| mechanism | direction | one, us a sample | by the code for many | thirty | ratio | ratio |")
    print("|---|---|---|---|---|---|---|")
    key, sigmas = jax.random.key(0), SIGMA * np.linspace(0.8, 1.2, 30)
    for name in sys.argv[1:] or SETTINGS:
        scheme, bands, samples = SETTINGS[name]
        strategy = BandedToeplitz.square_root(bands)
        for direction in ("remove", "add"):

            def many(some, given=(scheme, strategy), samples=samples, direction=direction):
                return sample_privacy_losses(key, *given, some, samples, direction)

            def alone(given=(scheme, strategy), samples=samples, direction=direction):
                np.asarray(sample_privacy_loss(key, Mechanism(*given, SIGMA), samples, direction))

            runs = (alone, lambda f=many: f([SIGMA]), lambda f=many: f(sigmas))
            one, same, thirty = (1e6 * taken / samples for taken in seconds(runs))
            ratios = f"{thirty / one:.1f} | {thirty / same:.1f}"
            print(f"| {name} | {direction} | {one:.1f} | {same:.1f} | {thirty:.1f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
