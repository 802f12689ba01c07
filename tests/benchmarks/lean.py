"""Training for comparisons of accuracy: batches, matrix and noise multiplier of a plan, in one program.

A run of 500 steps takes seconds where `train.fit` takes a minute: sums of float32 in place of whole numbers,
NumPy's normals in place of secret ones, no checkpoints. So nothing that it trains may be released; that both
reach the same accuracy is measured by `real_data --by-fit`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from scipy import signal

from jaxacct import Mechanism
from train.batches.sampler import Sampler


class Setting(NamedTuple):
    """What a trial chooses.

    Attributes:
      rate: learning rate times the sum of the weights that momentum gives to a gradient; falls to 0 linearly.
      momentum: of SGD.
      clip: clip norm.
    """

    rate: float
    momentum: float
    clip: float


def patches(x, size: int, stride: int):
    """Return (positions, size^2 channels) of (height, width, channels), and the number of rows, columns."""
    rows, columns = ((n - size) // stride + 1 for n in x.shape[:2])
    parts = [
        x[i : i + stride * (rows - 1) + 1 : stride, j : j + stride * (columns - 1) + 1 : stride]
        for i in range(size)
        for j in range(size)
    ]
    return jnp.stack(parts, -2).reshape(rows * columns, -1), rows, columns


def pooled(x):
    """Return means of squares of 2 x 2 positions of (height, width, channels)."""
    height, width, channels = x.shape
    return x.reshape(height // 2, 2, width // 2, 2, channels).mean((1, 3))


def layer(rng, inputs: int, outputs: int) -> dict:
    """Return normal weights of variance 1 / inputs, and biases of 0."""
    weights = rng.normal(size=(inputs, outputs)) / inputs**0.5
    return {"w": jnp.asarray(weights, jnp.float32), "b": jnp.zeros(outputs, jnp.float32)}


def dense(layer: dict, x):
    """Return `x W + b`."""
    return x @ layer["w"] + layer["b"]


def slopes(logits, y):
    """Return the slopes of cross entropy by logits."""
    return jax.nn.softmax(logits) - jax.nn.one_hot(y, logits.shape[1])


class Linear:
    """Softmax regression on pixels: 7,850 parameters.

    `factors`, of models whose gradients are outer products, returns layer -> (what goes in, (b, in); slopes
    of the loss by what comes out, (b, out)).
    """

    pixels = 784

    @classmethod
    def init(cls, seed: int) -> dict:
        del seed
        return {"last": {"w": jnp.zeros((cls.pixels, 10)), "b": jnp.zeros(10)}}

    @staticmethod
    def logits(params, x):
        return dense(params["last"], x.reshape(-1))

    @staticmethod
    def factors(params, x, y) -> dict:
        x = x.reshape(len(x), -1)
        return {"last": (x, slopes(dense(params["last"], x), y))}


@dataclasses.dataclass(frozen=True)
class CNN:
    """Two convolutions with tanh, pooled by 2 before each, and a linear layer.

    Attributes:
      channels: of the convolutions.
    """

    channels: tuple[int, int]

    def init(self, seed: int) -> dict:
        rng, (one, two) = np.random.default_rng(seed), self.channels
        return {
            "first": layer(rng, 9, one),
            "second": layer(rng, 9 * one, two),
            "last": layer(rng, 16 * two, 10),
        }

    @staticmethod
    def logits(params, x):
        found, height, width = patches(pooled(x), 3, 1)
        x = pooled(jnp.tanh(dense(params["first"], found)).reshape(height, width, -1))
        x = jnp.tanh(dense(params["second"], patches(x, 3, 1)[0]))
        return dense(params["last"], x.reshape(-1))


class Perceptron:
    """One hidden layer of 64 tanh: 50,890 parameters, 13 times those of the CNN."""

    pixels = 784

    @classmethod
    def init(cls, seed: int) -> dict:
        rng = np.random.default_rng(seed)
        return {"first": layer(rng, cls.pixels, 64), "last": layer(rng, 64, 10)}

    @staticmethod
    def logits(params, x):
        return dense(params["last"], jnp.tanh(dense(params["first"], x.reshape(-1))))

    @staticmethod
    def factors(params, x, y) -> dict:
        x = x.reshape(len(x), -1)
        hidden = jnp.tanh(dense(params["first"], x))
        last = slopes(dense(params["last"], hidden), y)
        return {"first": (x, (last @ params["last"]["w"].T) * (1 - hidden**2)), "last": (hidden, last)}


MODELS: dict[str, Any] = {
    "linear": Linear,
    "cnn": CNN((8, 16)),  # 3,818 parameters
    "wide-cnn": CNN((32, 80)),  # 36,250
    "perceptron": Perceptron,
}


def loss(model, params, example) -> jax.Array:
    """Return the cross entropy of one example `{"inputs", "labels"}`."""
    logits = model.logits(params, example["inputs"])
    return -jax.nn.log_softmax(logits)[example["labels"]]


def _example_gradients(model, params, x, y):
    """Return gradients with a leading axis of examples."""
    return jax.vmap(jax.grad(functools.partial(loss, model)), (None, 0))(params, {"inputs": x, "labels": y})


def gradient_norms(model, params, x, y) -> jax.Array:
    """Return (b,) norms of the gradients of examples."""
    if hasattr(model, "factors"):
        parts = model.factors(params, x, y).items()
        squares = [((x**2).sum(1) + ("b" in params[name])) * (d**2).sum(1) for name, (x, d) in parts]
        return jnp.sqrt(sum(squares))
    leaves = jax.tree.leaves(_example_gradients(model, params, x, y))
    return jnp.sqrt(sum(jnp.square(leaf.reshape(len(x), -1)).sum(1) for leaf in leaves))


def clipped_sum(model, params, x, y, mask, clip):
    """Return the sum of clipped gradients of the real rows."""
    if hasattr(model, "factors"):
        scale = mask * jnp.minimum(1.0, clip / gradient_norms(model, params, x, y))
        parts = model.factors(params, x, y).items()
        sums = {
            name: {"w": x.T @ (d * scale[:, None]), "b": (d * scale[:, None]).sum(0)}
            for name, (x, d) in parts
        }
        return {name: {key: sums[name][key] for key in layer} for name, layer in params.items()}
    grads = _example_gradients(model, params, x, y)
    square = sum(jnp.square(leaf.reshape(len(x), -1)).sum(1) for leaf in jax.tree.leaves(grads))
    scale = mask * jnp.minimum(1.0, clip / jnp.sqrt(square))
    return jax.tree.map(lambda leaf: jnp.tensordot(scale, leaf, 1), grads)


@functools.partial(jax.jit, static_argnums=0)
def _descend(model, params, inputs, labels, indices, mask, noise, setting, batch):
    """Return the parameters of several runs, whose arrays have a leading axis, after all steps."""

    def one(params, indices, mask, noise, setting):
        flat, unravel = jax.flatten_util.ravel_pytree(params)
        steps = len(noise)

        def step(carry, given):
            flat, velocity = carry
            rows, real, drawn, done = given
            total = clipped_sum(model, unravel(flat), inputs[rows], labels[rows], real, setting.clip)
            gradient = (jax.flatten_util.ravel_pytree(total)[0] + setting.clip * drawn) / batch
            velocity = setting.momentum * velocity + gradient
            rate = setting.rate * (1 - setting.momentum) * (1 - done / steps)
            return (flat - rate * velocity, velocity), None

        given = indices, mask, noise, jnp.arange(steps, dtype=jnp.float32)
        return unravel(jax.lax.scan(step, (flat, jnp.zeros_like(flat)), given)[0][0])

    return jax.vmap(one)(params, indices, mask, noise, setting)


@functools.partial(jax.jit, static_argnums=0)
def _right(model, params, inputs, labels):
    return (jax.vmap(model.logits, (None, 0))(params, inputs).argmax(1) == labels).sum()


def accuracy(model, params, data) -> float:
    """Return the share of (inputs, labels) that the model classifies correctly."""
    size = 1000
    parts = [(data[0][i : i + size], data[1][i : i + size]) for i in range(0, len(data[1]), size)]
    return sum(int(_right(model, params, *part)) for part in parts) / len(data[1])


def correlated_noise(mechanism: Mechanism, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return (steps, size) float32: `sigma C^{-1} z`, for a Toeplitz C."""
    steps = mechanism.scheme.iterations
    z = rng.standard_normal((steps, size), dtype=np.float32) * np.float32(mechanism.noise_multiplier)
    column = mechanism.strategy.columns(steps, np.zeros(1, int))[:, 0]
    column = np.trim_zeros(column, "b")
    if len(column) <= 32:
        return signal.lfilter([1.0], column.astype(np.float32), z, axis=0).astype(np.float32)
    inverse = signal.lfilter([1.0], column, np.eye(1, steps)[0]).astype(np.float32)
    return signal.fftconvolve(z, inverse[:, None], axes=0)[:steps]


def train(model, mechanism: Mechanism, batch: float, runs: Sequence[tuple[Setting, int]], data) -> list:
    """Return the parameters of several runs after all steps of the mechanism, computed side by side.

    Args:
      model: of `MODELS`.
      mechanism: draws batches of the data.
      batch: expected batch size.
      runs: (setting of the optimizer, seed of initial parameters, batches and noise).
      data: (inputs, labels), (n, 28, 28, 1) float32 and (n,) integers.
    """
    steps, largest = mechanism.scheme.iterations, int(batch + 5 * batch**0.5 + 5)

    def prepared(seed):
        key = np.random.SeedSequence(seed).generate_state(4)
        source = Sampler(mechanism.scheme, len(data[1]), largest, [int(word) for word in key])
        batches = [source.next() for _ in range(steps)]
        params = model.init(seed)
        flat, _ = jax.flatten_util.ravel_pytree(params)
        noise = correlated_noise(mechanism, flat.size, np.random.default_rng([seed, 1]))
        indices = np.stack([drawn.indices for drawn in batches]).astype(np.int32)
        return params, indices, np.stack([drawn.mask for drawn in batches]).astype(np.float32), noise

    of_seed = {seed: prepared(seed) for seed in sorted({seed for _, seed in runs})}
    params, *arrays = jax.tree.map(lambda *each: np.stack(each), *[of_seed[seed] for _, seed in runs])
    settings = Setting(*np.array([setting for setting, _ in runs], np.float32).T)
    found = _descend(model, params, *data, *arrays, settings, batch)
    return [jax.tree.map(lambda leaf, i=i: leaf[i], found) for i in range(len(runs))]
