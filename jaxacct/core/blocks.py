"""Blocks of one direction, drawn by the workers of an executor: the counts are those of one machine.

The stream of a verification is split into pieces of `PIECE` blocks. What a block draws depends on its key
alone, and counts are integers, so neither the number of workers nor the order of their answers matters.
"""

import contextlib
import functools
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxacct.common.files import to_json
from jaxacct.common.records import differences
from jaxacct.common.version import VERSION
from jaxacct.core.check import resolve
from jaxacct.core.claim import Claim, claim_from_json
from jaxacct.kernels import randomness
from jaxacct.proposals.base import ProposalSpec
from jaxacct.proposals.threshold import Resolved
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.hockey_stick import Direction

PIECE = 16  # blocks of a piece: all stretches of `core.verify.next_check` are multiples
MAX_AHEAD = 64  # pieces submitted before they are known to be needed, so that all workers have work


@dataclass(frozen=True)
class Piece:
    """Consecutive blocks of one direction, which a worker draws: plain values, which any executor pickles.

    Attributes:
      claim: JSON text of the claim.
      direction: that is drawn.
      proposal: specification of the distribution that is sampled.
      distribution: the proposal's `draw_metadata`, which the worker's own must equal.
      version: of jaxacct, which the worker must have.
      margin: reserve in epsilon for rounding, in nats.
      key: two words of the stream's key. They are secret: with them the samples can be drawn in advance.
      first, last: blocks first..last-1.
    """

    claim: str
    direction: Direction
    proposal: ProposalSpec
    distribution: dict[str, Any]
    version: str
    margin: float
    key: tuple[int, int] = field(repr=False)
    first: int
    last: int


def check_executor(executor: Executor | None) -> None:
    """Check that pieces can be submitted to an executor, if there is one; ValueError otherwise."""
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise ValueError(f"executor must be a concurrent.futures.Executor, got {type(executor).__name__}")


def draw_piece(piece: Piece) -> tuple[np.ndarray, np.ndarray]:
    """Return histograms (terms, losses) of a piece, int64: what a worker does.

    ValueError where the worker has another jaxacct, or finds another distribution.
    """
    if piece.version != VERSION:
        raise ValueError(f"executor must have workers with jaxacct {piece.version}, one has {VERSION}")
    of = _resolved(piece.claim, piece.direction, piece.proposal)
    flaws = differences(of.proposal.draw_metadata, piece.distribution, "the distribution of a worker")
    if flaws:
        raise ValueError(f"executor must have workers like this machine: {flaws[0]}")
    return of.count(randomness.key_from_words(list(piece.key)), piece.first, piece.last, piece.margin)


@functools.lru_cache(maxsize=8)
def _resolved(claim: str, direction: Direction, proposal: ProposalSpec) -> Resolved:
    return resolve(claim_from_json(json.loads(claim)), direction, proposal)


@dataclass(frozen=True)
class Fleet:
    """Executor, and the JSON text of the claim whose samples its workers draw."""

    executor: Executor
    claim: str

    @classmethod
    def of(cls, executor: Executor, claim: Claim) -> "Fleet":
        """Return the fleet of an executor; ValueError for a mechanism that no worker can read."""
        check_executor(executor)
        text = to_json(claim.to_json())
        claim_from_json(json.loads(text))
        return cls(executor, text)

    @contextlib.contextmanager
    def counter(
        self, of: Resolved, stream, margin: float, done: int, limit: int
    ) -> Iterator[Callable[[int, int], Any]]:
        """Yield the function (first, last) -> histograms of these blocks.

        Its calls must be for consecutive stretches, from block `done` on; blocks from `limit` on are not
        drawn. Pieces that were submitted in vain are cancelled at the end.
        """
        words = randomness.key_words(stream)
        proposal, key = of.proposal, (words[0], words[1])
        common = self.claim, proposal.direction, proposal.spec, proposal.draw_metadata, VERSION, margin, key
        waiting: deque[tuple[Piece, Any]] = deque()
        begins = iter(range(done, limit, PIECE))

        def count(first: int, last: int):
            counts = None
            while first < last:
                for begin in itertools.islice(begins, MAX_AHEAD - len(waiting)):
                    piece = Piece(*common, begin, min(limit, begin + PIECE))
                    waiting.append((piece, self.executor.submit(draw_piece, piece)))
                piece, future = waiting.popleft()
                if piece.first != first or piece.last > last:
                    raise ValueError(f"blocks {first}..{last} are not the next: {piece.first}..{piece.last}")
                counts = hockey_stick.add_counts(counts, _checked(future.result(), piece))
                first = piece.last
            return counts

        try:
            yield count
        finally:
            for _, future in waiting:
                future.cancel()


def _checked(histograms, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
    """Return the histograms of a worker; ValueError for some that the piece cannot have."""
    sizes = len(bounds.TERM_EDGES), len(hockey_stick.loss_bounds(piece.direction))
    samples = (piece.last - piece.first) * randomness.BLOCK_SIZE
    terms, losses = histograms
    for name, counts, size in (("terms", terms, sizes[0]), ("losses", losses, sizes[1])):
        valid = isinstance(counts, np.ndarray) and counts.dtype == np.int64 and counts.shape == (size,)
        if not (valid and counts.min() >= 0 and counts.max() <= samples and counts.sum() == samples):
            raise ValueError(
                f"executor must return all {samples} draws of blocks {piece.first}..{piece.last - 1}: {name} "
                "lack some"
            )
    return terms, losses
