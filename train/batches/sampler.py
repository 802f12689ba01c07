"""Real batches, drawn from the scheme object that was accounted for.

A step costs O(batch). Its draws are a function of a secret key and the step alone, so a sampler is resumed by
replaying it: a checkpoint holds a key and a step number. Which examples were in a batch is private.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.core.plan import Plan
from jaxacct.schemes import Scheme
from jaxacct.schemes.protocol.batch_sizes import check_dataset_size
from jaxacct.schemes.protocol.batches import choose

from .graph import Attribution, check_graph

_SETUP = 2**64 - 1  # the "step" of draws made before the first one


class BatchOverflowError(Exception):
    """More examples were drawn than a batch holds; leaving some out would not be what was accounted for."""


@dataclass(frozen=True)
class SamplerState:
    """Where a sampler stands; secret. The digest of all batches so far shows a NumPy that draws otherwise."""

    key: tuple[int, ...] = field(repr=False)
    step: int
    digest: str = field(repr=False)


def batch_sizes(plan: Plan) -> tuple[int, float, int]:
    """Return (dataset_size, expected_batch_size, max_batch_size) of a plan; ValueError when it has none."""
    size, expected, max_size = plan.dataset_size, plan.expected_batch_size, plan.max_batch_size
    if size is None or expected is None or max_size is None:
        raise ValueError("plan must state the dataset_size to draw batches; calibrate with dataset_size=...")
    return size, expected, max_size


def fresh_key() -> tuple[int, ...]:
    """Return 128 bits from the operating system's generator."""
    return tuple(int(word) for word in np.frombuffer(os.urandom(16), np.uint32))


class Drawn:
    """Batches of one run, in order, each by `_draw(step)`; those before `drawn` are drawn again."""

    def __init__(self, key, drawn: SamplerState | None, digest: str = ""):
        self.state = SamplerState(key, 0, digest)
        while drawn is not None and self.state.step < drawn.step:
            self.next()
        if drawn is not None and drawn != self.state:
            raise ValueError(
                f"state of the sampler does not replay with numpy {np.__version__}: its earlier batches were "
                "others; resume with the plan and the version that the run began with"
            )

    def _draw(self, step: int) -> np.ndarray:
        raise NotImplementedError

    def next(self) -> np.ndarray:
        """Return the examples of the next batch, (number,) int64."""
        members = self._draw(self.state.step).reshape(-1).astype(np.int64)
        digest = hashlib.blake2b(self.state.digest.encode() + members.tobytes(), digest_size=16).hexdigest()
        self.state = SamplerState(self.state.key, self.state.step + 1, digest)
        return members


class Sampler(Drawn):
    """Batches of one run of a scheme over `dataset_size` examples, in order.

    Every example is sampled by the distribution of the scheme's participation vectors, independently of
    others.

    Args:
      scheme: the scheme of the plan.
      dataset_size: number of examples.
      max_batch_size: the most examples of a batch.
      key: 4 words of 32 bits; from the operating system by default. Only tests should fix it.
      truncate: truncate larger batches to a uniformly random subset rather than stop; lockouts still apply.
      graph: of users and examples, for the attribution schemes; a batch then holds numbers of its examples.
      shared_examples: `Plan.holds_for_shared_examples`; by default what the scheme alone guarantees.
      state: continue from here, by drawing the earlier batches again; its key counts. ValueError where they
        come out differently (another NumPy version).
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
        state: SamplerState | None = None,
    ):
        key = key if state is None else state.key
        self.scheme = scheme
        self.dataset_size = _validate.positive_integer("dataset_size", dataset_size)
        self.max_batch_size = _validate.positive_integer("max_batch_size", max_batch_size)
        self._key = fresh_key() if key is None else tuple(int(word) for word in key)
        self.truncate = truncate or scheme.batch_size_cap is not None
        check_dataset_size(scheme, self.dataset_size)
        if scheme.batch_size_cap not in (None, self.max_batch_size):
            raise ValueError(
                f"max_batch_size must be the scheme's {scheme.batch_size_cap}, got {self.max_batch_size}"
            )
        if shared_examples is None:
            shared_examples = scheme.holds_for_shared_examples
        check_graph(scheme, graph, self.dataset_size, shared_examples)
        self._pool = scheme.batches(self.dataset_size, make_generator(self._key, _SETUP), graph)
        super().__init__(self._key, state)

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        key=None,
        graph: Attribution | None = None,
        state: SamplerState | None = None,
        dataset_size: int | None = None,
    ) -> "Sampler":
        """Return the sampler of a plan, fresh from `key` or from `state`; ValueError as the constructor.

        `dataset_size` is the plan's, or smaller for add-or-remove-one adjacency.
        """
        stated, _, largest = batch_sizes(plan)
        dataset_size = stated if dataset_size is None else dataset_size
        if dataset_size > stated or (dataset_size < stated and not plan.mechanism.is_add_or_remove):
            raise ValueError(f"dataset_size must be the plan's {stated}, got {dataset_size}")
        return cls(
            plan.mechanism.scheme,
            dataset_size,
            largest,
            key,
            truncate=plan.truncation_delta is not None,
            graph=graph,
            shared_examples=plan.holds_for_shared_examples,
            state=state,
        )

    def _draw(self, step: int) -> np.ndarray:
        if step >= self.scheme.iterations:
            raise ValueError(f"the scheme has {self.scheme.iterations} steps, all drawn")
        generator = make_generator(self._key, step)
        members = self._pool.draw(step, generator)
        if self.truncate and len(members) > self.max_batch_size:
            members = members[choose(generator, len(members), self.max_batch_size)]
        if len(members) > self.max_batch_size:
            raise BatchOverflowError(
                f"a batch holds more than max_batch_size {self.max_batch_size} examples: "
                "raise max_batch_size and start anew with fresh keys"
            )
        return members


def is_key(words) -> bool:
    """Return whether these are the key of a sampler, four words of 32 bits."""
    is_list = isinstance(words, list | tuple) and len(words) == 4
    return is_list and all(type(word) is int and 0 <= word < 2**32 for word in words)


def make_generator(key, step: int = 0) -> np.random.Generator:
    """Return a counter-based generator of a step, from 4 secret words of 32 bits."""
    words = [int(word) for word in key]
    if not is_key(words):
        raise ValueError(f"key must be 4 words of 32 bits, got {len(words)}")
    whole = words[0] | words[1] << 32 | words[2] << 64 | words[3] << 96
    # Philox counts up from the lowest word, so steps in the highest never overlap.
    return np.random.Generator(np.random.Philox(key=whole, counter=step << 192))


class Replayed(Drawn):
    """Batches that one generator draws one after the other: `draws(generator)` yields positions."""

    def __init__(
        self, draws: Callable[[np.random.Generator], Iterator[np.ndarray]], key, drawn: SamplerState | None
    ):
        key = tuple(int(word) for word in key)
        self._left = draws(make_generator(key))
        super().__init__(key, drawn)

    def _draw(self, step: int) -> np.ndarray:
        return next(self._left)
