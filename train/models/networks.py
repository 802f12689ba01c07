"""Models for images and text, without batch norm, which would mix examples."""

import jax
import jax.numpy as jnp
from flax import nnx


class SmallCNN(nnx.Module):
    """Two convolutions of 16 and 32 channels with tanh, each pooled by 2, and a linear layer.

    tanh rather than ReLU: bounded activations keep gradient norms, and so the clipping bias, small (Papernot
    et al. 2021).
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int, rngs: nnx.Rngs):
        height, width, channels = shape
        self.first = nnx.Conv(channels, 16, (3, 3), rngs=rngs)
        self.second = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.last = nnx.Linear(32 * (height // 4) * (width // 4), num_classes, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Return (..., height, width, channels) to logits (..., classes)."""
        x = nnx.avg_pool(jnp.tanh(self.first(inputs)), (2, 2), (2, 2))
        x = nnx.avg_pool(jnp.tanh(self.second(x)), (2, 2), (2, 2))
        return self.last(x.reshape(*x.shape[:-3], -1))


def cross_entropy(model, example) -> jax.Array:
    """Return the loss of one example `{"inputs", "labels"}`."""
    logits = model(example["inputs"])
    return -jax.nn.log_softmax(logits)[example["labels"]]


class Transformer(nnx.Module):
    """A causal transformer on characters: learned positions, norms before attention and perceptron.

    The width of the stream is a multiple of the number of heads.
    """

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(vocabulary, width, rngs=rngs)
        self.places = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.last = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return (length,) integers to logits (length, vocabulary) of the token after each."""
        x = self.tokens(tokens) + self.places(jnp.arange(len(tokens)))
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))


class Block(nnx.Module):
    """Causal attention, then a perceptron of four times the width; each added to the stream."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention_in = nnx.Linear(width, 3 * width, rngs=rngs)
        self.attention_out = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.wide = nnx.Linear(width, 4 * width, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return (length, width) to the same."""
        split = self.attention_in(self.attention_norm(x)).reshape(len(x), 3, self.heads, -1)
        query, key, value = split[:, 0], split[:, 1], split[:, 2]
        found = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(found.reshape(x.shape))
        return x + self.narrow(nnx.gelu(self.wide(self.norm(x))))


def next_token(model, tokens) -> jax.Array:
    """Return the mean cross entropy (nats a token) of the tokens after the first of one example."""
    logits = jax.nn.log_softmax(model(tokens[:-1]))
    return -jnp.take_along_axis(logits, tokens[1:, None], axis=-1).mean()
