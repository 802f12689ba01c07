"""The certificate of one direction by a mean of terms that a proposal drew."""

import dataclasses

from jaxacct.kernels import randomness
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.verification.histogram import checked_counts
from jaxacct.verification.of_direction import OfDirection
from jaxacct.verification.run import DirectionEvidence, count_terms, margin_of, nothing_to_draw, verdict_of
from jaxacct.verification.target import Target


class MeanTest(OfDirection):
    """The mean of terms is below the threshold, by a test with the budget's failure probability."""

    kind = "mean-test"
    laws = 1

    @property
    def proposal_name(self) -> str:
        return self.seen.proposal

    @property
    def histograms(self):
        return self.seen.term_counts, self.seen.loss_counts

    def with_histograms(self, first, second) -> DirectionEvidence:
        return dataclasses.replace(self.seen, term_counts=first, loss_counts=second)

    def counter(self, mechanism: Mechanism, target: Target):
        run, key = self.run(mechanism, target), self.key()
        return lambda first, last: count_terms(run, key, first, last, self.seen.margin)

    def rebuilt(self, mechanism: Mechanism, target: Target) -> DirectionEvidence:
        run, seen = self.run(mechanism, target), self.seen
        nothing = nothing_to_draw(run)
        if nothing is not None:
            return nothing
        size = len(hockey_stick.loss_bounds(seen.direction))
        terms = checked_counts(seen.term_counts, len(bounds.TERM_EDGES), "term counts")
        losses = checked_counts(seen.loss_counts, size, "loss counts")
        if not terms.sum() or terms.sum() != losses.sum() or terms.sum() % randomness.BLOCK_SIZE:
            raise ValueError("the histograms must hold the same draws, one whole block or more")
        if (self.rule == "anytime") != bool(seen.bets):
            raise ValueError("bets must be given for the anytime rule alone")
        margin = max(seen.margin, margin_of(run))
        return verdict_of(run, margin, seen.bets, seen.bet_weights, terms, losses, self.key())
