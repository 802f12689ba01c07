"""Contributions of the examples that are no canaries, computable by an adversary.

The guarantee for one example is against an adversary who has all others, when they participated and every
released parameter: their clipped gradients are no noise that hides a canary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..clipping.per_example import default_microbatch_size
from ..models.loss import numbered


class Bystanders:
    """Sums of the clipped gradients of some examples at each step, (steps, coordinates) float64 in `sums`.

    Computed separately from the clipping and the sums of a run: in an honest run they differ by rounding.

    Args:
      setting: a `train.audit.canaries.Setting`.
      known: (dataset_size,) bool, the examples.
      coordinates: of the flattened parameters.
    """

    def __init__(self, setting, known: np.ndarray, coordinates: np.ndarray):
        self.sums = np.zeros((setting.plan.mechanism.scheme.iterations, len(coordinates)))
        self._loss, self._rows, self._known = setting.loss, numbered(setting.loss, setting.rows), known
        asked = setting.options.microbatch_size or default_microbatch_size(setting.params)
        self._size = min(setting.plan.max_batch_size, asked)
        self._drawn = np.zeros(0, np.int64)
        self._before: tuple[int, Any] | None = None
        clip_norm, normalize = setting.clip_norm, setting.options.normalize

        def total(loss, params, rows, real, step):
            def one(example, real):
                value, gradient = jax.value_and_grad(loss.at(step))(params, example)
                flat = jnp.concatenate([g.reshape(-1).astype(jnp.float32) for g in jax.tree.leaves(gradient)])
                norm = jnp.linalg.norm(flat)
                scale = clip_norm / (norm + 0.01) if normalize else jnp.minimum(1.0, clip_norm / norm)
                counts = real & jnp.isfinite(value) & jnp.isfinite(norm)
                return jnp.where(counts, scale * flat[coordinates], 0.0)

            return jax.vmap(one)(rows, real).sum(axis=0)

        self._total = jax.jit(total)

    def draw(self, indices: np.ndarray) -> None:
        """Record that a batch is read; the step before it was taken or is about to be."""
        self.settle()
        self._drawn = indices[self._known[indices]]

    def step(self, step: int, params: Any) -> None:
        """Record that the last batch is used at these parameters; called back by the program."""
        # Copied: the arrays of a callback may be memory that the program uses again.
        self._before = step, jax.tree.map(lambda leaf: np.array(leaf, copy=True), params)

    def settle(self) -> None:
        """Add the sum of the last batch, once its step has been taken."""
        jax.effects_barrier()
        if self._before is None:
            return
        (step, params), self._before = self._before, None
        for start in range(0, len(self._drawn), self._size):
            some = self._drawn[start : start + self._size]
            rows = self._rows.take(some, self._size)
            real = np.arange(self._size) < len(some)
            self.sums[step] += np.asarray(self._total(self._loss, params, rows, real, np.int32(step)))
