"""Stored plans and their forgeries: the one place of the tests that takes evidence apart.

A forger recomputes whatever follows from what is forged, so that a forgery is consistent in itself: digests,
scales, thresholds, bounds and verdicts. What is left to be seen is the forged input alone.
"""

import dataclasses
import json

import numpy as np
from jaxacct.verification.certificates import of_direction
from jaxacct.verification.extrapolation import bound_from_counts
from jaxacct.verification.run import line_evidence, verdict_of

from jaxacct import Plan
from jaxacct.calibration import _Sizes, make_plan
from jaxacct.core.claim import Target
from jaxacct.files import to_json
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.hockey_stick import dense_counts
from tests.test_plan import KINDS, whole

DRAWN = [kind for kind in KINDS if whole(kind).evidence is not None]


def loaded(plan: Plan) -> Plan:
    """What is read of the file that the plan is written to; ValueError where it is refused."""
    return Plan.from_json(json.loads(to_json(plan.to_json())))


def drawn_directions(plan: Plan) -> list[str]:
    """The directions of a plan that were drawn for."""
    assert plan.evidence is not None
    return [name for name in ("remove", "add") if getattr(plan.evidence, name).num_samples]


def is_line(plan: Plan, direction: str) -> bool:
    """Whether a direction is certified by extrapolation."""
    return getattr(plan.evidence, direction).extrapolation is not None


def histograms(plan: Plan, direction: str) -> list[np.ndarray]:
    """Dense counts of terms and losses, or of the terms of both laws of a line."""
    seen = getattr(plan.evidence, direction)
    sizes = [len(bounds.TERM_EDGES), len(hockey_stick.loss_bounds(direction))]
    if is_line(plan, direction):
        sizes[1] = sizes[0]
    stored = of_direction(seen, plan.evidence.rule).histograms
    return [dense_counts(part, size) for part, size in zip(stored, sizes, strict=True)]


def restated(plan: Plan, direction: str, counts=None, margin=None, accepted=None, **forged) -> Plan:
    """The plan with other draws or another margin in one direction, and all that follows from those.

    Args:
      counts: as of `histograms`.
      margin: what is said to have been put aside for rounding.
      accepted: the verdict that is claimed in place of the one that follows.
      forged: other fields of the direction's evidence.
    """
    evidence = plan.evidence
    seen = getattr(evidence, direction)
    seen = dataclasses.replace(seen, **forged)
    counts = histograms(plan, direction) if counts is None else counts
    certificate = of_direction(seen, evidence.rule)
    run = certificate.run(plan.mechanism, plan.target)
    if is_line(plan, direction):
        line = certificate.extrapolation(plan.mechanism, plan.target)
        margin = seen.extrapolation.margin if margin is None else margin
        found = bound_from_counts(line, plan.target.budget.failure_probability, margin, *counts)
        made = line_evidence(run, line, found, certificate.key())
    else:
        margin = seen.margin if margin is None else margin
        made = verdict_of(run, margin, seen.bets, seen.bet_weights, *counts, certificate.key())
    if accepted is not None:
        made = dataclasses.replace(made, accepted=accepted)
    return dataclasses.replace(plan, evidence=dataclasses.replace(evidence, **{direction: made}))


def analytic(mechanism, epsilon: float, delta: float, *, compose_with=None, **sizes) -> Plan:
    """A plan of an accountant's bound, whether it holds or not.

    Args:
      sizes: `dataset_size`, `max_batch_size`, `truncation_delta`.
    """
    target = Target.at(epsilon, delta, compose_with, spent=sizes.get("truncation_delta") or 0.0)
    return make_plan(mechanism, target, None, _Sizes(**sizes))
