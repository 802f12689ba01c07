"""Proposals: distributions whose samples resolve a small hockey-stick divergence.

With `t = epsilon - L` in the remove direction (P against Q) and `t = epsilon + L` in the add direction
(Q against P), both divergences are `E_target[(1 - e^t)_+]`, the target being P or Q. A proposal draws from
another distribution R, with a density ratio `w = dTarget / dR` such that

    w (1 - e^t)_+ <= M     for every output,

so the divergence is `M` times the mean of a term in [0, 1] (proofs/derivations.md section 9). Every
concentration bound for means of such terms then applies with its threshold divided by M. Plain sampling is R
= target, M = 1.

The verifier reads only the fields of `Proposal`.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import randomness
from jaxacct.kernels.programs import check_arithmetic, compiled
from jaxacct.likelihood.loss import loss_of_mirrored, loss_of_scores
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics.composed import Composed
from jaxacct.statistics.hockey_stick import DIRECTIONS, Direction
from jaxacct.statistics.lines import BudgetLine
from jaxacct.strategies.stationary import adds_windows, has_windows

# Maximum numbers of one array that a CPU core keeps in cache; measured at n = 1024 and n = 7200.
CACHE_NUMBERS = 8 * 128 * 1024
# Four blocks of long rows are faster than eight, which short rows need to hide their loops. A single block is
# another program, which may round differently, and replayed evidence must reproduce the same bits.
_LONG_ROW, _MAX_LONG_ROWS = 512, 4


@dataclass(frozen=True)
class ProposalSpec:
    """A proposal distribution by its family (`jaxacct.proposals.registry`) and the integers that it takes."""

    family: str
    parameters: tuple[int, ...]

    def __str__(self) -> str:
        return self.family + (":" + ",".join(map(str, self.parameters)) if self.parameters else "")

    @classmethod
    def parse(cls, text: str) -> "ProposalSpec":
        """Return the specification that `str` writes as `text`; ValueError for another form."""
        if not isinstance(text, str) or not re.fullmatch(r"[a-z-]{1,40}(:[0-9]{1,4}(,[0-9]{1,4})*)?", text):
            raise ValueError(f"proposal must be a family such as plain, or replicas:2, got {text!r:.80}")
        family, _, parameters = text.partition(":")
        return cls(family, tuple(map(int, parameters.split(","))) if parameters else ())


@dataclass(frozen=True)
class Setting:
    """Setting that a proposal distribution is built for."""

    mechanism: Mechanism
    epsilon: float
    direction: Direction
    composed: Composed | None


SamplesNeeded = Callable[[Any], float] | None  # predicted samples of a proposal; None to consider all


class Draws(NamedTuple):
    """Samples of a proposal: natural logs, shape (num_samples,) each.

    Attributes:
      loss: L = ln P/Q at the drawn output.
      log_weight: ln of the density of the target distribution (P or Q) over that of the proposal.
    """

    loss: Any
    log_weight: Any


@dataclass(frozen=True, eq=False)
class Proposal:
    """Distribution that is sampled in place of the target, and the bound on its weighted terms.

    All fields that the guarantee depends on are required.

    Attributes:
      spec: family and parameters, from which `registry.build` rebuilds it.
      direction: "remove" or "add".
      mechanism: the accounted mechanism.
      log_scale: ln M for the epsilon (and direction) it was built for; 0 for plain sampling.
      draw_block: `(key, scheme, strategy, sigma, tables, dtype) -> Draws` of `BLOCK_SIZE` samples; a module
        level function, jittable, `scheme`, `strategy` and `dtype` static.
      relative_error: bound on the relative error of the drawn density (rounded tables, the 2^-32 grid of
        uniforms); thresholds are divided by 1 + this.
      total_variation: further distance between the drawn distribution and the intended one; subtracted from
        thresholds.
      replicas: participation vectors added up in the drawn outputs; the weight is proportional to
        e^{(1 - replicas) L}, or has `rounding_lines`.
      left_out: upper bound on the divergence that `profile` leaves out; subtracted from delta_v.
      lowest: lower limit of the support of the terms is a loss of minus this, in nats.
      profile: function g of the terms `w g(t)` for a part of a composed profile; None for that of the claim.
      tables: function that returns the pytree of arrays of `draw_block`, so that another noise multiplier
        does not recompile; called when drawing, as large tables are made for the chosen proposal only.
      scale_at: function that returns ln M at another epsilon, where it is known there, too.
      rounding_lines: function delta_v -> all float32 reserves, including weights that are no function of L
        alone.
      log_normalizer: ln Z of a replica distribution.
      of_a_bound: whether samples bound the divergence from above; a lower bound on that bound proves nothing.
      rounded_down: the same with weights rounded down, for lower bounds; None where rounding is in
        `rounding_lines`.
      log_weight_at: function that returns ln w of losses, monotone; None where weights depend on more than
        the loss.
      cost: time of a draw over that of a plain one, approximately.
      words: number of the method that makes draws from random words; a resumed run must have the same one.
    """

    spec: ProposalSpec
    direction: Direction
    mechanism: Mechanism
    log_scale: float
    draw_block: Callable[..., Draws]
    relative_error: float
    total_variation: float
    replicas: int
    left_out: float
    lowest: float
    profile: Callable[[np.ndarray], np.ndarray] | None
    tables: Callable[[], Any] = tuple
    scale_at: Callable[[float], float] | None = None
    rounding_lines: Callable[[float], tuple[BudgetLine, ...]] | None = None
    log_normalizer: float = 0.0
    of_a_bound: bool = False
    rounded_down: "Proposal | None" = None
    log_weight_at: Callable[[np.ndarray], np.ndarray] | None = None
    cost: float = 1.0
    words: int = 1

    @property
    def name(self) -> str:
        """Specification as text, such as "replicas:2"."""
        return str(self.spec)

    @property
    def draw_metadata(self) -> dict[str, Any]:
        """Metadata stored with samples: terms are in units of the scale of their proposal."""
        distribution = {"proposal": self.name, "log_scale": self.log_scale}
        return distribution if self.words == 1 else distribution | {"words": self.words}

    def weight_error(self, loss_error: float) -> float:
        """Return the largest decrease of ln w for an error of L; 0 where `rounding_lines` include it."""
        return 0.0 if self.rounding_lines is not None else (self.replicas - 1) * loss_error

    def draw(self, key, first_block: int, num_blocks: int, dtype=jnp.float32) -> Draws:
        """Draw `num_blocks` consecutive blocks of the stream `key`: float64 arrays on the host."""
        keys = randomness.block_keys(key, np.uint32(first_block), num_blocks)
        mechanism = self.mechanism
        draws = draw_blocks(
            self.draw_block,
            mechanism.scheme,
            mechanism.strategy,
            jnp.dtype(dtype),
            mechanism.noise_multiplier,
            self.tables(),
            keys,
        )
        return Draws(*(np.asarray(part, np.float64).reshape(-1) for part in draws))


@compiled(static=4)
def draw_blocks(draw_block, scheme, strategy, dtype, sigma, tables, keys):
    """Return the draws of the blocks `keys` over all devices."""

    def one_block(key, sigma, tables):
        return draw_block(key, scheme, strategy, sigma, tables, dtype)

    def one_device(keys, sigma, tables):
        # Parallel blocks exceed a CPU's cache, sequential ones leave an accelerator idle.
        if jax.default_backend() == "cpu":
            at_once = blocks_side_by_side(scheme.iterations * scheme.arrays_kept)
            # A single block is not mapped at all: XLA would copy arrays for an axis of one.
            size = at_once if at_once > 1 else None
            return jax.lax.map(lambda key: one_block(key, sigma, tables), keys, batch_size=size)
        return jax.vmap(one_block, (0, None, None))(keys, sigma, tables)

    devices = jax.local_devices()
    if len(devices) == 1 or len(keys) % len(devices):
        return one_device(keys, sigma, tables)
    # Blocks over all local devices; the draws of a block depend on its key alone.
    mesh = jax.sharding.Mesh(np.array(devices), ("blocks",))
    spread, everywhere = jax.sharding.PartitionSpec("blocks"), jax.sharding.PartitionSpec()
    return jax.shard_map(
        one_device,
        mesh=mesh,
        in_specs=(spread, everywhere, everywhere),
        out_specs=spread,
        check_vma=False,
    )(keys, sigma, tables)


def blocks_side_by_side(iterations: int) -> int:
    """Return how many blocks of so many steps a CPU core draws at once."""
    most = max(1, CACHE_NUMBERS // (randomness.BLOCK_SIZE * iterations))
    return min(most, _MAX_LONG_ROWS) if iterations >= _LONG_ROW else most


def direction_key(key, direction: str):
    """Return the key of one direction's stream of a run."""
    return randomness.stream_key(key, randomness.Stream.REMOVE.at(Direction(direction).place))


def draw_in_batches(
    proposal: Proposal, stream, first_block: int, num_blocks: int, dtype=jnp.float32
) -> Iterator[Draws]:
    """Yield the draws of consecutive blocks, in order, with every core of a CPU busy.

    Memory is set by the blocks drawn at once, never by `num_blocks`. ValueError for a compiler whose
    arithmetic has no rounding margin.
    """
    check_arithmetic()
    at_once = blocks_at_once(proposal.mechanism, dtype)
    starts = range(first_block, first_block + num_blocks, at_once)

    def draw(start):
        num_now = min(at_once, first_block + num_blocks - start)
        # Always the same shape, so that a short last batch does not recompile.
        draws = proposal.draw(stream, start, at_once, dtype)
        keep = num_now * randomness.BLOCK_SIZE
        return Draws(*(part[:keep] for part in draws))

    threads = workers()
    if threads == 1 or len(starts) == 1:
        yield from map(draw, starts)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting = []
        for start in starts:
            waiting.append(pool.submit(draw, start))
            if len(waiting) > threads:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def workers() -> int:
    """Return the number of threads that dispatch work: XLA leaves cores idle inside one CPU computation."""
    return min(8, os.cpu_count() or 1) if jax.default_backend() == "cpu" else 2


def blocks_at_once(mechanism: Mechanism, dtype=jnp.float32, arrays: int = 12) -> int:
    """Return how many blocks go to the devices in one call, a multiple of their number.

    A CPU processes them sequentially, so few suffice to hide the call; an accelerator draws
    them side by side, in about `arrays` arrays of the length of the circulant, in a quarter of its memory.
    """
    devices = len(jax.local_devices())
    if jax.default_backend() == "cpu":
        # For very short samples the calls take longer than the draws.
        return (16 if mechanism.scheme.iterations <= 64 else 8) * devices
    length = mechanism.strategy.numbers_per_sample(mechanism.scheme.iterations)
    per_block = arrays * randomness.BLOCK_SIZE * length * jnp.dtype(dtype).itemsize
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 4e9)
    # At most as many as have their rings in a GPU's L2 cache at b = 256 (`gpu_recurrence`).
    return int(min(256, max(1, memory / 4 // per_block))) * devices


def draw_block_at(
    key,
    scheme,
    strategy,
    sigma,
    dtype,
    draw_counts=None,
    direction: str = Direction.REMOVE,
    batch_sizes=None,
    draw_positions=None,
    loss_of: Callable = loss_of_scores,
) -> Any:
    """Return losses of one block whose outputs are `N(C k, sigma^2 I)`, `k = draw_counts(key, size)` or 0.

    The shared body of every proposal that shifts the outputs by a drawn participation count vector; a sparse
    one may be given by its positions, `draw_positions(key, size)`, instead (`Strategy.add_signal_windows`).
    `loss_of` takes the arguments of `loss_of_scores`.
    """
    normals_key, counts_key = jax.random.split(key)
    n, size = scheme.iterations, randomness.BLOCK_SIZE
    normals = strategy.draw_normals(normals_key, n, size, dtype)
    counts = None if draw_counts is None else draw_counts(counts_key, size)
    counts = None if counts is None else counts.astype(dtype)
    drawn = strategy.scores_from_normals(normals, n, sigma, counts)
    positions = None if draw_positions is None else draw_positions(counts_key, size)
    return loss_of(scheme, strategy, drawn, sigma, direction, batch_sizes, positions)


PLAIN = ProposalSpec("plain", ())


def plain(mechanism: Mechanism, direction: str) -> Proposal:
    """Return plain sampling, from the target itself: weight 1, scale 1."""
    if mechanism.is_replace_one and direction == Direction.ADD:
        raise ValueError(f"direction must not be {direction}: the pair of {mechanism.adjacency} is symmetric")
    scheme = mechanism.scheme
    seen = scheme.side_information
    relative_error, variation = scheme.draw_errors
    tables, words = tuple, 1
    if seen is not None:
        relative, more_variation = seen.error()
        relative_error = (1 + relative_error) * (1 + relative) - 1
        variation += more_variation
        tables, words = seen.tables, seen.words
    return Proposal(
        spec=PLAIN,
        direction=Direction(direction),
        mechanism=mechanism,
        log_scale=0.0,
        draw_block=_DRAW_MIRRORED if mechanism.is_replace_one else _DRAW_PLAIN[Direction(direction)],
        relative_error=relative_error,
        total_variation=variation,
        replicas=1,
        left_out=0.0,
        lowest=0.0,
        profile=None,
        tables=tables,
        log_weight_at=np.zeros_like,
        words=words,
    )


def build(setting: Setting) -> Proposal:
    """Return plain sampling for a setting."""
    found = plain(setting.mechanism, setting.direction)
    if setting.composed is None:
        return found
    return dataclasses.replace(
        found, left_out=setting.composed.exchanged(setting.epsilon, setting.mechanism.scheme)
    )


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return plain sampling, which covers every setting."""
    return [build(setting)]


def draw_plain(
    key, scheme, strategy, sigma, tables, dtype, direction: str, loss_of: Callable = loss_of_scores
) -> Draws:
    """Draw the adversary's side information, if any, then outputs given it."""
    seen, side = scheme.side_information, None
    if seen is not None:
        side_key, key = jax.random.split(key)
        side = seen.draw(side_key, randomness.BLOCK_SIZE, tables)
    draw = functools.partial(draw_block_at, key, scheme, strategy, sigma, dtype, loss_of=loss_of)
    if direction == Direction.REMOVE and few_windows(scheme, strategy):
        loss = draw(draw_positions=scheme.draw_positions)
    else:

        def draw_counts(counts_key, size):
            return scheme.draw_counts(counts_key, size, direction, side)

        loss = draw(draw_counts, direction, side)
    return Draws(loss, jnp.zeros_like(loss))


_DRAW_PLAIN = {direction: functools.partial(draw_plain, direction=direction) for direction in Direction}
_DRAW_MIRRORED = functools.partial(draw_plain, direction=Direction.REMOVE, loss_of=loss_of_mirrored)


def few_windows(scheme, strategy) -> bool:
    """Return whether participations are added as windows: an FFT is faster on a CPU unless they are few."""
    windows = scheme.sparse_rate is not None and has_windows(scheme, strategy)
    elsewhere = jax.default_backend() != "cpu" and windows
    return adds_windows(scheme, strategy, 1) or elsewhere


__all__ = ["DIRECTIONS", "Draws", "Proposal", "draw_block_at", "plain"]
