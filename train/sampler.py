"""Real batches for a sampling scheme: the very dataclass that was accounted for decides who is in a batch.

Every step costs O(batch), never a pass over the data. The draws of a step are a function of a secret key
and the step alone, and the state is a function of the earlier draws, so a sampler is resumed by replaying
it: a key and a step number are all that a checkpoint needs.

Which examples were in a batch is private, and so is the key.
"""

import hashlib
import os
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxacct import _validate
from jaxacct.plan import Plan
from jaxacct.schemes import (
    BallsInBins,
    BMinSep,
    CyclicPoisson,
    IndependentAttribution,
    MultiAttribution,
    Poisson,
    Scheme,
    TruncatedBMinSep,
)

from .attribution import Attribution, AttributionPool, check_graph

_SETUP = 2**64 - 1  # the "step" of draws made before the first one


class Batch(NamedTuple):
    """Positions of the examples of one step, padded to a fixed length so that nothing recompiles."""

    indices: np.ndarray
    """(max_batch_size,) int64: positions in the data set, 0 where padded."""
    mask: np.ndarray
    """(max_batch_size,) bool: True for real examples, which come first."""


class BatchOverflowError(Exception):
    """More examples were drawn than a batch holds; leaving some out would not be what was accounted for."""


@dataclass(frozen=True)
class SamplerState:
    """Where a sampler stands; secret.

    Attributes:
      key: 4 words of 32 bits.
      step: batches drawn so far.
      digest: of all batches so far, to notice a NumPy that draws otherwise.
    """

    key: tuple[int, ...]
    step: int
    digest: str


def batch_sizes(plan: Plan) -> tuple[int, float, int]:
    """(dataset_size, expected_batch_size, max_batch_size) of a plan; ValueError when it states none."""
    sizes = plan.dataset_size, plan.expected_batch_size, plan.max_batch_size
    if sizes[0] is None or sizes[1] is None or sizes[2] is None:
        raise ValueError("plan must state the dataset_size to draw batches; calibrate with dataset_size=...")
    return sizes  # pyright: ignore[reportReturnType]


def fresh_key() -> tuple[int, ...]:
    """128 bits from the operating system's generator."""
    return tuple(int(word) for word in np.frombuffer(os.urandom(16), np.uint32))


class Sampler:
    """Batches of one run of a scheme over `dataset_size` examples, in order.

    Each example is sampled exactly by the law of the scheme's participation vectors, independently of all
    others.

    Args:
      scheme: who takes part when.
      dataset_size: number of examples, at least 1.
      max_batch_size: length that batches are padded to.
      truncate: cut larger batches to a uniformly random subset rather than stop; those left out stay barred.
      key: 4 words of 32 bits; from the operating system by default. Only tests should fix it.
      graph: of users and examples, for the attribution schemes; a batch then holds numbers of its examples.
        Under multi-attribution each must have one owner.

    Raises:
      ValueError: bad arguments.
    """

    def __init__(
        self,
        scheme: Scheme,
        dataset_size: int,
        max_batch_size: int,
        key=None,
        *,
        truncate: bool = False,
        graph: Attribution | None = None,
    ):
        self.scheme = scheme
        self.dataset_size = _validate.positive_integer("dataset_size", dataset_size)
        self.max_batch_size = _validate.positive_integer("max_batch_size", max_batch_size)
        self._key = fresh_key() if key is None else tuple(int(word) for word in key)
        self.truncate = truncate or isinstance(scheme, TruncatedBMinSep)
        if isinstance(scheme, TruncatedBMinSep):
            wanted = scheme.dataset_size, scheme.max_batch_size
            if (self.dataset_size, self.max_batch_size) != wanted:
                raise ValueError(
                    f"dataset_size and max_batch_size must be the scheme's {wanted}, were "
                    f"{(self.dataset_size, self.max_batch_size)}"
                )
            scheme = scheme.uncut
        self._step = 0
        self._digest = hashlib.blake2b(digest_size=16).hexdigest()
        kind = type(scheme)
        check_graph(scheme, graph, self.dataset_size)
        if isinstance(scheme, MultiAttribution) and graph is not None:
            self._pool = AttributionPool(scheme, graph, self._generator(_SETUP))
            return
        if kind not in _POOLS:
            raise ValueError(
                f"scheme must be one of {', '.join(k.name for k in _POOLS)}, was {kind.__name__}"
            )
        self._pool = _POOLS[kind](scheme, self.dataset_size, self._generator(_SETUP))

    @classmethod
    def from_plan(cls, plan: Plan, key=None, graph: Attribution | None = None) -> "Sampler":
        """The sampler of a plan; ValueError when the plan does not say how large the data set is."""
        dataset_size, _, largest = batch_sizes(plan)
        cut = plan.truncation_delta is not None
        return cls(plan.mechanism.scheme, dataset_size, largest, key, truncate=cut, graph=graph)

    def next(self) -> Batch:
        """The next batch.

        Raises:
          ValueError: after the last step of the scheme.
          BatchOverflowError: when the batch does not fit.
        """
        if self._step >= self.scheme.iterations:
            raise ValueError(f"the scheme has {self.scheme.iterations} steps, all drawn")
        generator = self._generator(self._step)
        members = self._pool.draw(self._step, generator)
        if self.truncate and len(members) > self.max_batch_size:
            members = members[_choose(generator, len(members), self.max_batch_size)]
        self._step += 1
        self._digest = hashlib.blake2b(
            self._digest.encode() + np.sort(members).astype(np.int64).tobytes(), digest_size=16
        ).hexdigest()
        if len(members) > self.max_batch_size:
            raise BatchOverflowError(
                f"a batch holds more than max_batch_size {self.max_batch_size} examples: "
                "raise max_batch_size and start anew with fresh keys"
            )
        indices = np.zeros(self.max_batch_size, np.int64)
        indices[: len(members)] = members
        return Batch(indices, np.arange(self.max_batch_size) < len(members))

    @property
    def state(self) -> SamplerState:
        return SamplerState(self._key, self._step, self._digest)

    @classmethod
    def resume(
        cls,
        scheme: Scheme,
        dataset_size: int,
        max_batch_size: int,
        state: SamplerState,
        *,
        truncate: bool = False,
        graph: Attribution | None = None,
    ) -> "Sampler":
        """The sampler as it was when `state` was taken, by drawing the earlier batches again.

        Raises:
          ValueError: when they come out differently (another NumPy version draws otherwise).
        """
        sampler = cls(scheme, dataset_size, max_batch_size, state.key, truncate=truncate, graph=graph)
        while sampler._step < state.step:
            sampler.next()
        if sampler._digest != state.digest:
            raise ValueError(
                f"state of the sampler does not replay with numpy {np.__version__}: its earlier batches come "
                "out differently; resume with the version that the run began with"
            )
        return sampler

    def _generator(self, step: int) -> np.random.Generator:
        low, high = self._key[0] | self._key[1] << 32, self._key[2] | self._key[3] << 32
        # Philox counts up from the lowest word, so the highest keeps the steps apart for ever.
        counter = np.array([0, 0, 0, step], np.uint64)
        return np.random.Generator(np.random.Philox(key=np.array([low, high], np.uint64), counter=counter))


def _choose(generator: np.random.Generator, population: int, number: int) -> np.ndarray:
    """`number` distinct integers below `population`, uniformly, in O(number)."""
    return generator.choice(population, number, replace=False, shuffle=False)


class _EveryStep:
    """Poisson: any example at any step."""

    def __init__(self, scheme: Poisson, size: int, generator: np.random.Generator):
        self.size, self.probability = size, scheme.sampling_probability

    def draw(self, step: int, generator: np.random.Generator) -> np.ndarray:
        return _choose(generator, self.size, generator.binomial(self.size, self.probability))


class _ByPhase:
    """Cyclic Poisson and balls-in-bins: each example has a phase of its own, independent of all others."""

    def __init__(self, scheme: CyclicPoisson | BallsInBins, size: int, generator: np.random.Generator):
        self.cycle, self.probability = scheme.min_separation, scheme.sampling_probability
        phases = generator.integers(self.cycle, size=size, dtype=np.int32)
        self.members = np.argsort(phases, kind="stable").astype(np.int32)
        self.ends = np.concatenate([[0], np.cumsum(np.bincount(phases, minlength=self.cycle))])

    def draw(self, step: int, generator: np.random.Generator) -> np.ndarray:
        phase = step % self.cycle
        members = self.members[self.ends[phase] : self.ends[phase + 1]]
        return members[_choose(generator, len(members), generator.binomial(len(members), self.probability))]


class _Eligible:
    """b-min-sep, also of users' examples: a pool of those who took part in none of the last b - 1 batches.

    The first `count` entries of `pool` are the eligible; `barred` holds who returns at the next step first.
    """

    def __init__(self, scheme: BMinSep | IndependentAttribution, size: int, generator: np.random.Generator):
        scheme = scheme.one if isinstance(scheme, IndependentAttribution) else scheme
        b, self.probability = scheme.min_separation, scheme.sampling_probability
        self.pool = np.arange(size, dtype=np.int32 if size < 2**31 else np.int64)
        self.count = size
        self.barred: deque[np.ndarray] = deque(np.zeros(0, self.pool.dtype) for _ in range(b - 1))
        if scheme.warm_start and b > 1:
            held = generator.binomial(size, 1 - scheme.eligible_probability)
            chosen = generator.permuted(self._take(_choose(generator, size, held)))
            # Barred for 1..b-1 more steps, all equally likely: who returns after s steps is entry s - 1.
            parts = generator.multinomial(held, np.full(b - 1, 1 / (b - 1)))
            self.barred = deque(np.split(chosen, np.cumsum(parts)[:-1]))

    def draw(self, step: int, generator: np.random.Generator) -> np.ndarray:
        drawn = self._take(_choose(generator, self.count, generator.binomial(self.count, self.probability)))
        self.barred.append(drawn)
        # Whoever took part b - 1 steps ago, or was drawn just now where b = 1, may take part in the next.
        back = self.barred.popleft()
        self.pool[self.count : self.count + len(back)] = back
        self.count += len(back)
        return drawn

    def _take(self, positions: np.ndarray) -> np.ndarray:
        """Remove the entries at `positions` from the pool and return them, in O(their number)."""
        taken = self.pool[positions]
        left = self.count - len(positions)
        tail = np.ones(len(positions), bool)
        tail[positions[positions >= left] - left] = False
        # Those of the last entries that stay fill the holes before them.
        self.pool[positions[positions < left]] = self.pool[left : self.count][tail]
        self.count = left
        return taken


_POOLS = {
    Poisson: _EveryStep,
    CyclicPoisson: _ByPhase,
    BallsInBins: _ByPhase,
    BMinSep: _Eligible,
    IndependentAttribution: _Eligible,
}
