"""Number of gradients to compute at a time: measured on the machine that trains, and stored with the run.

Integer sums do not depend on it, but the last bit of a gradient may, so a resumed run uses the stored number.
The measurement is on a batch of zeros and is independent of the data.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxacct.common.files import read_json

from .per_example import default_microbatch_size

AUTO = "auto"
_REPEATS = 3


def stored(out, name: str) -> Any:
    """Return what the run in a folder began with by this name, or None."""
    path = None if out is None else Path(out) / "run.json"
    found = read_json(path, "run") if path is not None and path.exists() else {}
    return found.get(name) if isinstance(found, dict) else None


def fastest(make: Callable[[int], Any], params, batch, mask, begin: int | None = None) -> int:
    """Return the microbatch size of the fastest step, searched in powers of 2 from `begin` on.

    `make` is: microbatch size -> step. `batch` and `mask` have the shapes and shardings of training.
    """
    taken: dict[int, float] = {}
    if isinstance(mask, np.ndarray):
        size, everything = len(mask), np.ones_like(mask)
    else:  # rows of one device
        (size,), everything = mask.sharding.shard_shape(mask.shape), jax.numpy.ones_like(mask)

    def seconds(micro: int) -> float:
        if micro not in taken:
            step = make(micro)
            state, fastest = step.init(jax.tree.map(jax.numpy.array, params)), float("inf")
            for turn in range(_REPEATS + 1):
                begun = time.perf_counter()
                state, info = step(state, batch, everything)
                jax.block_until_ready((state, info))
                # The first call compiles.
                fastest = min(fastest, time.perf_counter() - begun) if turn else fastest
            taken[micro] = fastest
        return taken[micro]

    candidates = [2**i for i in range(size.bit_length()) if 2**i < size] + [size]
    at = candidates.index(min(begin or default_microbatch_size(params), size))
    for turn in (1, -1):
        while 0 <= at + turn < len(candidates) and seconds(candidates[at + turn]) < seconds(candidates[at]):
            at += turn
    return candidates[at]
