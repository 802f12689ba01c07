"""Models whose private steps are measured, and a plan for them."""

import itertools

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxacct import BandedToeplitz, CalibrationOptions, Plan, Poisson, calibrate
from train.models.lora import add_lora
from train.models.networks import SmallCNN, Transformer, cross_entropy, next_token


def poisson_plan(rows: int, batch_size: int, steps: int, epsilon: float, delta: float) -> Plan:
    """A plan of DP-SGD on Poisson batches."""
    scheme = Poisson.from_batch_size(dataset_size=rows, batch_size=batch_size, iterations=steps)
    target = dict(epsilon=epsilon, delta=delta, dataset_size=rows)
    options = CalibrationOptions(accountant="pld")
    return calibrate(scheme, BandedToeplitz.identity(), options=options, **target)


class Perceptron(nnx.Module):
    """Dense layers of 784, 512, 512 and 10."""

    def __init__(self, rngs: nnx.Rngs):
        sizes = itertools.pairwise((784, 512, 512, 10))
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in sizes])

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = jnp.tanh(layer(x))
        return self.layers[-1](x)


def _transformer(rank: int | None = None, width: int = 64, layers: int = 2) -> Transformer:
    model = Transformer(128, 64, width, layers, width // 16, nnx.Rngs(0))
    if rank is not None:
        add_lora(model, rank, nnx.Rngs(1))
    return model


def _images(*shape):
    generator = np.random.default_rng(0)
    return lambda n: {
        "inputs": generator.normal(size=(n, *shape)).astype(np.float32),
        "labels": np.zeros(n, np.int32),
    }


def _text(n):
    return np.random.default_rng(0).integers(0, 128, (n, 65)).astype(np.int32)


# Model, loss, what is trained, rows.
KINDS = {
    "perceptron": (lambda: Perceptron(nnx.Rngs(0)), cross_entropy, nnx.Param, _images(784)),
    "CNN on 8 x 8": (
        lambda: SmallCNN((8, 8, 1), 10, nnx.Rngs(0)),
        cross_entropy,
        nnx.Param,
        _images(8, 8, 1),
    ),
    "transformer": (_transformer, next_token, nnx.Param, _text),
    "its adapters of rank 4": (lambda: _transformer(4), next_token, nnx.LoRAParam, _text),
    "transformer of 10M": (lambda: _transformer(None, 512, 3), next_token, nnx.Param, _text),
    "its adapters of rank 8": (lambda: _transformer(8, 512, 3), next_token, nnx.LoRAParam, _text),
}
