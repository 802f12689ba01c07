"""One verification on many machines: parts that any scheduler can run, and their merging.

All parts share a run key, and part i of k draws the i-th stretch of the blocks of the run's streams. So the
merged histograms are those of one machine that drew all of them, whatever the number of parts.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxacct import _validate
from jaxacct.calibration import make_plan
from jaxacct.files import Checkpoint, create_secret, read_json, write_atomically
from jaxacct.kernels import randomness
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.plan import Plan
from jaxacct.proposals import sampling
from jaxacct.proposals.base import DIRECTIONS
from jaxacct.schemes import scheme_from_json
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.bounds import Budget
from jaxacct.strategies import strategy_from_json
from jaxacct.verification.run import (
    Evidence,
    Progress,
    count_terms,
    dense_counts,
    direction_run,
    extrapolate,
    judge,
    line_of,
    margin_of,
    not_run,
    sparse_counts,
    target_digest,
    trivial,
)

SCHEMA = "jaxacct-part"
_STRETCHES = 64  # a part is checkpointed this often a direction


@dataclass(frozen=True)
class Part:
    """What one shard drew.

    Attributes:
      target: what is verified: scheme, strategy, noise multiplier, epsilon, delta, budget, dataset_size.
      version: of jaxacct.
      key: the run key's two words, the same in all parts.
      index, count: shard `index` of `count`, from 0.
      blocks: in all parts together, a direction.
      counts: by direction, {"proposal", "terms", "losses"}: sparse histograms; no entry where nothing is
        drawn in parts (an exact zero, a scale below delta_v, the extrapolation, which merging does).
    """

    target: dict
    version: str
    key: tuple[int, ...]
    index: int
    count: int
    blocks: int
    counts: dict[str, dict]

    def save(self, path) -> None:
        """Write to `path`, whole or not at all."""
        write_atomically(path, json.dumps({"schema": SCHEMA} | dataclasses.asdict(self)) + "\n")

    @classmethod
    def load(cls, path) -> "Part":
        """Read a part; ValueError in one line otherwise."""
        fields: dict[str, Any] = read_json(path, "part")
        if fields.pop("schema", None) != SCHEMA:
            raise ValueError(f"part {path} must have the schema {SCHEMA!r}")
        if set(fields) != {field.name for field in dataclasses.fields(cls)}:
            raise ValueError(f"part {path} has other fields than a part, or lacks some")
        fields["key"] = tuple(fields["key"])
        return cls(**fields)


def write_run_key(path) -> None:
    """A fresh run key from the operating system for all shards of one run, as JSON, never over a file."""
    words = randomness.key_words(randomness.fresh_key())
    create_secret(path, json.dumps({"run_key": words}) + "\n")


def read_run_key(path):
    """The JAX key in a file of `write_run_key`; ValueError otherwise."""
    words = read_json(path, "run key").get("run_key")
    if not (isinstance(words, list) and len(words) == 2 and all(isinstance(w, int) for w in words)):
        raise ValueError(f"run key {path} must hold two words of 32 bits")
    return randomness.key_from_words(words)


def parse_shard(text: str) -> tuple[int, int]:
    """(i, k) from "i/k", 0 <= i < k."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise ValueError(f"shard must be i/k with 0 <= i < k, such as 0/16, was {text!r}")
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
    """Draw part `index` of `count` of `samples` draws a direction (rounded up to whole blocks).

    Args:
      plan: with Monte Carlo evidence; its target and budget are verified.
      run_key: the same for all parts.
      index, count: 0 <= index < count.
      samples: in all parts together, a direction; the same for all parts.
      checkpoint: where finished stretches are kept; the same call then goes on where it was.
      progress: called with (what, samples done, samples expected).

    Raises:
      ValueError: bad arguments, or a plan without Monte Carlo evidence.
    """
    if not 0 <= index < count:
        raise ValueError(f"shard must have 0 <= i < k, was {index}/{count}")
    blocks = -(-_validate.positive_integer("samples", samples) // randomness.BLOCK_SIZE)
    first, last = (blocks * (index + step) // count for step in (0, 1))
    described = target_of(plan)
    words = randomness.key_words(run_key)
    counts = {}
    for direction, run in _runs(described, blocks):
        if trivial(run) is not None or line_of(run, run_key) is not None:
            continue
        margin, stream = margin_of(run), sampling.direction_key(run_key, direction)
        name = f"part-{index}-of-{count}-{direction}"
        job = {"target": described, "key": words, "blocks": blocks}
        state = checkpoint.load(name) if checkpoint else None
        if state is None or state["job"] != job:
            state = {"job": job, "done": first, "terms": [], "losses": []}
        terms = dense_counts(state["terms"], len(bounds.TERM_EDGES))
        losses = dense_counts(state["losses"], len(hockey_stick.loss_bounds(direction)))
        stretch = max(16, -(-(last - first) // _STRETCHES))
        done = state["done"]
        while done < last:
            target = min(last, done + stretch)
            more_terms, more_losses = count_terms(run, stream, done, target, margin)
            terms, losses, done = terms + more_terms, losses + more_losses, target
            kept = {"done": done, "terms": sparse_counts(terms), "losses": sparse_counts(losses)}
            if checkpoint:
                checkpoint.save(name, {"job": job} | kept)
            if progress:
                drawn, wanted = ((x - first) * randomness.BLOCK_SIZE for x in (done, last))
                progress(f"shard {index}/{count} {direction}", drawn, wanted)
        counts[direction] = {
            "proposal": run.proposal.name,
            "terms": [list(pair) for pair in sparse_counts(terms)],
            "losses": [list(pair) for pair in sparse_counts(losses)],
        }
    return Part(described, _version(), tuple(words), index, count, blocks, counts)


def merge(parts: list[Part]) -> tuple[Plan | None, Evidence]:
    """The plan, None unless it is accepted, and the evidence of all parts of one run.

    The verdict is the anytime rule's at the total number of draws, its bets from the run's own pilot.

    Raises:
      ValueError: no parts, a duplicate, a gap, or parts of another run, plan or version; it says which.
    """
    if not parts:
        raise ValueError("parts must not be empty")
    reference = parts[0]
    for part in parts[1:]:
        for name in ("version", "target", "key", "count", "blocks"):
            if getattr(part, name) != getattr(reference, name):
                shown = "" if name in ("target", "key") else f": {getattr(part, name)!r}"
                raise ValueError(f"part {part.index} is of another {name} than part {reference.index}{shown}")
        for direction in {*part.counts} | {*reference.counts}:
            pair = [p.counts.get(direction, {}).get("proposal") for p in (part, reference)]
            if pair[0] != pair[1]:
                raise ValueError(
                    f"part {part.index} drew from {pair[0]!r} and part {reference.index} from {pair[1]!r}"
                )
    if reference.version != _version():
        raise ValueError(f"parts are of jaxacct {reference.version}, this is {_version()}")
    seen = [part.index for part in parts]
    duplicates = sorted({index for index in seen if seen.count(index) > 1})
    if duplicates:
        raise ValueError(f"parts must be different, {', '.join(map(str, duplicates))} came more than once")
    gaps = sorted(set(range(reference.count)) - set(seen))
    if gaps:
        raise ValueError(f"parts must be all of {reference.count}, {', '.join(map(str, gaps))} are missing")
    target = reference.target
    run_key = randomness.key_from_words(list(reference.key))
    verdicts = {}
    for direction, run in _runs(target, reference.blocks):
        verdicts[direction] = _judged(run, direction, parts, run_key)
        if direction == "remove" and not verdicts["remove"].accepted:
            verdicts["add"] = not_run(verdicts["remove"])
            break
    mechanism, budget = _mechanism(target), Budget(**target["budget"])
    digest = target_digest(mechanism, target["epsilon"], target["delta"], budget, None)
    evidence = Evidence("anytime", budget, verdicts["remove"], verdicts["add"], 0.0, digest)
    if not evidence.accepted:
        return None, evidence
    plan = make_plan(mechanism, target["epsilon"], target["delta"], evidence, target["dataset_size"], None)
    return plan, evidence


def verify_distributed(plan: Plan, samples: int, run_key=None) -> tuple[Plan | None, Evidence]:
    """Verify on all processes of `jax.distributed`, each drawing its part; every process gets the result.

    Call it on every process after `jax.distributed.initialize`, with the same arguments.

    Args:
      plan, samples: as in `draw_part`.
      run_key: from the operating system of process 0 by default. Only tests should fix it.
    """
    fresh = randomness.fresh_key() if run_key is None else run_key
    words = multihost_utils.broadcast_one_to_all(np.array(randomness.key_words(fresh), np.uint32))
    key = randomness.key_from_words(words.tolist())
    part = draw_part(plan, key, jax.process_index(), jax.process_count(), samples)
    text = np.frombuffer(json.dumps(dataclasses.asdict(part)).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array([text.size], np.int32)).reshape(-1)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: text.size] = text
    gathered = multihost_utils.process_allgather(padded).reshape(len(lengths), -1)
    found = [
        json.loads(bytes(row[:length])) for row, length in zip(np.asarray(gathered), lengths, strict=True)
    ]
    return merge([Part(**fields | {"key": tuple(fields["key"])}) for fields in found])


def _judged(run, direction: str, parts: list[Part], run_key):
    nothing = trivial(run)
    if nothing is not None:
        return nothing
    line = line_of(run, run_key)
    if line is not None:
        return extrapolate(run, line, run_key, None, None)
    terms = np.zeros(len(bounds.TERM_EDGES), np.int64)
    losses = np.zeros(len(hockey_stick.loss_bounds(direction)), np.int64)
    for part in parts:
        drawn = part.counts.get(direction, {})
        if drawn.get("proposal") != run.proposal.name:
            raise ValueError(
                f"part {part.index} drew from {drawn.get('proposal')!r} in the {direction} direction, "
                f"not from {run.proposal.name!r}"
            )
        terms += dense_counts(drawn["terms"], terms.size)
        losses += dense_counts(drawn["losses"], losses.size)
        last, first = (part.blocks * (part.index + step) // part.count for step in (1, 0))
        drawn_here = sum(number for _, number in drawn["terms"])
        if drawn_here != (last - first) * randomness.BLOCK_SIZE:
            raise ValueError(
                f"part {part.index} holds {drawn_here} draws of the {direction} direction, not its share"
            )
    return judge(run, run_key, terms, losses)


def target_of(plan: Plan) -> dict:
    """What is verified of a plan, as plain JSON values.

    Raises:
      ValueError: for a plan composed with another mechanism.
    """
    if plan.compose_with is not None:
        raise ValueError("plan must not be composed with another mechanism to be verified in parts")
    budget = plan.evidence.budget if plan.evidence else Budget.split(plan.delta)
    fields = plan.to_json()
    names = ("scheme", "strategy", "noise_multiplier", "epsilon", "delta", "dataset_size")
    return {name: fields[name] for name in names} | {"budget": dataclasses.asdict(budget)}


def _mechanism(target: dict) -> Mechanism:
    strategy = strategy_from_json(target["strategy"])
    return Mechanism(scheme_from_json(target["scheme"]), strategy, target["noise_multiplier"])


def _runs(target: dict, blocks: int):
    """(direction, what is to be verified) for both directions, by the anytime rule."""
    mechanism, budget = _mechanism(target), Budget(**target["budget"])
    samples = blocks * randomness.BLOCK_SIZE
    for direction in DIRECTIONS:
        yield direction, direction_run(mechanism, target["epsilon"], direction, budget, samples)


def _version() -> str:
    from jaxacct import __version__

    return __version__
