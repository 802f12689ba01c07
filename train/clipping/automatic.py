"""`clipping="auto"`: ghost clipping where it applies, gradients of examples elsewhere.

The choice depends on shapes, the grid and the device, never on data. One choice for the whole model is
enough: ghost clipping decides by parameter already, by an estimate of the time (`parts.is_written_down`). A
parameter without a fast path has its gradients written down as per-example clipping has all, and the norm is
that of all parameters together (proofs/released_numbers.md, section 5).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from . import ghost
from .rows_apart import OneAtATimeError

PER_EXAMPLE, GHOST, AUTO = "per_example", "ghost", "auto"
MIN_ENTRIES = 1024
"""Parameters below which gradients of examples cost little beside the rest of a step."""
MIN_SCALE = 0.95
"""Share of the clip norm that must be left: a smaller one is like a larger noise multiplier."""


class Choice(NamedTuple):
    """What clips, and why."""

    clipping: str
    reason: str

    def __str__(self) -> str:
        """Return both as one text, for messages and results."""
        return f"{self.clipping} ({self.reason})"


def choose(loss: Callable[..., Any], params, batch, **options) -> Choice:
    """Return the kind of clipping that `"auto"` stands for; a function of shapes alone.

    Arguments as of `train.clipping.ghost.ghost_gradient_sum`.
    """
    entries = sum(np.size(leaf) for leaf in jax.tree.leaves(params))
    if entries < MIN_ENTRIES:
        return Choice(PER_EXAMPLE, f"{entries} parameters are few")
    if jax.default_backend() not in ghost.BACKENDS:
        return Choice(PER_EXAMPLE, f"ghost clipping is not for {jax.default_backend()}")
    try:
        fast, scale = ghost.suits(loss, params, batch, **options)
    except OneAtATimeError as error:
        return Choice(PER_EXAMPLE, str(error))
    except ghost.TooCoarseError:
        return Choice(PER_EXAMPLE, "ghost clipping would leave less than half of the clip norm")
    if scale < MIN_SCALE:
        return Choice(PER_EXAMPLE, f"ghost clipping would scale gradients to {scale:.2f} clip_norm")
    return Choice(
        GHOST, f"{fast:.1%} of the parameters have a fast path; gradients are scaled to {scale:.4f} clip_norm"
    )
