"""Models for images, without batch norm: what one example does must not pass through the others."""

import itertools

import jax
import jax.numpy as jnp
from flax import nnx


class SmallCNN(nnx.Module):
    """Two convolutions of 16 and 32 channels with tanh, each pooled by 2, and a linear layer.

    tanh rather than ReLU: bounded activations keep gradient norms, and so the clipping bias, small
    (Papernot et al. 2021).
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int, rngs: nnx.Rngs):
        height, width, channels = shape
        self.first = nnx.Conv(channels, 16, (3, 3), rngs=rngs)
        self.second = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.last = nnx.Linear(32 * (height // 4) * (width // 4), num_classes, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """(..., height, width, channels) to logits (..., classes)."""
        x = nnx.avg_pool(jnp.tanh(self.first(inputs)), (2, 2), (2, 2))
        x = nnx.avg_pool(jnp.tanh(self.second(x)), (2, 2), (2, 2))
        return self.last(x.reshape(*x.shape[:-3], -1))


class VGG(nnx.Module):
    """The VGG of DP-FTRL's CIFAR-10 experiments (Kairouz et al. 2021), which arXiv 2602.09338, 7.2, calls
    standard.

    Convolutions of 32, 32, 64, 64, 128, 128 channels with ReLU, pooled by 2 after every second, a dense layer
    of 128 and a linear one: 0.55 million parameters at 32 x 32 x 3. The seed gives no widths.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int, rngs: nnx.Rngs):
        height, width, channels = shape
        widths = (channels, 32, 32, 64, 64, 128, 128)
        self.convolutions = nnx.List(
            [nnx.Conv(a, b, (3, 3), rngs=rngs) for a, b in itertools.pairwise(widths)]
        )
        self.dense = nnx.Linear(128 * (height // 8) * (width // 8), 128, rngs=rngs)
        self.last = nnx.Linear(128, num_classes, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """(..., height, width, channels) to logits (..., classes)."""
        x = inputs
        for index, convolution in enumerate(self.convolutions):
            x = nnx.relu(convolution(x))
            if index % 2:
                x = nnx.max_pool(x, (2, 2), (2, 2))
        x = nnx.relu(self.dense(x.reshape(*x.shape[:-3], -1)))
        return self.last(x)


MODELS = {"cnn": SmallCNN, "vgg": VGG}


def cross_entropy(model, example) -> jax.Array:
    """Loss of one example `{"inputs", "labels"}`."""
    logits = model(example["inputs"])
    return -jax.nn.log_softmax(logits)[example["labels"]]
