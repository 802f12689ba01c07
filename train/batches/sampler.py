"""Real batches for a sampling scheme: the very dataclass that was accounted for decides who is in a batch.

Every step costs O(batch), never a pass over the data. The draws of a step are a function of a secret key
and the step alone, and the state is a function of the earlier draws, so a sampler is resumed by replaying
it: a key and a step number are all that a checkpoint needs.

Which examples were in a batch is private, and so is the key.
"""

import hashlib
import os
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.core.plan import Plan
from jaxacct.schemes import Scheme
from jaxacct.schemes.batch_sizes import check_dataset_size
from jaxacct.schemes.batches import choose

from .attribution import Attribution, check_graph

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
    size, expected, most = plan.dataset_size, plan.expected_batch_size, plan.max_batch_size
    if size is None or expected is None or most is None:
        raise ValueError("plan must state the dataset_size to draw batches; calibrate with dataset_size=...")
    return size, expected, most


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
      shared_examples: whether the guarantee holds where examples have several owners,
        `Plan.holds_for_shared_examples`; such a graph is refused otherwise. By default what the scheme alone
        guarantees.

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
        shared_examples: bool | None = None,
    ):
        self.scheme = scheme
        self.dataset_size = _validate.positive_integer("dataset_size", dataset_size)
        self.max_batch_size = _validate.positive_integer("max_batch_size", max_batch_size)
        self._key = fresh_key() if key is None else tuple(int(word) for word in key)
        self.truncate = truncate or scheme.batch_size_cap is not None
        check_dataset_size(scheme, self.dataset_size)
        if scheme.batch_size_cap not in (None, self.max_batch_size):
            raise ValueError(
                f"max_batch_size must be the scheme's {scheme.batch_size_cap}, was {self.max_batch_size}"
            )
        self._step = 0
        self._digest = hashlib.blake2b(digest_size=16).hexdigest()
        if shared_examples is None:
            shared_examples = scheme.holds_for_shared_examples
        check_graph(scheme, graph, self.dataset_size, shared_examples)
        self._pool = scheme.batches(self.dataset_size, self._generator(_SETUP), graph)

    @classmethod
    def from_plan(
        cls, plan: Plan, key=None, graph: Attribution | None = None, state: SamplerState | None = None
    ) -> "Sampler":
        """The sampler of a plan, fresh from `key` or as it was when `state` was taken.

        Raises:
          ValueError: a plan that does not say how large the data set is, a graph that its guarantee is not
            for, or as `resume`.
        """
        dataset_size, _, largest = batch_sizes(plan)
        sampler = cls(
            plan.mechanism.scheme,
            dataset_size,
            largest,
            key if state is None else state.key,
            truncate=plan.truncation_delta is not None,
            graph=graph,
            shared_examples=plan.holds_for_shared_examples,
        )
        return sampler if state is None else sampler._replayed(state)

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
            members = members[choose(generator, len(members), self.max_batch_size)]
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
        shared_examples: bool | None = None,
    ) -> "Sampler":
        """The sampler as it was when `state` was taken, by drawing the earlier batches again.

        Raises:
          ValueError: when they come out differently (another NumPy version draws otherwise).
        """
        sampler = cls(
            scheme,
            dataset_size,
            max_batch_size,
            state.key,
            truncate=truncate,
            graph=graph,
            shared_examples=shared_examples,
        )
        return sampler._replayed(state)

    def _replayed(self, state: SamplerState) -> "Sampler":
        """This sampler after the batches that `state` counts; ValueError when they come out differently."""
        while self._step < state.step:
            self.next()
        if self._digest != state.digest:
            raise ValueError(
                f"state of the sampler does not replay with numpy {np.__version__}: its earlier batches come "
                "out differently; resume with the version that the run began with"
            )
        return self

    def _generator(self, step: int) -> np.random.Generator:
        low, high = self._key[0] | self._key[1] << 32, self._key[2] | self._key[3] << 32
        # Philox counts up from the lowest word, so the highest keeps the steps apart for ever.
        counter = np.array([0, 0, 0, step], np.uint64)
        return np.random.Generator(np.random.Philox(key=np.array([low, high], np.uint64), counter=counter))
