"""Run a verification: draw batches, bin their terms, stop when the evidence suffices.

Everything that decides is an exact histogram of terms rounded up (`statistics.bounds`), so the verdict can be
computed again from the stored evidence alone, and does not depend on how the draws were batched.
"""

import dataclasses
import hashlib
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct import _validate
from jaxacct.files import Checkpoint, to_json
from jaxacct.kernels import randomness
from jaxacct.kernels.randomness import Stream
from jaxacct.mechanisms.mechanism import Mechanism, checked
from jaxacct.progress import Progress
from jaxacct.proposals import sampling
from jaxacct.proposals.base import DIRECTIONS, Proposal
from jaxacct.proposals.candidates import budget_lines, choose_candidate, end_lines, threshold
from jaxacct.records import differences
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.bounds import Budget
from jaxacct.statistics.direction import Direction
from jaxacct.statistics.hockey_stick import NonFiniteLossError
from jaxacct.statistics.lines import BudgetLine, total
from jaxacct.verification.extrapolation import (
    Extrapolation,
    LineEvidence,
    certify,
    cheaper_extrapolation,
    margin_of_line,
)
from jaxacct.verification.histogram import add_counts, dense_counts, draw_histograms, sparse_counts
from jaxacct.verification.target import Target

PILOT_BLOCKS = 16
RULES = ("anytime", "fixed")
_BELOW = "the mean term is below the threshold"


@dataclass(frozen=True)
class DirectionEvidence:
    """What one direction's verification saw, and its verdict.

    Attributes:
      direction: "remove" or "add".
      proposal: name of the law the draws came from.
      scale: M; the divergence is M times the mean term.
      relative_error, total_variation: all lines of that kind together; spent in `threshold`.
      margin: all "epsilon" lines together, subtracted from epsilon; natural log.
      threshold: the mean term to stay below,
        `(delta_v - "delta" lines) / (M (1 + relative_error)) - total_variation`.
      predicted_samples: by proposal name, computed before anything was drawn.
      num_samples: verification draws; none when `threshold >= 1` or the divergence is exactly zero.
      key: two 32-bit words; the draws of block i have the key `fold_in(key, i)`.
      term_counts: (edge index, count) of terms rounded up to `bounds.TERM_EDGES`.
      replicas: of the proposal: draws have weight proportional to e^{(1 - replicas) L} (remove direction).
      loss_counts: (bin, count) of the privacy losses drawn, for the profile of a plain proposal.
      bets, bet_weights: of the anytime rule, as fractions of the largest bet `1 / (1 - theta)`, fixed from
        an independent pilot; empty for the fixed rule.
      estimate: M times the mean rounded-up term: an estimate, not a bound.
      accepted: the verdict.
      reason: one line for people.
      lines: what is booked (`proposals.candidates.budget_lines`); the verdict rests on exactly their sums.
      extrapolation: where the add direction was certified by concavity instead, what both of its laws saw;
        `term_counts` is empty then.
    """

    direction: str
    proposal: str
    scale: float
    replicas: int
    relative_error: float
    total_variation: float
    margin: float
    threshold: float
    predicted_samples: dict[str, float]
    num_samples: int
    key: tuple[int, ...]
    term_counts: tuple[tuple[int, int], ...]
    loss_counts: tuple[tuple[int, int], ...]
    bets: tuple[float, ...]
    bet_weights: tuple[float, ...]
    estimate: float
    accepted: bool
    reason: str
    extrapolation: LineEvidence | None = None
    lines: tuple[BudgetLine, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """A verification of (epsilon, delta) for one mechanism: the budget and both directions.

    Attributes:
      target: `Target.digest` of what was verified, so that it cannot stand for anything else.
    """

    rule: str
    budget: Budget
    remove: DirectionEvidence
    add: DirectionEvidence
    seconds: float
    target: str

    @property
    def accepted(self) -> bool:
        """Both directions accepted: the guarantee holds with the budget's failure probability spent."""
        return self.remove.accepted and self.add.accepted

    @property
    def num_samples(self) -> int:
        """Verification draws of both directions."""
        return self.remove.num_samples + self.add.num_samples


def _accepts(counts, theta: float, rule: str, q: float, bets, weights) -> bool:
    if rule == "anytime":
        return bounds.accepts(counts, theta, q, np.array(bets), np.array(weights))
    # In the units of the terms: scale 1, delta_v = theta, delta' the mean that was seen.
    bound = bounds.failure_probability(
        delta_v=theta, delta_prime=bounds.mean_upper(counts), samples=int(counts.sum())
    )
    return bound <= q


def verify(
    mechanism: Mechanism,
    epsilon: float,
    delta: float,
    *,
    budget: Budget | None = None,
    rule: str = "anytime",
    max_samples: int = 2_000_000,
    share: float = 1.0,
    patience: float = math.inf,
    proposal: str | None = None,
    compose_with=None,
    checkpoint: Checkpoint | None = None,
    progress: Progress | None = None,
    key=None,
) -> Evidence:
    """Verify that the mechanism is (epsilon, delta)-DP, both directions, by sampling.

    If the mechanism is not (epsilon, delta_v)-DP then this accepts with probability at most q, with
    `delta_v + q (1 - delta_v) <= delta` from the budget. Rejection says nothing.

    Args:
      epsilon, delta: the target; epsilon a natural log.
      budget: how delta is split; `Budget.split(delta)` by default.
      rule: "anytime" stops as soon as the evidence suffices; "fixed" always draws `max_samples` a direction
        and applies the fixed-sample test of arXiv 2602.09338, appendix A.
      max_samples: give up (reject) after so many draws in a direction.
      share: accept wrongly with at most this part of q, in (0, 1], where the rest is for other attempts. The
        evidence says q: it is what all attempts together may spend.
      patience: give up (reject) also where the draws seen, an eighth of `max_samples` at least, predict that
        a direction takes more than so many further ones; the anytime rule only.
      proposal: name of the proposal to insist on ("plain", say); the cheapest by default.
      compose_with: a dp-accounting `DpEvent` that the guarantee shall cover as well.
      checkpoint: where finished batches are kept; the same call then goes on where it was.
      progress: called with (what, samples done, samples expected).
      key: JAX key; from the operating system by default. Only tests should fix it.

    Raises:
      ValueError: bad arguments, an unknown proposal, a checkpoint of another job.
      NonFiniteLossError: a privacy loss was not finite.

    Source: arXiv 2602.09338, algorithm 5 and theorem A.1; proofs/derivations.md sections 4, 5 and 9.
    """
    started = time.monotonic()
    checked(mechanism)
    target = Target.at(epsilon, delta, compose_with)
    if budget is not None:
        target = dataclasses.replace(target, budget=budget)
    _validate.positive_integer("max_samples", max_samples)
    _validate.one_of("rule", rule, RULES)
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], was {share!r}")
    if not patience > 0:
        raise ValueError(f"patience must be above 0, was {patience!r}")
    job = _job_digest(mechanism, target, rule, proposal, max_samples, share)
    run_key = _run_key(job, checkpoint, key)
    verdicts = {}
    for direction in DIRECTIONS:
        chosen, predicted = _choose(mechanism, target, direction, proposal)
        run = Run(chosen, target, rule, max_samples, predicted, job, share, patience)
        line = choose_extrapolation(run, run_key) if proposal is None else None
        if line is None:
            verdicts[direction] = _verify_direction(run, run_key, checkpoint, progress)
        else:
            verdicts[direction] = extrapolate(run, line, run_key, checkpoint, progress)
        if not verdicts[direction].accepted and direction == Direction.REMOVE:
            # One rejection settles it; the other direction is reported as not run.
            verdicts[Direction.ADD] = skipped_add_direction(verdicts[direction])
            break
    digest, seconds = target.digest(mechanism), time.monotonic() - started
    return Evidence(rule, target.budget, verdicts[Direction.REMOVE], verdicts[Direction.ADD], seconds, digest)


def skipped_add_direction(remove: DirectionEvidence) -> DirectionEvidence:
    """The add direction's evidence where the remove direction was not accepted."""
    return dataclasses.replace(
        remove,
        direction=Direction.ADD,
        proposal="not run",
        num_samples=0,
        term_counts=(),
        loss_counts=(),
        accepted=False,
        reason="not run: the remove direction was not accepted",
    )


@dataclass(frozen=True, eq=False)
class Run:
    """One direction's verification, before anything is drawn."""

    proposal: Proposal
    target: Target
    rule: str
    max_samples: int
    predicted: dict[str, float]
    job: str
    share: float = 1.0
    """Of the failure probability, what this attempt may spend."""
    patience: float = math.inf
    """Further draws beyond which it is given up."""

    @property
    def level(self) -> float:
        """Probability with which this attempt may accept wrongly."""
        return self.share * self.target.budget.failure_probability


def _choose(mechanism, target: Target, direction, name):
    budget, composed = target.budget, target.composition
    return choose_candidate(mechanism, target.epsilon, direction, budget, name, composed=composed)


def direction_run(mechanism: Mechanism, target: Target, direction: str, max_samples: int) -> Run:
    """One direction by the anytime rule with the cheapest proposal."""
    chosen, predicted = _choose(mechanism, target, direction, None)
    return Run(chosen, target, "anytime", max_samples, predicted, "parts")


def choose_extrapolation(run: Run, run_key) -> Extrapolation | None:
    """The extrapolation to use in place of the run's proposal, if any: add direction, anytime rule."""
    if run.proposal.direction != Direction.ADD or run.rule != "anytime":
        return None
    pilot = randomness.stream_key(run_key, Stream.EXTRAPOLATION_PILOT)
    otherwise = run.predicted[run.proposal.name]
    return cheaper_extrapolation(run.proposal.mechanism, run.target, otherwise, pilot)


def nothing_to_draw(run: Run) -> DirectionEvidence | None:
    """The evidence where nothing needs to be drawn: a mean of terms in [0, 1] never exceeds 1."""
    if not threshold(run.proposal, run.target.budget.delta_v) >= 1:
        return None
    zero = run.proposal.log_scale == -math.inf
    reason = "exactly zero" if zero else "the scale is below delta_v: no draw needed"
    return _evidence(run, 0.0, 1.0, (), (), None, None, True, reason)


def margin_of(run: Run) -> float:
    """What is put aside for float32 losses, natural log."""
    return finite_margin(total(budget_lines(run.proposal, run.target.budget.delta_v), "epsilon"))


def finite_margin(margin: float) -> float:
    """The margin, unless it is no margin: nothing is certified with NaN, infinity or less than nothing."""
    if not 0 <= margin < math.inf:
        raise NonFiniteLossError(f"the margin for rounding is {margin!r}: nothing can be certified")
    return margin


def count_terms(run: Run, stream, first: int, last: int, margin: float) -> tuple[np.ndarray, np.ndarray]:
    """Histograms (terms, losses) of the blocks first..last-1 of a stream, int64."""
    terms = np.zeros(len(bounds.TERM_EDGES), np.int64)
    losses = np.zeros(len(hockey_stick.loss_bounds(run.proposal.direction)), np.int64)
    for draws in sampling.draw_in_batches(run.proposal, stream, first, last - first):
        terms += bounds.bin_terms(_terms(run, draws, margin))
        losses += hockey_stick.bin_losses(draws.loss)
    return terms, losses


def evidence_from_counts(run: Run, run_key, terms, losses, margin: float) -> DirectionEvidence:
    """The evidence of a fixed number of draws, its bets from the same pilot as `verify`'s."""
    bets, weights = _pilot(run, run_key, margin, threshold(run.proposal, run.target.budget.delta_v))
    stream = sampling.direction_key(run_key, run.proposal.direction)
    return verdict_of(run, margin, bets, weights, terms, losses, stream)


def verdict_of(run: Run, margin: float, bets, weights, terms, losses, stream) -> DirectionEvidence:
    """The evidence that the histograms (terms, losses) of the stream give, with bets fixed before."""
    theta = threshold(run.proposal, run.target.budget.delta_v)
    accepted = _accepts(terms, theta, run.rule, run.level, bets, weights)
    reason = _BELOW if accepted else f"not decided after {int(terms.sum())} samples"
    return _evidence(run, margin, theta, bets, weights, (terms, losses), stream, accepted, reason)


def _verify_direction(run: Run, run_key, checkpoint, progress) -> DirectionEvidence:
    proposal, direction = run.proposal, run.proposal.direction
    nothing = nothing_to_draw(run)
    if nothing is not None:
        return nothing
    theta, margin = threshold(proposal, run.target.budget.delta_v), margin_of(run)
    name = f"{direction}-{run.job[:16]}"
    law = proposal.drawn_law | {"margin": margin}
    state: dict[str, Any] | None = _kept(checkpoint, name, law)
    if state is None:
        bets, weights = ((), ()) if run.rule == "fixed" else _pilot(run, run_key, margin, theta)
        state = {
            "law": law,
            "bets": list(bets),
            "weights": list(weights),
            "blocks": 0,
            "terms": [],
            "losses": [],
        }
    bets, weights = tuple(state["bets"]), tuple(state["weights"])
    stream = sampling.direction_key(run_key, direction)
    limit = -(-run.max_samples // randomness.BLOCK_SIZE)

    def settled(blocks: int, counts) -> DirectionEvidence | None:
        verdict = _verdict(run, counts[0], blocks, limit, theta, bets, weights)
        return verdict and _evidence(run, margin, theta, bets, weights, counts, stream, *verdict)

    def keep(blocks: int, counts) -> None:
        if checkpoint:
            terms, losses = map(sparse_counts, counts)
            checkpoint.save(name, state | {"blocks": blocks, "terms": terms, "losses": losses})
        if progress:
            expected = run.predicted[proposal.name] if run.rule == "anytime" else run.max_samples
            progress(f"{direction} ({proposal.name})", blocks * randomness.BLOCK_SIZE, expected)

    return draw_histograms(
        lambda first, last: count_terms(run, stream, first, last, margin),
        settled,
        lambda blocks: min(limit, next_check(blocks)),
        add=add_counts,
        done=state["blocks"],
        counts=(
            dense_counts(state["terms"], len(bounds.TERM_EDGES)),
            dense_counts(state["losses"], len(hockey_stick.loss_bounds(direction))),
        ),
        keep=keep,
    )


def _kept(checkpoint: Checkpoint | None, name: str, law: dict) -> dict | None:
    """The state kept under that name, None where there is none.

    Terms are in units of the scale of the law that they were drawn from. Another version, or another machine
    where two cost the same, may choose another law: its draws must not be added to these.

    Raises:
      ValueError: for draws of another law, or of one that is not told.
    """
    state = checkpoint.load(name) if checkpoint else None
    if state is not None and (flaws := differences(state.get("law"), law, "the law drawn from")):
        raise ValueError(f"checkpoint_dir must be another one: in {name}.json {flaws[0]}")
    return state


def extrapolate(run: Run, line: Extrapolation, run_key, checkpoint, progress) -> DirectionEvidence:
    """The add direction by concavity from two common events (`jaxacct.verification.extrapolation`)."""
    name = f"add-line-{run.job[:16]}"
    law = {"near": line.near_distance, "far": line.far_distance, "log_scale": line.log_scale}
    law |= {"margin": margin_of_line(line)}

    def keep(state):
        if checkpoint:
            checkpoint.save(name, state | {"law": law})
        if progress:
            drawn = 2 * state["blocks"] * randomness.BLOCK_SIZE
            progress("add (extrapolated)", drawn, max(drawn, 2 * line.planned_samples))

    stream = randomness.stream_key(run_key, Stream.EXTRAPOLATION)
    found = certify(
        line,
        run.target.budget.delta_v,
        run.target.budget.failure_probability,
        stream,
        run.max_samples,
        share=run.share,
        kept=_kept(checkpoint, name, law),
        keep=keep,
    )
    return line_evidence(run, line, found, stream)


def line_evidence(run: Run, line: Extrapolation, found: LineEvidence, stream) -> DirectionEvidence:
    """The add direction's evidence from a line and what its two laws saw."""
    accepted = found.bound <= run.target.budget.delta_v
    reason = "the line through two common events is below delta_v at 0"
    evidence = _evidence(
        run,
        found.margin,
        run.target.budget.delta_v / math.exp(line.log_scale),
        (),
        (),
        None,
        stream,
        accepted,
        reason if accepted else f"not decided after {found.num_samples} samples",
    )
    return dataclasses.replace(
        evidence,
        proposal="extrapolated",
        scale=math.exp(line.log_scale),
        replicas=line.near.replicas,
        relative_error=0.0,
        total_variation=found.unseen,
        lines=(*line.lines, *end_lines(line.left_out)),
        num_samples=found.num_samples,
        estimate=found.bound,
        extrapolation=found,
    )


def _verdict(run: Run, terms, blocks: int, limit: int, theta, bets, weights):
    """(accepted, reason) when the draws so far settle it, else None; the fixed rule looks at the end only."""
    finished = blocks >= limit
    if blocks == 0 or (run.rule == "fixed" and not finished):
        return None
    if _accepts(terms, theta, run.rule, run.level, bets, weights):
        return True, _BELOW
    if run.rule == "anytime" and bounds.hopeless(terms, theta):
        return False, "the mean term is not below the threshold"
    if finished:
        return False, f"not decided after {blocks * randomness.BLOCK_SIZE} samples"
    # Not sooner: of few terms, chance decides what they predict.
    if run.rule == "anytime" and run.patience < math.inf and 8 * blocks >= limit:
        if bounds.samples_left(terms, theta, run.level, bets, weights) > run.patience:
            return False, f"given up, as more than {run.patience:,.0f} further samples were predicted"
    return None


def next_check(blocks: int) -> int:
    """When the anytime rule looks next: a function of the blocks so far alone, about every eighth more."""
    step = max(16, 1 << max(0, (blocks // 8).bit_length() - 1))
    return blocks + step


def _terms(run: Run, draws, margin: float) -> np.ndarray:
    profile = run.proposal.profile or run.target.profile
    weighted = hockey_stick.weighted_terms(
        draws, run.proposal.direction, run.target.epsilon - margin, profile
    )
    slack = run.proposal.weight_error(margin)
    return np.minimum(1.0, weighted * math.exp(slack - run.proposal.log_scale))


def _pilot(run: Run, run_key, margin, theta):
    """Bets from draws of a stream of their own, so that they are fixed before the verification draws."""
    stream = randomness.stream_key(run_key, Stream.REMOVE_PILOT.at(Direction(run.proposal.direction).place))
    counts = np.zeros(len(bounds.TERM_EDGES), np.int64)
    for draws in sampling.draw_in_batches(run.proposal, stream, 0, PILOT_BLOCKS):
        counts += bounds.bin_terms(_terms(run, draws, margin))
    bets, weights = bounds.default_bets(theta, counts)
    return tuple(map(float, bets)), tuple(map(float, weights))


def _evidence(run, margin, theta, bets, weights, counts, stream, accepted, reason):
    proposal = run.proposal
    scale = math.exp(proposal.log_scale)
    lines = budget_lines(proposal, run.target.budget.delta_v)
    terms, losses = counts if counts else (np.zeros(1, np.int64), np.zeros(1, np.int64))
    num_samples = int(terms.sum())
    return DirectionEvidence(
        direction=proposal.direction,
        proposal=proposal.name,
        scale=scale,
        replicas=proposal.replicas,
        relative_error=total(lines, "relative"),
        total_variation=total(lines, "total variation"),
        margin=margin,
        threshold=theta,
        predicted_samples=run.predicted,
        num_samples=num_samples,
        key=tuple(randomness.key_words(stream)) if stream is not None else (),
        term_counts=sparse_counts(terms),
        loss_counts=sparse_counts(losses),
        bets=bets,
        bet_weights=weights,
        estimate=scale * bounds.mean_upper(terms) if num_samples else 0.0,
        accepted=accepted,
        reason=reason,
        lines=lines,
    )


def _run_key(job: str, checkpoint: Checkpoint | None, key):
    """The run's key: given, or the one this job began with, or a fresh one."""
    stored = checkpoint.load(f"key-{job[:16]}") if checkpoint else None
    if stored is not None:
        return randomness.key_from_words(stored["key"])
    run_key = randomness.fresh_key() if key is None else key
    if checkpoint:
        checkpoint.save(f"key-{job[:16]}", {"key": randomness.key_words(run_key)})
    return run_key


def _job_digest(mechanism, target: Target, rule, proposal, max_samples, share=1.0) -> str:
    """A name for exactly this verification: another target, rule, limit or level is another job."""
    described = target.describe(mechanism) | {"rule": rule, "proposal": proposal, "max_samples": max_samples}
    if share != 1:
        described |= {"share": share}
    return hashlib.sha256(to_json(described, sort_keys=True).encode()).hexdigest()
