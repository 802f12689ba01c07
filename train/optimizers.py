"""optax transformations: the privatizer that goes before any optimizer, and the paper's learning rate."""

import jax
import jax.numpy as jnp
import optax

from jaxacct import Mechanism, _validate
from train import noise


def privatize(
    mechanism: Mechanism, *, clip_norm: float, expected_batch_size: float, key=None
) -> optax.GradientTransformation:
    """Turn sums of clipped gradients into private mean gradients.

        optimizer = optax.chain(privatize(mechanism, clip_norm=1.0, expected_batch_size=64), optax.adam(1e-3))

    The update is `(sum + clip_norm sigma w_t) / expected_batch_size`, `w = C^{-1} z`. What comes after in the
    chain is post-processing. After the mechanism's last step updates are NaN: nothing more is covered.

    Args:
      mechanism: what was accounted for.
      clip_norm: the norm that gradients were clipped to, `train.clipping`.
      expected_batch_size: public; the batch size that was drawn is not.
      key: (2, 2) uint32, from the operating system by default. Only tests should fix it. Every run needs its
        own: two runs with one key can be subtracted from each other.
    """
    _validate.positive_number("clip_norm", clip_norm)
    _validate.positive_number("expected_batch_size", expected_batch_size)
    words = noise.fresh_key() if key is None else key
    deviation = clip_norm * mechanism.noise_multiplier

    def init(params):
        return noise.init(mechanism.strategy, params, words)

    def update(updates, state, params=None):
        drawn, after = noise.draw(mechanism.strategy, state, updates)
        covered = state.step < mechanism.scheme.iterations

        def add(total, w):
            return jnp.where(covered, (total + deviation * w) / expected_batch_size, jnp.nan)

        return jax.tree.map(add, updates, drawn), after

    return optax.GradientTransformation(init, update)


def linear_decay(base: float, steps: int) -> optax.Schedule:
    """From `base` to `base` / 20 over steps n/4 to 3n/4, constant elsewhere (arXiv 2602.09338, 7.2)."""
    return optax.linear_schedule(base, base / 20, max(1, steps // 2), steps // 4)


def sgd(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """SGD with momentum 0.95 and `linear_decay` (arXiv 2602.09338, 7.2)."""
    return optax.sgd(linear_decay(learning_rate, steps), momentum=0.95)


def adam(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Adam with `linear_decay`."""
    return optax.adam(linear_decay(learning_rate, steps))


OPTIMIZERS = {"sgd": sgd, "adam": adam}
