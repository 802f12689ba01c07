"""What stored draws prove: evidence built anew from the mechanism and the draws, and the draws made again.

A verdict is a function of (mechanism, epsilon, budget, direction, proposal) and of what was drawn: counts,
the key they came from, bets and distances fixed by a pilot. `rebuild` keeps only the second and computes the
rest as `verify` does, so nothing else in a file is believed. That the counts are those of the key, and that
bets and distances were fixed before, only drawing can show: `replay` draws the stored key, `verify` a fresh
one.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from jaxacct.kernels import randomness
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import DIRECTIONS
from jaxacct.proposals.candidates import by_name, threshold
from jaxacct.records import differences
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.direction import Direction
from jaxacct.verification import extrapolation
from jaxacct.verification.run import (
    RULES,
    DirectionEvidence,
    Evidence,
    Progress,
    Run,
    checked_counts,
    count_terms,
    line_evidence,
    margin_of,
    sparse_counts,
    trivial,
    verdict_of,
)
from jaxacct.verification.target import Target


def rebuild(seen: DirectionEvidence, mechanism: Mechanism, target: Target, rule: str) -> DirectionEvidence:
    """The evidence that `verify` would have written about the same draws of one direction.

    A margin larger than needed is kept: terms counted at a smaller epsilon are larger.

    Raises:
      ValueError: for draws that no verification of this target makes.
    """
    if seen.direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, was {seen.direction!r}")
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, was {rule!r}")
    run = _run(seen, mechanism, target, rule)
    size = len(bounds.TERM_EDGES)
    if seen.extrapolation is not None:
        stored = seen.extrapolation
        line = _line(seen, mechanism, target, rule)
        counts = [
            checked_counts(part, size, f"{name} counts")
            for name, part in (("near", stored.near_counts), ("far", stored.far_counts))
        ]
        if counts[0].sum() != counts[1].sum() or counts[0].sum() % randomness.BLOCK_SIZE:
            raise ValueError("the counts of the two laws must be equally many whole blocks")
        margin = max(stored.margin, extrapolation.margin_of_line(line))
        found = extrapolation.judge(line, target.budget.failure_probability, margin, *counts)
        return line_evidence(run, line, found, _key(seen.key))
    nothing = trivial(run)
    if nothing is not None:
        return nothing
    terms = checked_counts(seen.term_counts, size, "term counts")
    losses = checked_counts(seen.loss_counts, len(hockey_stick.loss_bounds(seen.direction)), "loss counts")
    if not terms.sum() or terms.sum() != losses.sum() or terms.sum() % randomness.BLOCK_SIZE:
        raise ValueError("the histograms must hold the same draws, one whole block or more")
    if (rule == "anytime") != bool(seen.bets):
        raise ValueError("bets must be given for the anytime rule alone")
    margin = max(seen.margin, margin_of(run))
    return verdict_of(run, margin, seen.bets, seen.bet_weights, terms, losses, _key(seen.key))


def _run(seen: DirectionEvidence, mechanism, target: Target, rule) -> Run:
    """As `verify` made it; only the predictions, which prove nothing, are those of the file."""
    name = "plain" if seen.extrapolation is not None else seen.proposal
    proposal = by_name(mechanism, target.epsilon, seen.direction, name, composed=target.composed)
    if not threshold(proposal, target.budget.delta_v) > 0:
        raise ValueError(f"proposal {name!r} resolves nothing here")
    return Run(proposal, target, rule, seen.num_samples, seen.predicted_samples, "")


def _line(seen: DirectionEvidence, mechanism, target: Target, rule):
    if seen.direction != Direction.ADD or rule != "anytime" or target.composed:
        raise ValueError("extrapolation is for the add direction, the anytime rule and no composition")
    stored = seen.extrapolation
    assert stored is not None
    return extrapolation.at_distances(mechanism, target.epsilon, stored.near_distance, stored.far_distance)


def _key(words):
    if len(words) != 2 or not all(type(word) is int and 0 <= word < 2**32 for word in words):
        raise ValueError(f"the key must be two words of 32 bits, was {words!r}")
    return randomness.key_from_words(list(words))


def flaws(evidence: Evidence, mechanism: Mechanism, target: Target) -> list[str]:
    """What in the evidence does not follow from the target and the draws, a line each; empty if it holds."""
    found = target_flaws(evidence, mechanism, target)
    if found:
        return found
    if evidence.remove.key and evidence.remove.key == evidence.add.key:
        return ["both directions have the same key: their draws are of two streams"]
    for name in DIRECTIONS:
        seen = getattr(evidence, name)
        if seen.direction != name:
            found.append(f"the {name} evidence is of direction {seen.direction!r}")
            continue
        try:
            fresh = rebuild(seen, mechanism, target, evidence.rule)
        except (ValueError, ArithmeticError) as error:
            found.append(f"{name}: {error}")
            continue
        short = margin_flaw(seen, fresh)
        found += [short] if short else differences(seen, fresh, name)
        if not fresh.accepted:
            found.append(f"{name}: the histogram does not support the verdict")
    return found


def margin_flaw(seen: DirectionEvidence, fresh: DirectionEvidence) -> str | None:
    """What is wrong where less was put aside for rounding than is today, as by an earlier version."""
    if not seen.margin < fresh.margin or not differences(seen.margin, fresh.margin):
        return None
    return (
        f"{seen.direction}: {seen.margin:.3g} of epsilon was put aside for rounding where {fresh.margin:.3g} "
        "is needed today: certify the mechanism again with `jaxacct calibrate`"
    )


def target_flaws(evidence: Evidence, mechanism: Mechanism, target: Target) -> list[str]:
    """Whether evidence is about this very target, before anything costly."""
    if evidence.budget != target.budget or evidence.target != target.digest(mechanism):
        return ["it is about another mechanism, epsilon, delta, budget or composition"]
    return []


@dataclass(frozen=True)
class Replayed:
    """One direction's draws, made again from the stored key.

    Attributes:
      drawn: draws in the stored histograms.
      moved: how many of them the fresh histograms have in another bin; 0 is bit for bit the same.
      accepted: whether the fresh histograms support the verdict.
    """

    direction: str
    drawn: int
    moved: int
    accepted: bool

    @property
    def close(self) -> bool:
        """Whether no more draws moved than rounding on a machine of another kind could explain.

        An error of 1e-3 in a loss, which is far above any seen, moves 3 % of the draws across a bin of 1/32.
        """
        return self.moved <= 0.05 * self.drawn


def replay(
    evidence: Evidence, mechanism: Mechanism, target: Target, progress: Progress | None = None
) -> tuple[Replayed, ...]:
    """Draw again what the stored keys name, both directions; `verify` draws with fresh keys instead.

    On the kind of machine that drew first, histograms agree bit for bit. On another, float32 rounding may
    move a few draws to the next bin; the fresh histograms then still have to support the verdict.
    """
    found = []
    for direction in DIRECTIONS:
        seen = getattr(evidence, direction)
        if seen.num_samples:
            made = _drawn_again(seen, mechanism, target, evidence.rule, progress)
            fresh = rebuild(made, mechanism, target, evidence.rule)
            moved = sum(_moved(*pair) for pair in zip(_histograms(seen), _histograms(made), strict=True))
            found.append(Replayed(direction, seen.num_samples, moved, fresh.accepted))
        else:
            found.append(Replayed(direction, 0, 0, seen.accepted))
    return tuple(found)


def _drawn_again(seen, mechanism, target: Target, rule, progress) -> DirectionEvidence:
    run, key = _run(seen, mechanism, target, rule), _key(seen.key)
    laws = 1 if seen.extrapolation is None else 2
    blocks = seen.num_samples // (laws * randomness.BLOCK_SIZE)
    line = _line(seen, mechanism, target, rule) if laws == 2 else None
    totals, done, step = None, 0, max(64, blocks // 64)
    while done < blocks:
        last = min(blocks, done + step)
        if line is None:
            counts = count_terms(run, key, done, last, seen.margin)
        else:
            assert seen.extrapolation is not None
            counts = extrapolation.count_terms(line, key, seen.extrapolation.margin, done, last - done)
        totals = counts if totals is None else tuple(map(np.add, totals, counts))
        done = last
        if progress:
            progress(f"replay {seen.direction}", laws * done * randomness.BLOCK_SIZE, seen.num_samples)
    assert totals is not None
    first, second = (sparse_counts(counts) for counts in totals)
    if seen.extrapolation is None:
        return dataclasses.replace(seen, term_counts=first, loss_counts=second)
    stored = dataclasses.replace(seen.extrapolation, near_counts=first, far_counts=second)
    return dataclasses.replace(seen, extrapolation=stored)


def _histograms(seen: DirectionEvidence):
    if seen.extrapolation is None:
        return seen.term_counts, seen.loss_counts
    return seen.extrapolation.near_counts, seen.extrapolation.far_counts


def _moved(stored, fresh) -> int:
    one, two = dict(stored), dict(fresh)
    return math.ceil(sum(abs(one.get(i, 0) - two.get(i, 0)) for i in {*one, *two}) / 2)
