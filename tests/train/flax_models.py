"""Small models as users of Flax write them, linen and nnx, each with its loss, rows and options.

For `train.fit`, for clipped sums against a loop over examples, and for times of steps. Linen modules are
pytrees of parameters. Options are those of `TrainOptions`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax import lax

from train.models.loss import as_loss, nnx_loss

CLASSES, TOKENS, LENGTH, WIDTH = 10, 64, 16, 32
ROWS = 48
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Example(NamedTuple):
    """A model with what it is trained by."""

    model: Any
    loss: Callable[..., Any]
    rows: dict[str, np.ndarray]
    options: dict[str, Any] = {}  # noqa: RUF012

    def functional(self):
        """Return (loss of parameters and example, parameters); a key of the loss is 0 for all examples."""
        loss = self.loss
        if "loss_key" in self.options:
            loss = functools.partial(_with_key, self.loss)
        if isinstance(self.model, nnx.Module):
            return nnx_loss(self.model, loss, self.options.get("wrt"))
        return as_loss(loss), self.model


def _with_key(loss, params, example):
    return loss(params, example, jax.random.fold_in(jax.random.key(0), example["number"]))


MODELS: dict[str, Callable[[], Example]] = {}


def model(make):
    """Register a function that makes an example."""
    MODELS[make.__name__] = make
    return make


def _labels(generator, number):
    y = generator.integers(0, CLASSES, number).astype(np.int32)
    return {"y": y, "number": np.arange(number, dtype=np.int32)}


def images(size=12, channels=1, number=ROWS):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(number, size, size, channels)).astype(np.float32)
    return {"x": x} | _labels(generator, number)


def texts(length=LENGTH, tokens=TOKENS, number=ROWS):
    generator = np.random.default_rng(0)
    x = generator.integers(0, tokens, (number, length)).astype(np.int32)
    return {"x": x} | _labels(generator, number)


def _initial(module, rows, **collections):
    keys = {name: jax.random.key(at) for at, name in enumerate(("params", *collections))}
    return module.init(keys, jnp.asarray(rows["x"][:1]))["params"]


def classifier(module, rows) -> Example:
    """Return a linen module of images or texts with a loss of its class."""

    def loss(params, example):
        return cross_entropy(module.apply({"params": params}, example["x"][None])[0], example["y"])

    return Example(_initial(module, rows), loss, rows)


def next_token(module, rows) -> Example:
    """Return a linen module of texts with the mean loss of the next token."""

    def loss(params, example):
        logits = module.apply({"params": params}, example["x"][None, :-1])[0]
        return cross_entropy(logits, example["x"][1:]).mean()

    return Example(_initial(module, rows), loss, rows)


def compact(function):
    """Return a linen module whose call is this function of the module and its inputs."""

    class Net(linen.Module):
        __call__ = linen.compact(function)

    return Net()


def linen_model(rows, example_of=classifier):
    """Register what a linen module computes of its inputs, with its rows and its loss."""

    def registered(function):
        MODELS[function.__name__] = lambda: example_of(compact(function), rows())
        return function

    return registered


def nnx_loss_of(model, example):
    return cross_entropy(model(example["x"][None])[0], example["y"])


def _pool(x):
    return linen.avg_pool(x, (2, 2), (2, 2))


@linen_model(images)
def linen_cnn(self, x):
    for width in (8, 16):
        x = _pool(linen.relu(linen.Conv(width, (3, 3))(x)))
    x = linen.relu(linen.Dense(64)(x.reshape(len(x), -1)))
    return linen.Dense(CLASSES)(x)


@model
def nnx_cnn():
    class Net(nnx.Module):
        def __init__(self, rngs):
            sizes = (1, 8), (8, 16)
            self.convolutions = nnx.List([nnx.Conv(a, b, (3, 3), rngs=rngs) for a, b in sizes])
            self.hidden = nnx.Linear(144, 64, rngs=rngs)
            self.out = nnx.Linear(64, CLASSES, rngs=rngs)

        def __call__(self, x):
            for convolution in self.convolutions:
                x = _pool(nnx.relu(convolution(x)))
            return self.out(nnx.relu(self.hidden(x.reshape(len(x), -1))))

    return Example(Net(nnx.Rngs(0)), nnx_loss_of, images())


@linen_model(lambda: images(16, 3))
def linen_pooled_cnn(self, x):
    for width, stride in ((16, 1), (32, 2), (32, 2)):
        x = linen.relu(linen.Conv(width, (3, 3), (stride, stride))(x))
    return linen.Dense(CLASSES)(x.mean((1, 2)))


class Standardized(linen.Module):
    """Convolution with a standardized kernel."""

    features: int
    stride: int = 1
    window: int = 3

    @linen.compact
    def __call__(self, x):
        shape = (self.window, self.window, x.shape[-1], self.features)
        kernel = self.param("kernel", linen.initializers.he_normal(), shape)
        spread = kernel.var((0, 1, 2)) * kernel[..., 0].size
        kernel = (kernel - kernel.mean((0, 1, 2))) * lax.rsqrt(spread + 1e-4)
        strides, layouts = (self.stride, self.stride), ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=layouts)


class Residual(linen.Module):
    """Two convolutions, each after a norm, beside what they are given."""

    features: int
    stride: int = 1
    convolution: Any = Standardized

    @linen.compact
    def __call__(self, x):
        y = linen.relu(linen.GroupNorm(4)(x))
        same = x.shape[-1] == self.features and self.stride == 1
        x = x if same else self.convolution(self.features, self.stride, 1)(y)
        y = self.convolution(self.features, self.stride)(y)
        return x + self.convolution(self.features)(linen.relu(linen.GroupNorm(4)(y)))


def wide_resnet(blocks=1, widths=(8, 16, 32), size=16, number=ROWS, convolution=Standardized):
    def net(self, x):
        x = convolution(widths[0])(x)
        for stage, width in enumerate(widths):
            for block in range(blocks):
                x = Residual(width, 2 if stage and not block else 1, convolution)(x)
        return linen.Dense(CLASSES)(linen.relu(linen.GroupNorm(4)(x)).mean((1, 2)))

    return classifier(compact(net), images(size, 3, number))


MODELS["linen_wide_resnet"] = wide_resnet


@model
def linen_resnet_group_norm():
    def convolution(features, stride=1, window=3):
        return linen.Conv(features, (window, window), (stride, stride), use_bias=False)

    return wide_resnet(widths=(8, 16), convolution=convolution)


@linen_model(images)
def linen_weight_norm(self, x):
    x = linen.relu(linen.WeightNorm(linen.Conv(64, (3, 3)))(x))
    return linen.Dense(CLASSES)(x.mean((1, 2)))


@model
def linen_unet():
    def up(x, beside):
        x = linen.ConvTranspose(beside.shape[-1], (2, 2), (2, 2))(x)
        return linen.relu(linen.Conv(x.shape[-1], (3, 3))(jnp.concatenate([beside, x], -1)))

    def net(self, x):
        one = linen.relu(linen.Conv(8, (3, 3))(x))
        two = linen.relu(linen.Conv(16, (3, 3), (2, 2))(one))
        three = linen.relu(linen.Conv(32, (3, 3), (2, 2))(two))
        return linen.Conv(1, (1, 1))(up(up(three, two), one))

    rows, module = images(16), compact(net)

    def loss(params, example):
        return jnp.mean((module.apply({"params": params}, example["x"][None])[0] - example["x"]) ** 2)

    return Example(_initial(module, rows), loss, rows)


@model
def linen_vae():
    def net(self, x, key):
        hidden = linen.relu(linen.Dense(64)(x))
        mean, spread = linen.Dense(8)(hidden), linen.Dense(8)(hidden)
        code = mean + jnp.exp(0.5 * spread) * jax.random.normal(key, mean.shape)
        return linen.Dense(x.shape[-1])(linen.relu(linen.Dense(64)(code))), mean, spread

    module, rows = compact(net), images()
    rows["x"] = (rows["x"] > 0).astype(np.float32).reshape(len(rows["x"]), -1)
    params = module.init(jax.random.key(0), rows["x"][:1], jax.random.key(1))["params"]

    def loss(params, example, key):
        shown, mean, spread = module.apply({"params": params}, example["x"][None], key)
        likelihood = optax.sigmoid_binary_cross_entropy(shown, example["x"][None]).mean()
        return likelihood - 0.5 * (1 + spread - mean**2 - jnp.exp(spread)).mean()

    return Example(params, loss, rows, dict(loss_key=7))


@linen_model(texts)
def linen_bidirectional_lstm(self, x):
    x = linen.Embed(TOKENS, WIDTH)(x)
    one = linen.RNN(linen.OptimizedLSTMCell(WIDTH))(x)
    two = linen.RNN(linen.OptimizedLSTMCell(WIDTH), reverse=True, keep_order=True)(x)
    return linen.Dense(CLASSES)(jnp.concatenate([one, two], -1).mean(1))


@linen_model(texts, next_token)
def linen_gru(self, x):
    x = linen.RNN(linen.GRUCell(WIDTH))(linen.Embed(TOKENS, WIDTH)(x))
    return linen.Dense(TOKENS)(x)


@model
def nnx_lstm():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embedding = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
            self.recurrent = nnx.RNN(nnx.LSTMCell(WIDTH, WIDTH, rngs=rngs))
            self.out = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

        def __call__(self, x):
            zeros = jnp.zeros((len(x), WIDTH))
            return self.out(self.recurrent(self.embedding(x), initial_carry=(zeros, zeros))[:, -1])

    return Example(Net(nnx.Rngs(0)), nnx_loss_of, texts())


class Block(linen.Module):
    """Layer of a transformer; `carried` makes it the body of a scan."""

    dtype: Any = jnp.float32
    carried: bool = False

    @linen.compact
    def __call__(self, x, _=None):
        width, dtype = x.shape[-1], self.dtype
        y = linen.LayerNorm(dtype=dtype)(x)
        mask = linen.make_causal_mask(x[..., 0])
        x = x + linen.MultiHeadDotProductAttention(num_heads=2, dtype=dtype)(y, mask=mask)
        y = linen.gelu(linen.Dense(4 * width, dtype=dtype)(linen.LayerNorm(dtype=dtype)(x)))
        x = x + linen.Dense(width, dtype=dtype)(y)
        return (x, None) if self.carried else x


def language_model(block=Block, *, scanned=False, tied=False, dtype=jnp.float32, **sizes):
    """Of these numbers of layers and tokens, this width and length, with so many rows."""
    default = dict(layers=2, tokens=TOKENS, width=WIDTH, length=LENGTH, number=ROWS)
    layers, tokens, width, length, number = (default | sizes).values()

    def net(self, x):
        embed = linen.Embed(tokens, width, dtype=dtype)
        positions = self.param("positions", linen.initializers.normal(0.02), (length, width), dtype)
        x = embed(x) + positions[: x.shape[1]]
        if scanned:
            whole = linen.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=layers)
            x, _ = whole(dtype=dtype, carried=True)(x, None)
        else:
            for _ in range(layers):
                x = block(dtype=dtype)(x)
        x = linen.LayerNorm(dtype=dtype)(x)
        logits = embed.attend(x) if tied else linen.Dense(tokens, dtype=dtype)(x)
        return logits.astype(jnp.float32)

    return next_token(compact(net), texts(length, tokens, number))


MODELS |= {
    "linen_lm_tied": lambda: language_model(tied=True),
    "linen_lm": language_model,
    "linen_lm_bfloat16": lambda: language_model(dtype=jnp.bfloat16),
    "linen_lm_remat": lambda: language_model(linen.remat(Block)),
    "linen_lm_scan": lambda: language_model(scanned=True),
    "linen_lm_scan_of_remat": lambda: language_model(linen.remat(Block, prevent_cse=False), scanned=True),
}


def vision_transformer(remat=False, layers=2):
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
            self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.1)

        def __call__(self, x, key):
            x = x + self.attention(self.norms[0](x), deterministic=True)
            y = self.down(nnx.gelu(self.up(self.norms[1](x))))
            return x + self.dropout(y, rngs=nnx.Rngs(key), deterministic=False)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.patches = nnx.Conv(1, WIDTH, (4, 4), strides=4, padding="VALID", rngs=rngs)
            self.positions = nnx.Param(jnp.zeros((9, WIDTH)))
            self.layers = nnx.List([Layer(rngs) for _ in range(layers)])
            self.out = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

        def __call__(self, x, key):
            x = self.patches(x).reshape(len(x), 9, WIDTH) + self.positions[...]
            for at, layer in enumerate(self.layers):
                run = nnx.remat(Layer.__call__) if remat else Layer.__call__
                x = run(layer, x, jax.random.fold_in(key, at))
            return self.out(x.mean(1))

    def loss(model, example, key):
        return cross_entropy(model(example["x"][None], key)[0], example["y"])

    return Example(Net(nnx.Rngs(0)), loss, images(), dict(loss_key=3))


MODELS |= {"nnx_vit_dropout": vision_transformer, "nnx_vit_remat": lambda: vision_transformer(remat=True)}


@model
def linen_dropout():
    def net(self, x):
        x = linen.relu(linen.Dense(64)(x.reshape(len(x), -1)))
        return linen.Dense(CLASSES)(linen.Dropout(0.2, deterministic=False)(x))

    module, rows = compact(net), images()

    def loss(params, example, key):
        logits = module.apply({"params": params}, example["x"][None], rngs={"dropout": key})
        return cross_entropy(logits[0], example["y"])

    return Example(_initial(module, rows, dropout=True), loss, rows, dict(loss_key=3))


@model
def linen_graph_network():
    def net(self, nodes, edges, real):
        x = linen.Dense(WIDTH)(nodes)
        for _ in range(2):
            sent = linen.relu(linen.Dense(WIDTH)(jnp.concatenate([x[edges[:, 0]], x[edges[:, 1]]], -1)))
            received = jax.ops.segment_sum(sent * real[:, None], edges[:, 1], len(nodes))
            x = x + linen.Dense(WIDTH)(received)
        return linen.Dense(CLASSES)(x.mean(0))

    generator = np.random.default_rng(0)
    rows = {
        "nodes": generator.normal(size=(ROWS, 12, 8)).astype(np.float32),
        "edges": generator.integers(0, 12, (ROWS, 20, 2)).astype(np.int32),
        "real": (generator.random((ROWS, 20)) < 0.8).astype(np.float32),
    } | _labels(generator, ROWS)
    module, names = compact(net), ("nodes", "edges", "real")
    params = module.init(jax.random.key(0), *(rows[name][0] for name in names))["params"]

    def loss(params, example):
        logits = module.apply({"params": params}, *(example[name] for name in names))
        return cross_entropy(logits, example["y"])

    return Example(params, loss, rows)


@linen_model(texts)
def linen_mixture_of_experts(self, x):
    x = linen.Embed(TOKENS, WIDTH)(x)[0]
    expert = jnp.argmax(linen.Dense(4)(x), -1)
    order = jnp.argsort(expert)
    kernels = self.param("experts", linen.initializers.normal(0.1), (4, WIDTH, WIDTH))
    y = lax.ragged_dot(x[order], kernels, jnp.bincount(expert, length=4))
    return linen.Dense(CLASSES)((x + y[jnp.argsort(order)]).mean(0))[None]


@model
def nnx_lora():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.LoRALinear(144, 64, lora_rank=4, rngs=rngs)
            self.out = nnx.LoRALinear(64, CLASSES, lora_rank=4, rngs=rngs)

        def __call__(self, x):
            return self.out(nnx.relu(self.hidden(x.reshape(len(x), -1))))

    net = Net(nnx.Rngs(0))
    generator = np.random.default_rng(1)
    for layer in (net.hidden, net.out):  # initially zero, and gradients of the other factor with it
        factor = layer.lora.lora_b
        factor[...] = jnp.asarray(0.1 * generator.normal(size=factor.shape), jnp.float32)
    return Example(net, nnx_loss_of, images(), dict(wrt=nnx.LoRAParam))


@jax.custom_vjp
def _sign(x):
    return jnp.sign(x)


_sign.defvjp(lambda x: (jnp.sign(x), x), lambda x, cotangent: (jnp.where(jnp.abs(x) < 1, cotangent, 0),))


@linen_model(images)
def linen_custom_rule(self, x):
    return linen.Dense(CLASSES)(_sign(linen.Dense(64)(x.reshape(len(x), -1))))
