"""Joint replicas (remove direction): m >= 3 attracting vectors of b-min-sep sampling, drawn together.

`Q f^m / Z_m`, f = P/Q, is a mixture: x_1 .. x_m with probability proportional to `prod p(x_i) e^{sum over
i < j of X_ij}`, X_ij = <C x_i, C x_j> / sigma^2, then `y ~ N(C (x_1 + .. + x_m), sigma^2 I)`. A draw has the
weight `Z_m f^{1-m}`, and a weighted term is at most `Z_m (1/(m-1)) ((m-1)/m)^m e^{(1-m) epsilon}`
(proofs/proposals.md, section 2.2). Where participation is rare and noise small, Z_m is far below what pairs
of a tournament (`proposals.families.replicas`) have, which attract each other m - 1 times as much.
"""

import functools
import itertools
import math

import jax.numpy as jnp

from jaxacct.mechanisms.mechanism import ZERO_OUT
from jaxacct.proposals.base import Draws, Proposal, ProposalSpec, SamplesNeeded, Setting, draw_block_at
from jaxacct.proposals.families.replicas import in_order, log_scale
from jaxacct.schemes.replicas import joint
from jaxacct.statistics.hockey_stick import Direction

ORDERS = range(3, 9)


def build(setting: Setting, m: int) -> Proposal | None:
    """Return the proposal of m vectors; None without tables, or where Z_m overflows."""
    mechanism = setting.mechanism
    if setting.composed is not None or mechanism.pair_adjacency != ZERO_OUT or mechanism.is_upper_bound:
        return None
    if not joint.fits(mechanism, m):
        return None
    log_z = joint.log_normalizer(mechanism, m)
    relative, variation = joint.errors(mechanism, m)
    if not math.isfinite(log_z + relative):
        return None
    return Proposal(
        spec=ProposalSpec("joint-replicas", (m,)),
        direction=Direction.REMOVE,
        mechanism=mechanism,
        log_scale=log_scale(log_z, m, setting.epsilon),
        draw_block=_draw_block,
        tables=lambda: dict(log_z=jnp.float32(log_z), m=jnp.float32(m), arrays=joint.tables(mechanism, m)),
        relative_error=relative,
        total_variation=variation,
        replicas=m,
        left_out=0.0,
        lowest=0.0,
        profile=None,
        scale_at=functools.partial(log_scale, log_z, m),
        log_normalizer=log_z,
        log_weight_at=lambda losses: log_z + (1 - m) * losses,
        cost=max(1.0, m / 4),
    )


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return proposals by m, as far as there are tables; see `proposals.families.replicas.in_order`."""
    proposals = itertools.takewhile(
        lambda each: each is not None, map(functools.partial(build, setting), ORDERS)
    )
    return in_order(proposals, samples_needed)


def _draw_block(key, scheme, strategy, sigma, tables, dtype) -> Draws:
    def draw_counts(counts_key, size):
        return joint.draw_counts(counts_key, scheme, tables["arrays"], size)

    loss = draw_block_at(key, scheme, strategy, sigma, dtype, draw_counts=draw_counts)
    return Draws(loss, tables["log_z"] + (1 - tables["m"]) * loss)
