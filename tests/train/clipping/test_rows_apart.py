"""Which traced programs keep rows apart: attacks, the layers of real models, and every primitive let through.

The first two only trace. The last runs every primitive on batches of which one row is absurd.
"""

import functools

import flax.linen
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import buffer_callback, custom_partitioning, io_callback
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from train.clipping.rows_apart import why_not

pytestmark = pytest.mark.usefixtures("default_promotion")  # programs as users write them

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)
ONE = jax.ShapeDtypeStruct((), jnp.float32)
OTHER = jax.random.key(0, impl="rbg")


def doubled(x):
    return jax.pure_callback(lambda x: 2 * x, ONE, x)


def of_words(x):
    return x + jax.lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (3,))[1].sum().astype(x.dtype)


@jax.custom_batching.custom_vmap
def by_rule(x):
    return 2 * x


by_rule.def_vmap(lambda size, batched, x: (x + x.mean(), True))


def by_own_rule(name: str):
    """A primitive that gives every row the mean of the batch."""
    mixing = Primitive(name)
    mixing.def_impl(lambda x: x)
    mixing.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[mixing] = lambda args, dims: (args[0].mean() + 0 * args[0], dims[0])
    mlir.register_lowering(mixing, mlir.lower_fun(lambda x: x, multiple_results=False))
    return mixing.bind


@custom_partitioning.custom_partitioning
def partitioned(x):
    return 2 * x


partitioned.def_partition(
    partition=lambda mesh, args, result: None,
    infer_sharding_from_operands=lambda *_: None,
    sharding_rule="->",
)


def test_what_may_receive_a_whole_batch_is_named():
    for mixes, name in [
        (doubled, "pure_callback"),
        (lambda x: io_callback(lambda x: 2 * x, ONE, x), "io_callback"),
        (lambda x: buffer_callback.buffer_callback(lambda *_: None, ONE)(x), "buffer_callback"),
        (of_words, "rng_bit_generator"),
        (lambda x: jax.lax.rng_uniform(x, 1.0, (3,)), "rng_uniform"),
        (lambda x: jax.ffi.ffi_call("of_somebody", ONE)(x), "ffi_call"),
        (by_rule, "custom_vmap_call"),
        (partitioned, "custom_partitioning"),
        (by_own_rule("mixing"), "mixing"),
        (by_own_rule("add"), "add"),  # the name of one of JAX's
        (by_own_rule("scan"), "scan"),
        (lambda x: jax.vmap(lambda y: lax.psum(y, "rows"), axis_name="rows")(x[None])[0], None),
        # Not the first part of a program alone, and parts of parts.
        (lambda x: jax.lax.cond(x > 0, lambda: x, lambda: doubled(x)), "pure_callback"),
        (lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jax.jit(doubled)(y), x), "pure_callback"),
        (lambda x: lax.while_loop(lambda y: doubled(y) < 3, lambda y: y + 1, x), "pure_callback"),
        (jax.checkpoint(doubled), "pure_callback"),
        (lambda x: lax.reduce(x[None], 0.0, lambda a, b: a + b + doubled(b), (0,)), "pure_callback"),
        (lambda x: x[None].at[0].apply(doubled), "pure_callback"),
        (lambda x: lax.custom_linear_solve(lambda v: v, x, lambda _, b: doubled(b), symmetric=True), "pure_"),
    ]:
        found = why_not(jax.make_jaxpr(mixes)(jnp.float32(1)).jaxpr)
        assert (found is None) if name is None else (name in found and "\n" not in found)


def test_a_collective_is_refused():
    """What reads the other rows of an axis that a vmap around the whole step has named."""

    def of_row(x):
        found.append(why_not(jax.make_jaxpr(lambda x: lax.psum(x, "rows"))(x).jaxpr))
        return x

    found = []
    jax.eval_shape(jax.vmap(of_row, axis_name="rows"), jnp.ones(2))
    assert found[0].startswith("psum")


def test_keys_that_come_from_outside_are_seen():
    """Nothing in the program makes the key; it only draws with it."""
    with_key = jax.make_jaxpr(lambda key: jax.random.bits(key))
    assert "key<rbg>" in why_not(with_key(OTHER).jaxpr)
    assert why_not(with_key(jax.random.key(0, impl="threefry2x32")).jaxpr) is None


class Convolutions(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(1, 4, (3, 3), strides=2, rngs=rngs)
        self.second = nnx.Conv(4, 4, (3, 3), feature_group_count=4, rngs=rngs)
        self.back = nnx.ConvTranspose(4, 4, (2, 2), strides=(2, 2), rngs=rngs)
        self.norm, self.scale = nnx.GroupNorm(4, num_groups=2, rngs=rngs), nnx.RMSNorm(4, rngs=rngs)
        self.batch = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.dense = nnx.LoRALinear(4, 3, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.batch(self.norm(self.second(self.first(x[..., None])))))
        x = nnx.avg_pool(nnx.max_pool(self.back(x), (2, 2), (1, 1)), (2, 2), (2, 2))
        return self.dense(self.scale(x).mean((0, 1)))


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(10, 4, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.norm, self.drop = nnx.LayerNorm(4, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Einsum("td,dk->tk", (4, 5), (5,), rngs=rngs)

    @nnx.remat
    def __call__(self, x):
        x = self.embed(x[0].astype(jnp.int32))
        x = x + self.attend(self.norm(x), mask=nnx.make_causal_mask(jnp.ones(4)))
        return self.out(self.drop(nnx.gelu(x)))


def of_nnx(make):
    """(loss, what it reads): shapes, as nothing is computed."""
    graph, params, rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)

    def loss(params, rest, x):
        return nnx.merge(graph, params, rest, copy=True)(x).sum()

    return loss, params, rest


def in_linen(*layers):
    module, keys = flax.linen.Sequential(layers), {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.eval_shape(module.init, keys, X)

    def loss(params, rest, x):
        return sum(map(jnp.sum, jax.tree.leaves(module.apply({"params": params, **rest}, x, rngs=keys))))

    return loss, variables.pop("params"), variables


def of_matrix(function):
    return lambda w, _, x: jnp.sum(function(w * x + jnp.eye(4))), X, ()


L = flax.linen
WITH_KEY = functools.partial(jax.random.key, impl="threefry2x32")
MODELS = {
    "nnx CNN, group, RMS and frozen batch norm, pooling, LoRA": lambda: of_nnx(Convolutions),
    "nnx transformer, rematerialised": lambda: of_nnx(Attention),
    "nnx LSTM": lambda: of_nnx(lambda rngs: nnx.RNN(nnx.LSTMCell(4, 3, rngs=rngs))),
    "linen CNN": lambda: in_linen(
        lambda x: x[..., None],
        L.Conv(3, (2, 2), padding="CIRCULAR"),
        L.ConvTranspose(4, (2, 2)),
        L.BatchNorm(use_running_average=True),
        lambda x: L.max_pool(L.swish(x), (2, 2)),
        L.InstanceNorm(),
    ),
    "linen attention, dropout": lambda: in_linen(
        L.MultiHeadDotProductAttention(2),
        L.Dropout(0.5, deterministic=False),
        L.LayerNorm(),
        L.DenseGeneral((2, 2)),
    ),
    "linen GRU by scan": lambda: in_linen(L.RNN(L.GRUCell(3))),
    "linen remat, embedding": lambda: in_linen(
        lambda x: x.astype(jnp.int32), L.Embed(5, 3), L.remat(L.Dense)(4), L.WeightNorm(L.Dense(3))
    ),
    "losses of optax": lambda: of_matrix(
        lambda x: (
            optax.softmax_cross_entropy_with_integer_labels(x, x[0].astype(int) % 4)
            + optax.softmax_cross_entropy(x, x)
            + optax.sigmoid_binary_cross_entropy(x, x).sum(1)
            + optax.huber_loss(x, 0 * x).sum(1)
            + optax.ctc_loss(x[None], 0 * x[:1], jnp.ones((1, 2), int), jnp.zeros((1, 2)))
            + optax.cosine_similarity(x, x + 1)
            + optax.log_cosh(x).sum(1)
            + optax.losses.kl_divergence(x, x)
        )
    ),
    "functions of jax.nn": lambda: of_matrix(
        lambda x: (
            sum(
                getattr(jax.nn, name)(x)
                for name in "celu elu gelu hard_tanh leaky_relu log_sigmoid log_softmax mish relu relu6 selu "
                "sigmoid silu soft_sign softmax softplus sparse_plus squareplus standardize tanh".split()
            )
            + jax.nn.logsumexp(x)
            + jax.nn.one_hot(x[0].astype(int), 4)
            + jax.nn.dot_product_attention(*3 * [x[None, :, None]], is_causal=True)[0, :, 0]
            + jax.nn.glu(x).sum()
        )
    ),
    "spectra": lambda: of_matrix(
        lambda x: jnp.abs(jnp.fft.rfft2(x)).sum() + jnp.fft.ifft(jnp.fft.fftshift(x)).real.sum()
    ),
    "orders and places": lambda: of_matrix(
        lambda x: (
            jnp.sort(x)
            + jnp.median(x)
            + jnp.quantile(x, 0.3)
            + x[jnp.argsort(x[0])]
            + jnp.take_along_axis(x, jnp.argmax(x, 1)[:, None], 1)
            + x.at[x[0].astype(int)].add(x).at[0].set(1).at[1].max(x[2]).at[2].multiply(2).at[3].min(0)
            + jnp.searchsorted(x[0], x)
            + jnp.interp(x, jnp.arange(4.0), x[1])
            + lax.top_k(x, 2)[0].sum()
            + jnp.roll(x, 1)
            + jnp.where(x > 0, x, 0)
            + jax.ops.segment_sum(x, jnp.arange(4), 4)
            + jnp.cumsum(x)[-1]
            + jnp.cumprod(x)[-1]
            + jax.image.resize(x, (4, 4), "bicubic")
            + jnp.convolve(x[0], x[1], "same")
            + jnp.einsum("ij,kj,k->ik", x, x, x[0])
            + lax.associative_scan(jnp.add, x)
            + lax.map(jnp.sin, x)
        )
    ),
    "linear algebra": lambda: of_matrix(
        lambda x: (
            jnp.linalg.cholesky(x @ x.T + jnp.eye(4))
            + jnp.linalg.qr(x)[0]
            + jnp.linalg.svd(x, full_matrices=False)[1]
            + jnp.linalg.eigh(x + x.T)[1]
            + jnp.linalg.solve(x, x)
            + jnp.linalg.inv(x)
            + jnp.linalg.slogdet(x)[1]
            + jax.scipy.linalg.solve_triangular(x, x)
            + jax.scipy.linalg.expm(x)
            + jnp.linalg.norm(x, 2)
            + jax.scipy.sparse.linalg.cg(x @ x.T, x[0])[0]
        )
    ),
    "random numbers of the example's own key": lambda: of_matrix(
        lambda x: (
            x
            + jax.random.normal(WITH_KEY(3), (4, 4))
            + jax.random.gamma(jax.random.fold_in(WITH_KEY(3), 2), x)
            + jax.random.permutation(jax.random.split(WITH_KEY(1))[0], x)
            + jax.random.categorical(WITH_KEY(0), x)
            + jax.random.bernoulli(WITH_KEY(0), 0.1, (4, 4)) * jax.random.truncated_normal(WITH_KEY(0), -x, x)
            + jax.random.randint(WITH_KEY(5), (4,), 0, 3)
            + jax.random.orthogonal(WITH_KEY(6), 4)
        )
    ),
    "special functions, derivatives of one's own": lambda: of_matrix(
        lambda x: (
            jax.scipy.special.gammaln(x)
            + jax.scipy.special.i0(x)
            + jax.scipy.special.erfinv(x)
            + jax.custom_gradient(lambda x: (x, lambda g: 2 * g))(x)
            + jax.checkpoint(lambda x: jnp.sin(x) * x)(x)
            + lax.stop_gradient(x)
        )
    ),
}


def test_what_models_are_made_of_passes():
    """The gradients' programs; nothing is compiled."""
    for name in MODELS:
        loss, params, rest = MODELS[name]()
        assert why_not(jax.make_jaxpr(jax.grad(loss))(params, rest, X).jaxpr) is None
