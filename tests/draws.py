"""Draws of a proposal for tests."""

import numpy as np

from jaxacct.proposals import base


def draws_of(proposal: base.Proposal, key, blocks: int) -> base.Draws:
    """So many blocks, as many at once as estimates and verifications draw: the same programs."""
    parts = base.draw_in_batches(proposal, key, 0, blocks)
    return base.Draws(*(np.concatenate(part) for part in zip(*parts, strict=True)))
