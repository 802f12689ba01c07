"""The privacy cost of hyperparameters: releasing the best of K runs under certified plans, K random."""

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.accountants import ACCOUNTANTS
from jaxacct.accountants.selection import MAX_EPSILON, CertifiedProfile, RunCount, Selected, select_best
from jaxacct.common import validate as _validate
from jaxacct.common.files import create_secret, to_json
from jaxacct.common.progress import Progress
from jaxacct.common.records import exact
from jaxacct.core import text, truncation
from jaxacct.core.evidence import Bound
from jaxacct.core.plan import Plan

SCHEMA = "jaxacct-tuning"
# Epsilons at which the accountant of a plan is asked for its bound on delta, in multiples of the plan's own.
_MULTIPLES = (*(0.1 * step for step in range(11)), 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)


@dataclass(frozen=True)
class Tuned:
    """The guarantee of releasing the best of K runs: `selected` has it, with the distribution of K."""

    plans: tuple[Plan, ...]
    selected: Selected

    @property
    def epsilon(self) -> float:
        """Of the release, natural log."""
        return self.selected.epsilon

    @property
    def delta(self) -> float:
        """Of the release; the failure probabilities of the certificates are in it."""
        return self.selected.delta

    def statement(self) -> str:
        """Return the guarantee in a sentence for a privacy review."""
        mechanism = self.plans[0].mechanism
        unit = text.unit_in_words(
            mechanism.scheme, all(plan.reveals_all_participations for plan in self.plans)
        )
        return (
            f"Releasing the best of K training runs is ({exact(self.epsilon)}, {exact(self.delta)})-"
            f"differentially private for one {unit} under {mechanism.adjacency} adjacency, by the "
            "certificates of its plans and under their assumptions. It also assumes that K is drawn once "
            f"from the {self.selected.runs}; that each run has fresh randomness and a candidate drawn "
            "uniformly and independently from a list that does not depend on the data; that runs are ranked "
            "by a function of what each releases and of public data; and that K, the other runs and the "
            "duration of tuning are not released."
        )

    def draw(self, num_candidates: int, path) -> None:
        """Draw K and the candidate of each run, and write them to a new file of mode 0600.

        The file is private: the guarantee does not hold against an adversary who sees K. Drawing again
        because K is too large or too small changes its distribution, and then the guarantee does not hold.

        Args:
          num_candidates: length of the list of hyperparameters.
          path: a file that must not exist.

        Raises:
          ValueError: for a file that exists, or bad arguments.
        """
        count = _validate.positive_integer("candidates", num_candidates)
        num_runs = self.selected.runs.draw()
        found: dict[str, Any] = {
            "schema": SCHEMA,
            "private": "do not publish this file, and do not draw again",
            "statement": self.statement(),
            "num_runs": num_runs,
            "candidates": [secrets.randbelow(count) for _ in range(num_runs)],
            "num_candidates": count,
            "plans": [plan.claim.digest for plan in self.plans],
        }
        create_secret(path, to_json(found, indent=1) + "\n")


def tuning(
    plans: Sequence[Plan], runs: RunCount, delta: float | None = None, *, progress: Progress | None = None
) -> Tuned:
    """Return the (epsilon, delta) of releasing the best of K runs, each under one of the plans.

    Args:
      plans: certified. Plans of one mechanism at several epsilons tighten its profile; of several mechanisms
        each run uses one, chosen independently of the data.
      runs: distribution of K, such as `jaxacct.accountants.selection.with_mean("logarithmic", 20.0)`.
      delta: of the release; by default the mean of K times that of the plan with the largest epsilon.
      progress: called with (what, points done, points in all).

    Raises:
      ValueError: for a plan that is not certified or composed with another mechanism, for plans of different
        units or adjacencies, or for a delta that they do not reach.
    """
    if not plans:
        raise ValueError("plans must have at least one plan")
    for plan in plans:
        if not plan.certified:
            raise ValueError(f"plans must be certified: {plan.flaws[0]}")
        if plan.compose_with is not None:
            raise ValueError("plans must not be composed with another mechanism, which would run K times")
    kinds = {
        (plan.mechanism.scheme.unit, plan.mechanism.scheme.examples_per_unit, plan.mechanism.adjacency)
        for plan in plans
    }
    if len(kinds) > 1:
        raise ValueError("plans must protect the same unit under the same adjacency")
    grouped: dict[str, list[tuple[float, float]]] = {}
    failure = 0.0
    for plan in plans:
        points, failed = certified_points(plan, progress)
        grouped.setdefault(_mechanism_digest(plan), []).extend(points)
        failure += failed
    profiles = [CertifiedProfile(*np.array(points).T) for points in grouped.values()]
    worst = CertifiedProfile.worst(profiles)
    if delta is None:
        at = max(plan.epsilon for plan in plans)
        delta = (runs.mean * worst.delta(at) + failure) * (1 + 1e-9) + 1e-50
    return Tuned(tuple(plans), select_best(worst, runs, delta, failure))


def certified_points(plan: Plan, progress: Progress | None = None) -> tuple[list[tuple[float, float]], float]:
    """Return the (epsilon, delta) that a plan certifies for a run, and their failure probability.

    Samples certify one point: the verified divergence and the reserves of delta, which hold unless the
    verification failed. An accountant bounds delta at every epsilon.
    """
    claim, budget = plan.claim, plan.target.budget
    if not isinstance(plan.evidence, Bound):
        return [(plan.epsilon, budget.delta_v + claim.reserved)], budget.failure_probability
    accountant, found = ACCOUNTANTS[plan.evidence.accountant], []
    for place, multiple in enumerate(_MULTIPLES):
        if progress is not None:
            progress("bounds", place, len(_MULTIPLES))
        epsilon = min(multiple * (plan.epsilon or 1.0), MAX_EPSILON)
        bound = accountant.delta(plan.mechanism, epsilon) + _reserved(plan, epsilon)
        found.append((epsilon, min(1.0, bound)))
    return found, 0.0


def _reserved(plan: Plan, epsilon: float) -> float:
    """Return what batch sizes add to delta(epsilon); 1 where no bound covers this."""
    claim, scheme = plan.claim, plan.mechanism.scheme
    if claim.truncate_to is not None:
        if not truncation.covers(plan.mechanism, epsilon):
            return 1.0
        return truncation.reserve(scheme, epsilon, claim.dataset_size or 0, claim.truncate_to)
    if claim.overflow is None:
        return 0.0
    return claim.overflow.probability * (1.0 if scheme.others_are_independent else 1 + math.exp(epsilon))


def _mechanism_digest(plan: Plan) -> str:
    """Return the digest of the claim without its target: equal where the same mechanism is certified."""
    fields = plan.claim.to_json()
    kept = {name: fields[name] for name in fields if name not in ("epsilon", "delta", "budget")}
    # Batch sizes at which a run stops follow from the target as well.
    kept["batch_sizes"] = plan.claim.batch_sizes
    return hashlib.sha256(to_json(kept, sort_keys=True).encode()).hexdigest()


__all__ = ["Tuned", "certified_points", "tuning"]
