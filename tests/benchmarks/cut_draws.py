"""Draws of batches cut at their mean beside draws without cuts: microseconds of the processor a sample.

`PYTHONPATH=. python -m tests.benchmarks.cut_draws` prints rows of a table; the two take turns, so that what
else runs on the machine slows both.
"""

import sys
import time

import jax
import numpy as np

from jaxacct import BandedToeplitz, BMinSep, Mechanism, TruncatedBMinSep
from jaxacct.proposals.base import plain
from tests.proposals_by_name import proposal_by_name

# Iterations, separation, bands, data set size, batch size, turns.
SETTINGS = ((1024, 64, 16, 51_200, 80, 40), (7200, 256, 256, 14_745_600, 1793, 12))
BLOCKS = 8


def main() -> None:
    key = jax.random.key(0)
    for n, separation, bands, size, batch, turns in SETTINGS:
        sizes = dict(dataset_size=size, batch_size=batch, iterations=n, min_separation=separation)
        strategy = BandedToeplitz.square_root(bands)
        cut = Mechanism(TruncatedBMinSep.from_batch_size(**sizes, max_batch_size=batch), strategy, 1.0)
        proposals = {
            "without cuts": plain(Mechanism(BMinSep.from_batch_size(**sizes), strategy, 1.0), "remove"),
            "cut, plain, remove": plain(cut, "remove"),
            "cut, plain, add": plain(cut, "add"),
            "cut, two replicas, remove": proposal_by_name(cut, 8.0, "remove", "truncated"),
            "cut, two replicas, add": proposal_by_name(cut, 8.0, "add", "truncated"),
        }
        for proposal in proposals.values():
            proposal.draw(key, 0, BLOCKS)
        taken = {name: [] for name in proposals}
        for turn in range(turns):
            for name, proposal in proposals.items():
                started = time.process_time()
                samples = proposal.draw(key, turn * BLOCKS, BLOCKS).loss.size
                taken[name].append((time.process_time() - started) / samples * 1e6)
        base = np.array(taken["without cuts"])
        for name, each in taken.items():
            ratio = np.median(base / np.array(each))
            setting = f"{n}, {separation}, {bands}, {size:,}, {batch}"
            line = f"| {setting} | {name} | {np.median(each):.1f} | {ratio:.2f} |"
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
