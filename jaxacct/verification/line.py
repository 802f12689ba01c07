"""The certificate of the add direction by concavity from two common events (`verification.extrapolation`)."""

import dataclasses

from jaxacct.kernels import randomness
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics import bounds
from jaxacct.statistics.direction import Direction
from jaxacct.verification import extrapolation
from jaxacct.verification.extrapolation import Extrapolation, LineEvidence
from jaxacct.verification.histogram import checked_counts
from jaxacct.verification.of_direction import OfDirection
from jaxacct.verification.run import DirectionEvidence, line_evidence
from jaxacct.verification.target import Target


class Line(OfDirection):
    """The line through confidence bounds on two means, of laws shifted towards the event, is low at 0."""

    kind = "line"
    laws = 2

    @property
    def proposal_name(self) -> str:
        return "plain"

    @property
    def stored(self) -> LineEvidence:
        """What both laws saw."""
        assert self.seen.extrapolation is not None
        return self.seen.extrapolation

    @property
    def histograms(self):
        return self.stored.near_counts, self.stored.far_counts

    def with_histograms(self, first, second) -> DirectionEvidence:
        stored = dataclasses.replace(self.stored, near_counts=first, far_counts=second)
        return dataclasses.replace(self.seen, extrapolation=stored)

    def extrapolation(self, mechanism: Mechanism, target: Target) -> Extrapolation:
        """Through the stored distances; ValueError where no verification extrapolates."""
        if self.seen.direction != Direction.ADD or self.rule != "anytime":
            raise ValueError("extrapolation is for the add direction and the anytime rule")
        distances = self.stored.near_distance, self.stored.far_distance
        return extrapolation.at_distances(mechanism, target.epsilon, *distances, target.composition)

    def counter(self, mechanism: Mechanism, target: Target):
        line, key = self.extrapolation(mechanism, target), self.key()
        return lambda first, last: extrapolation.count_terms(line, key, self.stored.margin, first, last)

    def rebuilt(self, mechanism: Mechanism, target: Target) -> DirectionEvidence:
        run, line = self.run(mechanism, target), self.extrapolation(mechanism, target)
        names = zip(("near", "far"), self.histograms, strict=True)
        near, far = (checked_counts(part, len(bounds.TERM_EDGES), f"{name} counts") for name, part in names)
        if near.sum() != far.sum() or near.sum() % randomness.BLOCK_SIZE:
            raise ValueError("the counts of the two laws must be equally many whole blocks")
        margin = max(self.stored.margin, extrapolation.margin_of_line(line))
        q = target.budget.failure_probability
        found = extrapolation.bound_from_counts(line, q, margin, near, far)
        return line_evidence(run, line, found, self.key())
