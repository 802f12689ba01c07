"""The certificate of one direction by a mean of terms that a proposal drew."""

import dataclasses
import math

import numpy as np

from jaxacct.kernels import randomness
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.direction import Direction
from jaxacct.verification.histogram import checked_counts
from jaxacct.verification.of_direction import OfDirection
from jaxacct.verification.run import (
    DirectionEvidence,
    Run,
    count_terms,
    margin_of,
    nothing_to_draw,
    verdict_of,
)
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
        if run.proposal.name == "plain" and not _fit_together(run, seen.margin, terms, losses):
            raise ValueError("the terms are not those that the losses have at this epsilon")
        margin = max(seen.margin, margin_of(run))
        return verdict_of(run, margin, seen.bets, seen.bet_weights, terms, losses, self.key())


def _fit_together(run: Run, margin: float, terms: np.ndarray, losses: np.ndarray) -> bool:
    """Whether plain draws, whose terms are functions of their losses, may have both histograms.

    Each bin of losses has a least and a largest term; as many terms are above any edge as the bins allow. So
    draws that were made for one epsilon are not believed of another.
    """
    sign, number = Direction(run.proposal.direction).sign, losses.size
    lower = (np.arange(number) - number // 2) * hockey_stick.LOSS_BIN_WIDTH
    upper = lower + hockey_stick.LOSS_BIN_WIDTH
    lower[0], upper[-1] = -np.inf, np.inf
    scale = math.exp(run.proposal.weight_error(margin) - run.proposal.log_scale)

    def above_edges(ends, slack):
        values = run.target.profile(run.target.epsilon - margin - sign * ends) * scale * slack
        values, made = np.clip(values, 0.0, 1.0), np.zeros(terms.size, np.int64)
        if np.isnan(values[losses > 0]).any():
            raise ValueError("the losses must have terms that are numbers")
        positive = values > 0
        np.add.at(made, bounds.bins_of(values[positive]), losses[positive])
        made[0] = losses[~positive].sum()
        return np.cumsum(made[::-1])

    # Slack for the last digit of another machine's functions.
    least, most = (lower, upper) if sign > 0 else (upper, lower)
    found = np.cumsum(terms[::-1])
    return bool(
        (above_edges(least, 1 - 1e-9) <= found).all() and (found <= above_edges(most, 1 + 1e-9)).all()
    )
