"""Every kind of certificate; the one of a plan that was drawn holds those of its two directions."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import DIRECTIONS
from jaxacct.records import exact
from jaxacct.statistics import hockey_stick
from jaxacct.statistics.direction import Direction
from jaxacct.verification.analytic_bound import AnalyticBound
from jaxacct.verification.certificate import Certificate, PlanCertificate
from jaxacct.verification.histogram import dense_counts
from jaxacct.verification.line import Line
from jaxacct.verification.mean_test import MeanTest
from jaxacct.verification.of_direction import OfDirection
from jaxacct.verification.run import DirectionEvidence, Evidence
from jaxacct.verification.target import Target


def of_direction(seen: DirectionEvidence, rule: str) -> OfDirection:
    """The certificate that one direction's evidence is."""
    return MeanTest(seen, rule) if seen.extrapolation is None else Line(seen, rule)


@dataclass(frozen=True)
class BothDirections(PlanCertificate):
    """Both directions of a verification by sampling."""

    kind = "both-directions"
    drawn = True
    evidence: Evidence

    def of(self, direction: Direction) -> OfDirection:
        """The certificate of one direction."""
        return of_direction(getattr(self.evidence, direction), self.evidence.rule)

    def is_about(self, mechanism: Mechanism, target: Target) -> list[str]:
        evidence = self.evidence
        if evidence.budget != target.budget or evidence.target != target.digest(mechanism):
            return ["it is about another mechanism, epsilon, delta, budget or composition"]
        return []

    def recheck(self, mechanism: Mechanism, target: Target) -> list[str]:
        found = self.is_about(mechanism, target)
        if found:
            return found
        if self.evidence.remove.key and self.evidence.remove.key == self.evidence.add.key:
            return ["both directions have the same key: their draws are of two streams"]
        for direction in DIRECTIONS:
            certificate = self.of(direction)
            stated = certificate.seen.direction
            if stated != direction:
                found.append(f"the {direction} evidence is of direction {stated!r}")
            else:
                found += certificate.recheck(mechanism, target)
        return found

    def fields(self) -> dict[str, Any]:
        return {"analytic_accountant": None, "analytic_delta": None, "evidence": self.evidence}

    def to_json(self) -> dict[str, Any]:
        return self.fields() | {"evidence": dataclasses.asdict(self.evidence)}

    def lines(self, target: Target) -> list[str]:
        return self._spent() + [line for direction in DIRECTIONS for line in self.of(direction).lines(target)]

    def verdicts(self, target: Target) -> list[str]:
        return self._spent() + [
            line for direction in DIRECTIONS for line in self.of(direction).verdicts(target)
        ]

    def _spent(self) -> list[str]:
        evidence, budget = self.evidence, self.evidence.budget
        return [
            f"budget                delta_v {budget.delta_v:.6g} + failure probability "
            f"{budget.failure_probability:.3g} = {budget.delta:.6g} ({evidence.rule} rule, "
            f"{evidence.seconds:.1f} s)"
        ]

    def how(self, target: Target) -> str:
        delta = exact(target.delta)
        return (
            f"by {self.evidence.num_samples:,} Monte Carlo samples; the {delta} "
            f"includes the verifier's failure probability {self.evidence.budget.failure_probability:.3g}"
        )

    def checked(self) -> list[str]:
        return [
            "computed again: scale, errors, rounding margin, threshold, the verdict from the stored counts, "
            "batch sizes",
            "only drawing shows: that the counts are those of the stored key (`jaxacct verify --replay`) and "
            "that neither key, rule nor bets were chosen afterwards (`jaxacct verify`)",
            "as written, without bearing on the guarantee: predicted samples, times, device, versions",
        ]

    def spends(self) -> list[tuple[str, float]]:
        budget = self.evidence.budget
        spent = budget.failure_probability * (1 - budget.delta_v)
        return [("delta_v, the divergence verified", budget.delta_v), ("wrong acceptance", spent)]

    def profile(self, mechanism: Mechanism, target: Target, epsilons: np.ndarray) -> np.ndarray:
        """Of both directions where both were drawn: binned losses rounded pessimistically."""
        seen = (self.evidence.remove, self.evidence.add)
        remove, add = (_profile(side, mechanism, target, epsilons) for side in seen)
        # Draws whose weights are not known leave the larger direction open.
        return np.where(np.isnan(remove) & (seen[0].num_samples > 0), np.nan, np.fmax(remove, add))


def _profile(
    seen: DirectionEvidence, mechanism: Mechanism, target: Target, epsilons: np.ndarray
) -> np.ndarray:
    """The curve of one direction; NaN where its draws have no weights that losses alone determine.

    Those of replicas where columns overlap have one more factor (`proposals.overlaps`).
    """
    of_losses = seen.proposal == f"{seen.replicas} replicas" and not mechanism.is_upper_bound
    weights_known = seen.proposal == "plain" or of_losses
    if not seen.num_samples or not weights_known:
        return np.full(epsilons.shape, np.nan)
    losses = hockey_stick.loss_bounds(seen.direction)
    counts = dense_counts(seen.loss_counts, losses.size)
    losses, counts = losses[counts > 0], counts[counts > 0]
    # M = Z s e^{(1-m) target} gives Z back, s = (1/(m-1)) ((m-1)/m)^m or what is composed has in its place;
    # the weight of a draw is Z e^{(1-m) L}.
    m, log_weights = seen.replicas, np.zeros(losses.size)
    if seen.direction == Direction.REMOVE and m > 1:
        composed = target.composition
        largest = m * np.log((m - 1) / m) - np.log(m - 1) if composed is None else composed.log_largest(m - 1)
        log_normalizer = np.log(seen.scale) - largest + (m - 1) * target.epsilon
        # Weights fall with L, so a binned loss weighs as its bin's lower edge: pessimistic again.
        log_weights = log_normalizer + (1 - m) * (losses - hockey_stick.LOSS_BIN_WIDTH)
    weights = np.exp(log_weights) * counts / seen.num_samples
    sign = Direction(seen.direction).sign
    return np.array([float(np.sum(weights * hockey_stick.hockey_stick(e - sign * losses))) for e in epsilons])


CERTIFICATES: dict[str, type[Certificate]] = {
    kind.kind: kind for kind in (MeanTest, Line, AnalyticBound, BothDirections)
}


def of_plan(
    evidence: Evidence | None, analytic_accountant: str | None, analytic_delta: float | None
) -> PlanCertificate:
    """The certificate that the fields of a plan hold: what was drawn, or a bound.

    Raises:
      ValueError: where they hold both.
    """
    if evidence is None:
        return AnalyticBound(analytic_accountant, analytic_delta)
    if (analytic_accountant, analytic_delta) != (None, None):
        raise ValueError("it has both drawn evidence and an analytic bound")
    return BothDirections(evidence)
