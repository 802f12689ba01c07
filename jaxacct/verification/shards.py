"""Verification on many machines: parts that any scheduler can run, and their merging.

All parts share a run key, and part i of k draws the i-th stretch of the blocks of the run's streams. So the
merged histograms are those of one machine that draws all of them, for any number of parts.
"""

import dataclasses
import itertools
import json
import secrets
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxacct.common import records
from jaxacct.common import validate as _validate
from jaxacct.common.files import Checkpoint, create_secret, read_json, to_json, write_atomically
from jaxacct.common.progress import Progress
from jaxacct.common.version import VERSION
from jaxacct.core.check import Verdict, check, check_margin
from jaxacct.core.evidence import Sampled, Side
from jaxacct.core.plan import Plan
from jaxacct.core.verify import Run, Stop, choose_run, draw, mean_evidence, pilot_bets, unrun_sides
from jaxacct.kernels import randomness
from jaxacct.proposals import base
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.bounds import Budget
from jaxacct.statistics.hockey_stick import Direction, checked_counts, draw_histograms, sparse_counts

SCHEMA = "jaxacct-part"
_STRETCHES = 64  # histograms per direction of a part, each of which can be drawn again


_MAX_PARTS = 2**20


@dataclass(frozen=True)
class Stretch:
    """Sparse histograms (index, count) of consecutive blocks of one stream."""

    terms: tuple[tuple[int, int], ...]
    losses: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Drawn:
    """One direction of a part: the proposal and margin that it was drawn with, and its stretches."""

    proposal: str
    margin: float
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class Part:
    """Samples of one shard.

    Attributes:
      target: digest of the verified claim.
      version: of jaxacct.
      device: kind of device that drew.
      key: the run key's two words, the same in all parts.
      index: of the shard, from 0.
      count: number of shards.
      blocks: per direction, in all parts together.
      counts: by direction; no entry where nothing is drawn in parts (a divergence of exactly zero, a scale
        below delta_v, the extrapolation, which merging draws).
    """

    target: str
    version: str
    device: str
    key: tuple[int, int]
    index: int
    count: int
    blocks: int
    counts: dict[str, Drawn]

    def __post_init__(self):
        if not (0 <= self.index < self.count and self.blocks > 0):
            raise ValueError(f"part must be of 0 <= index < count, got {self.index}/{self.count}")
        if self.count > _MAX_PARTS or self.blocks > 2**50:
            raise ValueError(f"part must be one of {_MAX_PARTS} at most, with at most 2^50 blocks in all")
        if not all(0 <= word < 2**32 for word in self.key):
            raise ValueError("part key must be two words of 32 bits")

    @property
    def edges(self) -> list[int]:
        """Ends of the stretches of blocks, from the first block on; a function of index, count and blocks."""
        first, last = (self.blocks * (self.index + step) // self.count for step in (0, 1))
        step = max(16, -(-(last - first) // _STRETCHES))
        return [*range(first, last, step), last] if first < last else [first]

    def save(self, path) -> None:
        """Write to `path`, atomically."""
        write_atomically(path, to_json({"schema": SCHEMA} | dataclasses.asdict(self)) + "\n")

    @classmethod
    def load(cls, path) -> "Part":
        """Read a part and check the type of every leaf; a one-line ValueError otherwise."""
        fields = read_json(path, "part")
        if fields.pop("schema", None) != SCHEMA:
            raise ValueError(f"part {path} must have the schema {SCHEMA!r}")
        return records.read(cls, fields, f"part {path}")


def write_run_key(path) -> None:
    """Write a fresh run key from the operating system, as JSON; never over an existing file."""
    words = randomness.key_words(randomness.fresh_key())
    create_secret(path, to_json({"run_key": words}) + "\n")


def read_run_key(path):
    """Return the JAX key in a file of `write_run_key`; ValueError otherwise."""
    words = read_json(path, "run key").get("run_key")
    if isinstance(words, list) and len(words) == 2:
        if all(type(word) is int and 0 <= word < 2**32 for word in words):
            return randomness.key_from_words(words)
    raise ValueError(f"run key {path} must hold two words of 32 bits")


def parse_shard(text: str) -> tuple[int, int]:
    """Return (i, k) from "i/k", 0 <= i < k."""
    index, _, count = text.partition("/")
    digits = text.isascii() and len(text) < 20 and index.isdigit() and count.isdigit()
    if not (digits and int(index) < int(count) <= _MAX_PARTS):
        raise ValueError(f"shard must be i/k with 0 <= i < k <= {_MAX_PARTS}, such as 0/16, got {text!r:.80}")
    return int(index), int(count)


def draw_part(
    plan: Plan,
    run_key,
    index: int,
    count: int,
    samples: int,
    *,
    checkpoint: Checkpoint | None = None,
    progress: Progress | None = None,
) -> Part:
    """Draw part `index` of `count` of `samples` samples per direction (rounded up to whole blocks).

    Args:
      plan: its target is verified, with the budget of its evidence if it has any.
      run_key: the same for all parts.
      index: of the part, from 0.
      count: number of parts.
      samples: per direction in all parts together; the same for all parts.
      checkpoint: stores finished stretches; the same call then resumes.
      progress: called with (what, samples done, samples expected).

    Raises:
      ValueError: bad arguments, or a plan composed with another mechanism.
    """
    if not 0 <= index < count:
        raise ValueError(f"shard must have 0 <= i < k, got {index}/{count}")
    blocks = -(-_validate.positive_integer("samples", samples) // randomness.BLOCK_SIZE)
    words = randomness.key_words(run_key)
    empty = Part(target_of(plan), VERSION, _device(), (words[0], words[1]), index, count, blocks, counts={})
    counts: dict[str, Drawn] = {}
    for direction, run in _runs(plan, blocks, run_key):
        if run.line is not None or not run.of.needs_samples:
            continue
        margin, stream = run.of.margin, base.direction_key(run_key, direction)
        name = f"part-{index}-of-{count}-{direction}"
        job = {"target": empty.target, "key": words, "blocks": blocks, "version": empty.version}
        job |= run.of.proposal.draw_metadata | {"margin": margin}
        state = checkpoint.load(name) if checkpoint else None
        if state is None or records.differences(state.get("job"), job):
            state = {"job": job, "stretches": []}
        stretches = records.read(tuple[Stretch, ...], state["stretches"], "checkpoint stretches")
        first, last = empty.edges[0], empty.edges[-1]

        def count_stretch(begin, end, run=run, stream=stream, margin=margin):
            return Stretch(*map(sparse_counts, run.of.count(stream, begin, end, margin)))

        def keep(done, held, name=name, job=job, direction=direction, first=first, last=last):
            if checkpoint:
                checkpoint.save(name, {"job": job, "stretches": list(map(dataclasses.asdict, held))})
            if progress:
                drawn, needed = ((x - first) * randomness.BLOCK_SIZE for x in (done, last))
                progress(f"shard {index}/{count} {direction}", drawn, needed)

        drawn = draw_histograms(
            count_stretch,
            lambda done, held, last=last: held if done >= last else None,
            lambda done: next(edge for edge in empty.edges if edge > done),
            add=lambda held, stretch: (*held, stretch),
            done=empty.edges[len(stretches)],
            counts=stretches,
            keep=keep,
        )
        counts[direction] = Drawn(run.of.proposal.name, margin, drawn)
    return dataclasses.replace(empty, counts=counts)


def merge(
    plan: Plan, parts: list[Part], *, redraw: int = 0, progress: Progress | None = None
) -> tuple[Plan | None, Verdict]:
    """Return the plan with the evidence of all parts of one run, None unless certified; and the verdict.

    The verdict is that of the anytime rule at the total number of samples, with bets from the run's own
    pilot. The verified claim is the plan's target, not that of the parts; a returned plan loads as certified.

    Args:
      plan: of the parts. Its data set, batch sizes and cuts are kept.
      parts: all parts of one run.
      redraw: stretches of blocks to draw again, of randomly chosen parts, and to compare with the stored
        ones: a part that forged one stretch of k is detected with probability `redraw / k`.
      progress: called with (what, samples done, samples expected) while redrawing.

    Raises:
      ValueError: no parts, a duplicate, a gap, parts of another run, plan or version, histograms that are
        malformed or not those of the key; the message names the reason.
    """
    if not parts:
        raise ValueError("parts must not be empty")
    _validate.positive_integer("redraw", redraw, minimum=0)
    reference = parts[0]
    for part in parts[1:]:
        for name in ("version", "target", "key", "count", "blocks"):
            if getattr(part, name) != getattr(reference, name):
                shown = "" if name in ("target", "key") else f": {getattr(part, name)!r}"
                raise ValueError(f"part {part.index} is of another {name} than part {reference.index}{shown}")
    if reference.version != VERSION:
        raise ValueError(f"parts are of jaxacct {reference.version}, this is {VERSION}")
    if reference.target != target_of(plan):
        raise ValueError("parts are of another mechanism, epsilon, delta, budget or data set than the plan")
    seen = [part.index for part in parts]
    duplicates = sorted({index for index in seen if seen.count(index) > 1})
    if duplicates:
        raise ValueError(f"parts must be different, {', '.join(map(str, duplicates))} came more than once")
    gaps = sorted(set(range(reference.count)) - set(seen))
    if gaps:
        raise ValueError(f"parts must be all of {reference.count}, {', '.join(map(str, gaps))} are missing")
    run_key = randomness.key_from_words(list(reference.key))
    sides = unrun_sides(plan.mechanism)
    for direction, run in _runs(plan, reference.blocks, run_key):
        sides[direction] = _side_of_parts(
            run, direction, plan.target.budget, parts, run_key, redraw, progress
        )
        evidence = Sampled(plan.claim.digest, "anytime", 1.0, sides[Direction.REMOVE], sides[Direction.ADD])
        verdict = check(plan.claim, evidence)
        if verdict.remove is None or not verdict.remove.certified:
            break
    if not verdict.certified:  # pyrefly: ignore[unbound-name]
        return None, verdict
    proven = Plan(plan.claim, verdict.evidence, plan.choice)
    return Plan.from_json(json.loads(to_json(proven.to_json()))), verdict


def verify_distributed(plan: Plan, samples: int, run_key=None) -> tuple[Plan | None, Verdict]:
    """Verify on all processes of `jax.distributed`, each drawing one part; every process gets the result.

    Call it on every process after `jax.distributed.initialize`, with the same arguments.

    Args:
      plan: as in `draw_part`.
      samples: as in `draw_part`.
      run_key: from the operating system of process 0 by default. Only tests should fix it.
    """
    fresh = randomness.fresh_key() if run_key is None else run_key
    words = multihost_utils.broadcast_one_to_all(np.array(randomness.key_words(fresh), np.uint32))
    key = randomness.key_from_words(words.tolist())
    part = draw_part(plan, key, jax.process_index(), jax.process_count(), samples)
    text = np.frombuffer(to_json(dataclasses.asdict(part)).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array([text.size], np.int32)).reshape(-1)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: text.size] = text
    gathered = multihost_utils.process_allgather(padded).reshape(len(lengths), -1)
    found = [
        json.loads(bytes(row[:length])) for row, length in zip(np.asarray(gathered), lengths, strict=True)
    ]
    return merge(plan, [records.read(Part, fields, "part") for fields in found])


def _side_of_parts(
    run: Run, direction: Direction, budget: Budget, parts: list[Part], run_key, redraw: int, progress
) -> Side:
    if run.line is not None or not run.of.needs_samples:
        samples = parts[0].blocks * randomness.BLOCK_SIZE
        return draw(run, budget, Stop(max_samples=samples), "parts", run_key)
    of, margins = run.of, set()
    terms = np.zeros(len(bounds.TERM_EDGES), np.int64)
    losses = np.zeros(len(hockey_stick.loss_bounds(direction)), np.int64)
    for part in parts:
        drawn = part.counts.get(direction)
        distribution = None if drawn is None else drawn.proposal
        if drawn is None or distribution != of.proposal.name:
            raise ValueError(
                f"part {part.index} drew from {distribution!r} in the {direction} direction, not from "
                f"{of.proposal.name!r}"
            )
        margins.add(drawn.margin)
        check_margin(drawn.margin, of.margin)
        if len(margins) > 1:
            raise ValueError(f"part {part.index} has another margin for rounding than the others: {margins}")
        pairs = list(itertools.pairwise(part.edges))
        if len(drawn.stretches) != len(pairs):
            raise ValueError(f"part {part.index} holds {len(drawn.stretches)} stretches, not {len(pairs)}")
        for (begin, end), stretch in zip(pairs, drawn.stretches, strict=True):
            name, expected = f"part {part.index} {direction}", (end - begin) * randomness.BLOCK_SIZE
            more = checked_counts(stretch.terms, terms.size, f"{name} terms")
            more_losses = checked_counts(stretch.losses, losses.size, f"{name} losses")
            for held in (int(more.sum()), int(more_losses.sum())):
                if held != expected:
                    raise ValueError(f"{name} holds {held} draws in a stretch, not its share {expected}")
            terms, losses = terms + more, losses + more_losses
    _redraw(run, direction, parts, run_key, redraw, progress)
    stream = base.direction_key(run_key, direction)
    return mean_evidence(of, stream, margins.pop(), terms, losses, *pilot_bets(of, run_key))


def _redraw(run, direction: Direction, parts: list[Part], run_key, number: int, progress) -> None:
    """Draw random stretches again; ValueError for one that differs from the stored one."""
    stream = base.direction_key(run_key, direction)
    places = [(part, k) for part in parts for k in range(len(part.edges) - 1)]
    chosen = secrets.SystemRandom().sample(places, min(number, len(places)))
    for done, (part, k) in enumerate(chosen, 1):
        drawn = part.counts[direction]
        terms, losses = run.of.count(stream, part.edges[k], part.edges[k + 1], drawn.margin)
        if Stretch(sparse_counts(terms), sparse_counts(losses)) != drawn.stretches[k]:
            other = (
                "" if part.device == _device() else f"; it was drawn on {part.device}, this is {_device()}"
            )
            raise ValueError(
                f"part {part.index} does not hold what its key draws in the {direction} direction{other} "
                "(histograms are the same bit for bit on machines of one kind only)"
            )
        if progress:
            progress(f"redraw {direction}", done, len(chosen))


def target_of(plan: Plan) -> str:
    """Return the digest of the claim that parts of a plan verify."""
    if plan.compose_with is not None:
        raise ValueError("plan must not be composed with another mechanism to be verified in parts")
    return plan.claim.digest


def _runs(plan: Plan, blocks: int, run_key):
    """Return (direction, run) for both directions, by the anytime rule."""
    stop = Stop(max_samples=blocks * randomness.BLOCK_SIZE)
    for direction in plan.mechanism.directions:
        yield direction, choose_run(plan.claim, direction, run_key, stop)


def _device() -> str:
    return jax.devices()[0].device_kind
