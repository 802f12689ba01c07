"""Draw evidence for a claim: batches of samples until they suffice, then `core.check`.

Everything that decides is an exact histogram of terms rounded up (`statistics.bounds`), so the verdict can be
recomputed from the stored evidence alone, and does not depend on the batching of samples.
"""

import contextlib
import dataclasses
import math
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.common.files import Checkpoint, json_digest
from jaxacct.common.progress import Progress
from jaxacct.common.records import differences
from jaxacct.core import evidence as data
from jaxacct.core.blocks import Fleet
from jaxacct.core.check import Verdict, accepts, check, resolve, resolve_proposal
from jaxacct.core.claim import Claim, ClaimedTarget
from jaxacct.kernels import randomness
from jaxacct.kernels.programs import check_arithmetic
from jaxacct.kernels.randomness import Stream
from jaxacct.mechanisms.mechanism import Mechanism, checked
from jaxacct.proposals import base
from jaxacct.proposals.threshold import Resolved
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.bounds import Budget
from jaxacct.statistics.hockey_stick import DIRECTIONS, Direction

PILOT_BLOCKS = 16


@dataclass(frozen=True)
class Stop:
    """Stopping rule of a verification.

    Attributes:
      rule: "anytime" stops as soon as the evidence suffices; "fixed" always draws `max_samples` per direction
        and applies the fixed-sample test of arXiv 2602.09338, appendix A.
      max_samples: number of samples after which a direction is not certified.
      share: share of the failure probability q of this verification, in (0, 1]; the rest is for
        other candidates (`core.shares`).
      patience: a direction also stops where the samples so far, at least an eighth of `max_samples`, predict
        that it needs more than this many further ones; the anytime rule only.
    """

    rule: data.RuleName = "anytime"
    max_samples: int = 2_000_000
    share: float = 1.0
    patience: float = math.inf

    def __post_init__(self):
        _validate.one_of("rule", self.rule, data.RULES)
        _validate.positive_integer("max_samples", self.max_samples)
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1], got {self.share!r}")
        if not self.patience > 0:
            raise ValueError(f"patience must be above 0, got {self.patience!r}")


def verify(
    mechanism: Mechanism,
    epsilon: float,
    delta: float,
    *,
    budget: Budget | None = None,
    rule: data.RuleName = "anytime",
    max_samples: int = 2_000_000,
    proposal: str | None = None,
    compose_with=None,
    checkpoint: Checkpoint | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
    key=None,
) -> Verdict:
    """Verify that the mechanism is (epsilon, delta)-DP, both directions, by sampling.

    If the mechanism is not (epsilon, delta_v)-DP then this certifies it with probability at most q, with
    `delta_v + q (1 - delta_v) <= delta` from the budget. A verdict that is not certified proves nothing.

    Args:
      mechanism: scheme, strategy and noise multiplier.
      epsilon: target, nats.
      delta: target, in (0, 1).
      budget: split of delta; `Budget.split(delta)` by default.
      rule: "anytime" or "fixed"; see `Stop`.
      max_samples: number of samples after which a direction is not certified.
      proposal: the proposal to use, such as "plain" or "replicas:2"; the cheapest by default.
      compose_with: a dp-accounting `DpEvent` that the guarantee also covers.
      checkpoint: stores finished batches; the same call then resumes.
      executor: a `concurrent.futures.Executor` (a process pool, Dask's, mpi4py's, submitit's) whose workers
        draw the samples; the counts are those of one machine. By default this process draws them.
      progress: called with (what, samples done, samples expected).
      key: JAX key; from the operating system by default. Only tests should fix it.

    Returns:
      The verdict, with the evidence of both directions.

    Raises:
      ValueError: bad arguments, an unknown proposal, a checkpoint of another job.
      NonFiniteLossError: a privacy loss was not finite.

    Source: arXiv 2602.09338, algorithm 5 and theorem A.1; proofs/derivations.md sections 4, 5 and 9.
    """
    checked(mechanism)
    target = ClaimedTarget.at(epsilon, delta, compose_with)
    if budget is not None:
        target = dataclasses.replace(target, budget=budget)
    claim, stop = Claim(mechanism, target, None, None), Stop(rule, max_samples)
    options = dict(checkpoint=checkpoint, executor=executor, progress=progress, key=key)
    return verify_claim(claim, stop, proposal, **options)


def verify_claim(
    claim: Claim,
    stop: Stop,
    proposal: str | None = None,
    *,
    again: data.Sampled | None = None,
    checkpoint: Checkpoint | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
    key=None,
) -> Verdict:
    """Draw evidence for a claim and check it.

    `again` is evidence that fresh samples are to confirm: a checkpoint of the samples in it is another job's.
    Its proposals are used again, unless `proposal` is given or it has another rule.
    """
    check_arithmetic()
    fleet = None if executor is None else Fleet.of(executor, claim)
    job = _job_digest(claim, stop, proposal, again)
    run_key = _run_key(job, checkpoint, key)
    drawn = claim.mechanism.directions  # the evidence of the other one follows from theirs
    sides: dict[Direction, data.Side] = dict.fromkeys(DIRECTIONS, data.Dominated())
    sides |= dict.fromkeys(drawn, data.NotRun())
    kept = again if again is not None and proposal is None and again.rule == stop.rule else None
    for direction in drawn:
        side = getattr(kept, direction, None)
        if isinstance(side, data.Mean | data.WeightBound):
            run = Run(resolve(claim, direction, side.proposal))
        else:
            run = choose_run(claim, direction, stop, proposal)
        sides[direction] = draw(run, claim.target.budget, stop, job, run_key, checkpoint, progress, fleet)
        verdict = check(claim, data.Sampled(claim.digest, stop.rule, stop.share, **sides))
        if verdict.remove is None or not verdict.remove.certified:
            break  # one direction that is not certified decides the verdict
    return verdict  # pyrefly: ignore[unbound-name]


@dataclass(frozen=True, eq=False)
class Run:
    """One direction of a verification, before sampling: the proposal and, for progress, expected samples."""

    of: Resolved
    predicted: float = math.nan


def choose_run(claim: Claim, direction: Direction, stop: Stop, proposal: str | None = None) -> Run:
    """Return the run with the named proposal, or with the one expected to need the fewest samples."""
    from jaxacct.proposals.candidates import candidates, choose_proposal

    target = claim.target
    at = claim.mechanism, target.epsilon, direction, target.budget
    predicted = {
        each.proposal: each.predicted_samples for each in candidates(*at, composed=target.composition)
    }
    chosen = choose_proposal(list(predicted), direction, proposal)
    samples = predicted[chosen] if stop.rule == "anytime" else stop.max_samples
    return Run(resolve_proposal(claim, chosen), samples)


def draw(
    run: Run,
    budget: Budget,
    stop: Stop,
    job: str,
    run_key,
    checkpoint: Checkpoint | None = None,
    progress: Progress | None = None,
    fleet: Fleet | None = None,
) -> data.Side:
    """Return the evidence of one direction; `job`, a digest of the verification, names the stored state."""
    proposal = run.of.proposal
    direction, margin = proposal.direction, run.of.margin
    distribution = proposal.draw_metadata | {"margin": margin}
    if not run.of.needs_samples:
        return data.WeightBound(proposal.spec)
    name = f"{direction}-{job[:16]}"
    state: dict[str, Any] | None = _kept(checkpoint, name, distribution)
    if state is None:
        state = {"distribution": distribution, "bets": ((), ()), "blocks": 0, "counts": ((), ())}
        if stop.rule == "anytime":
            state["bets"] = pilot_bets(run.of, run_key)
    bets, weights = tuple(state["bets"][0]), tuple(state["bets"][1])
    stream = base.direction_key(run_key, direction)
    level = stop.share * budget.failure_probability
    limit = -(-stop.max_samples // randomness.BLOCK_SIZE)
    bins = len(bounds.TERM_EDGES), len(hockey_stick.loss_bounds(direction))
    names = "counts of terms in a checkpoint", "counts of losses in a checkpoint"
    blocks, counts = state["blocks"], tuple(map(hockey_stick.checked_counts, state["counts"], bins, names))
    here = contextlib.nullcontext(lambda first, last: run.of.count(stream, first, last, margin))
    with here if fleet is None else fleet.counter(run.of, stream, margin, blocks, limit) as count:
        # The test comes before any draw, so that a resumed run ends where an uninterrupted one does.
        while not _is_settled(run.of, stop, level, counts[0], blocks, limit, bets, weights):
            end = min(limit, next_check(blocks))
            counts, blocks = hockey_stick.add_counts(counts, count(blocks, end)), end
            if checkpoint:
                kept = {"blocks": blocks, "counts": list(map(hockey_stick.sparse_counts, counts))}
                checkpoint.save(name, state | kept)
            if progress:
                progress(f"{direction} ({proposal.name})", blocks * randomness.BLOCK_SIZE, run.predicted)
    words, (one, two) = randomness.key_words(stream), map(hockey_stick.sparse_counts, counts)
    return data.Mean(proposal.spec, margin, (words[0], words[1]), one, two, bets, weights)


def _kept(checkpoint: Checkpoint | None, name: str, metadata: dict) -> dict | None:
    """Return the state stored under that name, or None.

    Terms are in units of the scale of their proposal. Another version, or another machine where two proposals
    cost the same, may choose another proposal: its samples must not be added to these (ValueError).
    """
    state = checkpoint.load(name) if checkpoint else None
    if state is not None and (flaws := differences(state.get("distribution"), metadata, "the proposal")):
        raise ValueError(f"checkpoint_dir must be another one: in {name}.json {flaws[0]}")
    return state


def _is_settled(
    of: Resolved, stop: Stop, level: float, terms, blocks: int, limit: int, bets, weights
) -> bool:
    """Return whether the samples so far decide the verdict; the fixed rule tests at the end only."""
    if blocks >= limit:
        return True
    if blocks == 0 or stop.rule == "fixed":
        return False
    if accepts(terms, of.threshold, stop.rule, level, bets, weights) or bounds.hopeless(terms, of.threshold):
        return True
    # Not earlier: predictions from few terms are random.
    if stop.patience < math.inf and 8 * blocks >= limit:
        return bool(bounds.samples_left(terms, of.threshold, level, bets, weights) > stop.patience)
    return False


def next_check(blocks: int) -> int:
    """Return when the anytime rule tests next: a function of the blocks so far, about an eighth more."""
    step = max(16, 1 << max(0, (blocks // 8).bit_length() - 1))
    return blocks + step


def pilot_bets(of: Resolved, run_key) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (bets, weights) from samples of a separate stream, so that they are fixed in advance."""
    stream = randomness.stream_key(run_key, Stream.REMOVE_PILOT.at(of.proposal.direction.place))
    margin, counts = of.margin, np.zeros(len(bounds.TERM_EDGES), np.int64)
    for draws in base.draw_in_batches(of.proposal, stream, 0, PILOT_BLOCKS):
        counts += bounds.bin_terms(of.terms(draws, margin))
    bets, weights = bounds.default_bets(of.threshold, counts)
    return tuple(map(float, bets)), tuple(map(float, weights))


def _run_key(job: str, checkpoint: Checkpoint | None, key):
    """Return the run's key: the given one, the stored one of this job, or a fresh one."""
    stored = checkpoint.load(f"key-{job[:16]}") if checkpoint else None
    if stored is not None:
        return randomness.key_from_words(stored["key"])
    run_key = randomness.fresh_key() if key is None else key
    if checkpoint:
        checkpoint.save(f"key-{job[:16]}", {"key": randomness.key_words(run_key)})
    return run_key


def _job_digest(claim: Claim, stop: Stop, proposal: str | None, again: data.Sampled | None = None) -> str:
    """Return the digest of exactly this verification.

    Another claim, rule, limit, share or evidence to confirm is another job.
    """
    about = [claim.digest, stop.rule, stop.max_samples, stop.share, proposal]
    about += [] if again is None else [data.evidence_to_json(again)]
    return json_digest(about)
