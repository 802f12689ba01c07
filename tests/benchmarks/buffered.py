"""Buffered linear Toeplitz matrices: error x squared sensitivity beside jax-privacy's and other matrices."""

import time

import jax

from jaxacct import BandedInverse, BandedToeplitz, BufferedToeplitz, prefix_sum_error
from jaxacct.strategies.stationary import Stationary

CASES = [(128, 1, 3), (128, 4, 3), (1000, 1, 3), (1000, 8, 3), (1000, 1, 4), (10_000, 1, 4), (10_000, 16, 4)]


def loss(strategy, n: int, separation: int, k: int) -> float:
    error = prefix_sum_error(strategy, iterations=n, noise_multiplier=1.0)
    return error * strategy.squared_sensitivity(n, separation, k)


def peers(n: int, k: int, buffers: int) -> BufferedToeplitz:
    """jax-privacy's, by its own optimiser for the mean error, with exactly so many buffers."""
    from jax_privacy.matrix_factorization import buffered_toeplitz

    with jax.enable_x64(True):
        found = buffered_toeplitz.optimize(
            n=n, min_sep=n // k, max_participations=k, error="mean", min_buffers=buffers, max_buffers=buffers
        )
        return BufferedToeplitz(tuple(found.buf_decay.tolist()), tuple(found.output_scale.tolist()), n)


def ours(n: int, k: int, buffers: int) -> BufferedToeplitz:
    return BufferedToeplitz.optimal(iterations=n, buffers=buffers, min_separation=n // k, participations=k)


def main():
    for n, k, buffers in CASES:
        b = n // k
        made, seconds = [], []
        for make in (ours, peers):
            start = time.perf_counter()
            made.append(make(n, k, buffers))
            seconds.append(time.perf_counter() - start)
        others: list[Stationary] = [
            BandedInverse.optimal(iterations=n, bands=8, min_separation=b, participations=k)
        ]
        if k == 1 and n <= 1000:
            others.append(BandedToeplitz.optimal(iterations=n, bands=n, min_separation=n, participations=1))
        shown = " | ".join(f"{loss(c, n, b, k):.6g}" for c in [*made, *others])
        print(f"| {n} | {k} | {buffers} | {shown} | {seconds[0]:.2f} | {seconds[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
