"""Draws per second of every variant as a share of plain b-min-sep's, in one run on the same machine.

python tests/benchmarks/variants.py
"""

import os

import jax
import numpy as np
from throughput import rate

from jaxacct import (
    BandedInverse,
    BandedToeplitz,
    BMinSep,
    Dense,
    Mechanism,
    MultiAttribution,
    TruncatedBMinSep,
)
from jaxacct.kernels.randomness import BLOCK_SIZE
from jaxacct.proposals.base import draw_in_batches, plain
from jaxacct.proposals.families.replicas import replica_proposal
from tests.proposals_by_name import proposal_by_name

ITERATIONS, BANDS, SEPARATION, SAMPLES = 1024, 16, 64, 32_768


def variants():
    """(name, proposal): the first is what the others are compared with."""
    sizes = dict(dataset_size=51_200, batch_size=80, iterations=ITERATIONS, min_separation=SEPARATION)
    banded = BandedToeplitz.square_root(BANDS)
    inverse = BandedInverse.bisr(iterations=ITERATIONS, bands=BANDS)
    dense = np.zeros((ITERATIONS, ITERATIONS))
    for k, value in enumerate(inverse.array):
        dense += value * np.eye(ITERATIONS, k=-k)
    base = BMinSep.from_batch_size(**sizes)
    users = [MultiAttribution.from_batch_size(**sizes, examples_per_user=k) for k in (1, 2, 3)]
    cut = TruncatedBMinSep.from_batch_size(**sizes, max_batch_size=80)
    for name, scheme, strategy in (
        ("b-min-sep", base, banded),
        *((f"multi-attribution, k_u = {u.examples_per_user}", u, banded) for u in users),
        ("truncated at the mean batch", cut, banded),
        ("banded inverse (upper bound)", base, inverse),
        ("dense (upper bound)", base, Dense(dense)),
    ):
        yield name, plain(Mechanism(scheme, strategy, 1.0), "remove")
    for name, scheme in (("b-min-sep", base), ("multi-attribution, k_u = 2", users[1])):
        yield f"{name}, two replicas", replica_proposal(Mechanism(scheme, banded, 1.0), 2, 4.0)
    for direction in ("remove", "add"):
        yield (
            f"truncated, two replicas, {direction}",
            proposal_by_name(Mechanism(cut, banded, 1.0), 8.0, direction, "truncated"),
        )


def main() -> None:
    print(f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax {jax.__version__}")
    print(f"n = {ITERATIONS}, b = {SEPARATION}, {BANDS} bands")
    print("| variant | samples/s | share of plain b-min-sep |")
    print("|---|---|---|")
    key, first = jax.random.key(0), None
    for name, proposal in variants():

        def draw(samples, proposal=proposal):
            for _ in draw_in_batches(proposal, key, 0, samples // BLOCK_SIZE):
                pass

        found = rate(draw, SAMPLES)
        first = first or found
        print(f"| {name} | {found:,.0f} | {found / first:.2f} |", flush=True)


if __name__ == "__main__":
    main()
