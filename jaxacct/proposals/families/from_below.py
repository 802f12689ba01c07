"""Bounds from below on a divergence that is drawn from above.

Where the likelihood ratio f of a user with several examples is only known to lie between two bounds,
f_low <= f <= F, terms with one of them bound the divergence from above and with the other from below:

    H(P, Q) = E_P (1 - alpha / f)_+  >=  E_P (1 - alpha / f_low)_+ ,
    H(Q, P) = E_Q (1 - alpha f)_+    >=  E_Q (1 - alpha F)_+ .

A law and its weights serve any function of the outputs, so the law that resolves the one resolves the other,
and its scale, which bounds the exact terms, bounds the smaller ones (proofs/shared_examples.md, theorem 11).
Certificates have no use for it; intervals of estimates have their lower ends from here.
"""

import math

from jaxacct.proposals.base import Proposal
from jaxacct.proposals.families.mean_overlaps import plain_from_below


def from_below(proposal: Proposal) -> Proposal | None:
    """The proposal whose terms have a mean of at most the divergence, of the same law and direction.

    The one given where its losses are exact and what its weights are rounded up by is less than what is
    booked; None where nothing is known from below.
    """
    mechanism = proposal.mechanism
    if proposal.of_a_bound:
        return None
    if proposal.below is not None:
        return proposal.below()
    if not mechanism.is_upper_bound:
        return proposal
    zero = proposal.log_scale == -math.inf
    if mechanism.scheme.parts is not None and proposal.spec.family in _PLAIN and not zero:
        return plain_from_below(mechanism, proposal.direction)
    return None


# Of the target itself, whose scale is not lower than theirs.
_PLAIN = ("plain", "plain-bounded")
