"""Privacy-loss draws per second against jax-privacy, in one run on the same machine.

python tests/benchmarks/throughput.py
"""

import os
import time

import jax
import numpy as np
from jax_privacy import batch_selection
from jax_privacy.experimental.monte_carlo import sample_generation

from jaxacct import BandedToeplitz, BMinSep, Mechanism, sample_privacy_loss

# (iterations, bands and separation, data set size, batch size, our samples, peer's samples)
SETTINGS = ((7200, 256, 14_745_600, 1793, 32_768, 2048), (1024, 16, 51_200, 200, 262_144, 32_768))
REPEATS = 5


def rate(draw, samples: int) -> float:
    """Best samples per second of `REPEATS` runs after one that compiles."""
    draw(samples)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        draw(samples)
        seconds.append(time.perf_counter() - started)
    return samples / min(seconds)


def peer_rate(scheme: BMinSep, strategy: BandedToeplitz, samples: int) -> float:
    """Samples per second of jax-privacy."""
    n, b, p = scheme.iterations, scheme.min_separation, scheme.sampling_probability
    peer = batch_selection.BMinSepSampling(sampling_prob=p, iterations=n, min_sep=b)

    def draw(number):
        sample_generation.get_privacy_loss_sample(peer, 0.47, strategy.array, seed=0, num_samples=number)

    return rate(draw, samples)


def main() -> None:
    print(f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax {jax.__version__}")
    print("| n | b | jaxacct samples/s | jax-privacy samples/s | ratio |")
    print("|---|---|---|---|---|")
    for n, b, size, batch, ours, theirs in SETTINGS:
        scheme = BMinSep.from_batch_size(dataset_size=size, batch_size=batch, iterations=n, min_separation=b)
        mechanism = Mechanism(scheme, BandedToeplitz.square_root(b), 0.47)
        key = jax.random.key(0)
        mine = rate(lambda s, m=mechanism, k=key: np.asarray(sample_privacy_loss(k, m, s)), ours)
        other = peer_rate(scheme, mechanism.strategy, theirs)
        print(f"| {n} | {b} | {mine:,.0f} | {other:,.0f} | {mine / other:.1f} |", flush=True)


if __name__ == "__main__":
    main()
