"""Replicas with a composed mechanism (remove direction; proofs/composition.md).

With g the privacy profile of the composed mechanism, the divergence of the two together is `E_target[g(t)]`,
t as in `proposals.base`. g never vanishes, so against the weight `Z_m f^{1-m}` of m replicas it has no bound;
but without its tail phi it has,

    w g(t) <= phi w + Z_m e^{(1-m) epsilon} sup_t e^{(m-1) t} (g(t) - phi)_+ ,

and `E_R[phi w] = phi` is a budget item. The supremum is of the table of g, exactly.
"""

import dataclasses
import functools
import math

from jaxacct.proposals.base import Proposal, ProposalSpec, SamplesNeeded, Setting
from jaxacct.proposals.families.replicas import around_the_smallest_scale, replica_proposal


def build(setting: Setting, m: int) -> Proposal:
    """Return m replicas with terms `w (g(t) - phi)_+`; ValueError also where no end can be left out."""
    composed = setting.composed
    if composed is None or composed.left_out == math.inf:
        raise ValueError("compose_with must have a profile with an end that is small enough to be left out")
    alone = replica_proposal(setting.mechanism, m, setting.epsilon)
    largest = composed.log_max(m - 1)

    def scale_at(other: float) -> float:
        return alone.log_normalizer + (1 - m) * other + largest

    return dataclasses.replace(
        alone,
        spec=ProposalSpec("composed-replicas", (m,)),
        log_scale=scale_at(setting.epsilon),
        scale_at=scale_at,
        profile=composed.above_floor,
        left_out=composed.left_out + composed.exchanged(setting.epsilon, setting.mechanism.scheme),
        # Terms are positive where t = epsilon - L is below the end.
        lowest=max(0.0, composed.end),
    )


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return those worth considering; none where the profile has no end small enough to be left out."""
    if setting.composed is None or setting.composed.left_out == math.inf:
        return []
    return around_the_smallest_scale(setting.mechanism, 2, functools.partial(build, setting), samples_needed)
