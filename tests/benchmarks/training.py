"""What a private step costs, as ratios in one run; sampler steps a second. By bands: `steps.py`.

PYTHONPATH=. python tests/benchmarks/training.py [steps] [kinds] [clippings] [costs] [groups] [samplers]
"""

import itertools
import sys
import time

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from flax import nnx

from jaxacct import BandedToeplitz, BMinSep, CalibrationOptions, Mechanism, Plan, Poisson, calibrate
from tests.train.fitting import fit
from train.__main__ import accuracy
from train.batches.data import load
from train.batches.sampler import Sampler
from train.clipping.per_example import clipped_gradient_sum
from train.models.lora import add_lora
from train.models.networks import SmallCNN, Transformer, cross_entropy, next_token
from train.noise import normals
from train.optimizers import OPTIMIZERS, privatize
from train.procedures.step import CLIPPINGS, make_step, nnx_loss

BATCH, MICRO, REPEATS = 256, 64, 15


def poisson_plan(rows: int, batch_size: int, steps: int, epsilon: float, delta: float) -> Plan:
    """A plan of DP-SGD on Poisson batches."""
    scheme = Poisson.from_batch_size(dataset_size=rows, batch_size=batch_size, iterations=steps)
    white = BandedToeplitz.identity()
    return calibrate(
        scheme,
        white,
        epsilon=epsilon,
        delta=delta,
        dataset_size=rows,
        options=CalibrationOptions(accountant="pld"),
    )


def seconds(run) -> float:
    """Median of a few calls after one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def steps() -> None:
    split = load("digits")
    model = SmallCNN(split.train.shape, split.num_classes, nnx.Rngs(0))
    loss, params = nnx_loss(model, cross_entropy)
    rows, mask = split.train.take(np.arange(BATCH), BATCH), np.ones(BATCH, bool)
    optimizer = optax.sgd(0.1, momentum=0.95)
    mechanism = Mechanism(BMinSep(10_000, 16, 0.01), BandedToeplitz.square_root(16), 1.0)
    noisy = privatize(mechanism, clip_norm=1.0, expected_batch_size=BATCH)
    private = make_step(loss, noisy, optimizer, microbatch_size=MICRO)
    held = {"state": private.init(jax.tree.map(jnp.copy, params))}

    def private_step():
        held["state"], info = private(held["state"], rows, mask)
        return info

    @jax.jit
    def plain(params, state, rows):
        gradient = jax.grad(lambda p: jax.vmap(loss, (None, 0))(p, rows).mean())(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    ours = jax.jit(
        lambda p, r, m: clipped_gradient_sum(
            loss, p, r, m, grid=noisy.grid, microbatch_size=MICRO
        ).total.scaled(1.0)
    )
    peer = jax.jit(
        jax_privacy.clipped_grad(loss, l2_clip_norm=1.0, keep_batch_dim=False, microbatch_size=MICRO)
    )
    taken = {
        "step without privacy": seconds(lambda: plain(params, state, rows)),
        "private step (16 bands)": seconds(private_step),
        "clipped gradient sum": seconds(lambda: ours(params, rows, mask)),
        "jax-privacy clipped_grad": seconds(lambda: peer(params, rows)),
    }
    a, b = ours(params, rows, mask), peer(params, rows)
    worst = max(float(jnp.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))
    print(f"batch {BATCH}, microbatch {MICRO}, small CNN on digits; largest difference of sums {worst:.1e}")
    for name, value in taken.items():
        print(f"| {name} | {1e3 * value:.1f} ms | {value / taken['step without privacy']:.2f} |")
    print(f"ours / jax-privacy: {taken['clipped gradient sum'] / taken['jax-privacy clipped_grad']:.2f}")


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


# Model, loss, what is trained, rows, padded to, real.
KINDS = {
    "perceptron": (lambda: Perceptron(nnx.Rngs(0)), cross_entropy, nnx.Param, _images(784), 64, 40),
    "CNN on 8 x 8": (
        lambda: SmallCNN((8, 8, 1), 10, nnx.Rngs(0)),
        cross_entropy,
        nnx.Param,
        _images(8, 8, 1),
        137,
        72,
    ),
    "transformer": (_transformer, next_token, nnx.Param, _text, 64, 40),
    "its adapters of rank 4": (lambda: _transformer(4), next_token, nnx.LoRAParam, _text, 64, 40),
    "transformer of 10M": (lambda: _transformer(None, 512, 3), next_token, nnx.Param, _text, 4, 4),
    "its adapters of rank 8": (lambda: _transformer(8, 512, 3), next_token, nnx.LoRAParam, _text, 4, 4),
}


def cpu_seconds(run) -> float:
    """Least of some calls after one that compiles, on all cores together: other jobs count for little."""
    jax.block_until_ready(run())
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        jax.block_until_ready(run())
        times.append(time.process_time() - started)
    return min(times)


def kinds() -> None:
    """Private against plain steps: the whole padded batch at once, as was, and as it is by default."""
    mechanism = Mechanism(Poisson(100_000, 0.01), BandedToeplitz.square_root(1), 1.0)
    for name, (make, of_one, wrt, rows_of, size, real) in KINDS.items():
        loss, params = nnx_loss(make(), of_one, wrt)
        rows, mask = rows_of(size), np.arange(size) < real
        noisy = privatize(mechanism, clip_norm=1.0, expected_batch_size=real)
        few = jax.tree.map(lambda leaf, real=real: leaf[:real], rows)

        @jax.jit
        def plain(params, loss, rows):
            gradient = jax.grad(lambda p: jax.vmap(loss, (None, 0))(p, rows).mean())(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

        taken = [cpu_seconds(lambda p=params, f=loss, r=few, plain=plain: plain(p, f, r))]
        memory = []
        for options in (dict(microbatch_size=size), dict(skip_padding=True)):
            step = make_step(loss, noisy, optax.sgd(0.1), **options)
            held = {"state": step.init(jax.tree.map(jnp.copy, params))}
            program = step.trace(held["state"], rows, mask).lower().compile()
            memory.append(program.memory_analysis().temp_size_in_bytes / 1e6)

            def one(held=held, program=program, rows=rows, mask=mask, loss=loss):
                held["state"], info = program(held["state"], rows, mask, loss)
                return info

            taken.append(cpu_seconds(one))
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        milliseconds = [f"{1e3 * seconds:.1f} ms" for seconds in taken]
        print(
            f"| {name}, {count:,} trained, {real} of {size} | {milliseconds[0]} | {milliseconds[1]}, "
            f"{memory[0]:.0f} MB | {milliseconds[2]}, {memory[1]:.0f} MB | {taken[2] / taken[0]:.1f} |",
            flush=True,
        )


def clippings() -> None:
    """Clipped sums of a batch of real rows against the mean gradient without privacy; then whole steps."""
    mechanism = Mechanism(Poisson(100_000, 0.01), BandedToeplitz.square_root(1), 1.0)
    for name, (make, of_one, wrt, rows_of, _, _) in KINDS.items():
        loss, params = nnx_loss(make(), of_one, wrt)
        rows, mask = rows_of(64), np.ones(64, bool)
        noisy = privatize(mechanism, clip_norm=1.0, expected_batch_size=64)
        runs = {"plain": jax.jit(lambda p, f, r: jax.grad(lambda p: jax.vmap(f, (None, 0))(p, r).mean())(p))}
        for clipping, sum_of in CLIPPINGS.items():
            runs[clipping] = jax.jit(
                lambda p, f, r, sum_of=sum_of, noisy=noisy, mask=mask: sum_of(f, p, r, mask, grid=noisy.grid)
            )
        for micro in (None, 8):

            def peer(p, f, r, micro=micro):
                return jax_privacy.clipped_grad(
                    f, l2_clip_norm=1.0, keep_batch_dim=False, microbatch_size=micro
                )(p, r)

            runs[f"jax-privacy, microbatch {micro}"] = jax.jit(peer)
        for clipping in CLIPPINGS:
            step = make_step(loss, noisy, optax.sgd(0.1), clipping=clipping)
            held = {"state": step.init(jax.tree.map(jnp.copy, params))}

            def one(p, f, r, held=held, step=step, mask=mask):
                held["state"], info = step(held["state"], r, mask)
                return info

            runs[f"step, {clipping}"] = one
        taken = {
            kind: 1e3 * cpu_seconds(lambda run=run, p=params, f=loss, r=rows: run(p, f, r))
            for kind, run in runs.items()
        }
        shown = (f"{value:.1f} ({value / taken['plain']:.1f})" for value in list(taken.values())[1:])
        print(f"| {name} | {taken['plain']:.1f} | {' | '.join(shown)} |", flush=True)


def costs() -> None:
    """What `clipping="ghost"` costs, parts by turns: lower quartiles of CPU time, all threads together."""
    mechanism = Mechanism(Poisson(100_000, 0.01), BandedToeplitz.square_root(1), 1.0)
    mask = jnp.ones(64, bool)
    for name, (make, of_one, wrt, rows_of, _, _) in KINDS.items():
        loss, params = nnx_loss(make(), of_one, wrt)
        rows, size = (
            jax.tree.map(jnp.asarray, rows_of(64)),
            sum(leaf.size for leaf in jax.tree.leaves(params)),
        )
        noisy = privatize(mechanism, clip_norm=1.0, expected_batch_size=64)

        @jax.jit
        def plain(params, loss, rows):
            gradient = jax.grad(lambda p: jax.vmap(loss, (None, 0))(p, rows).mean())(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

        ghost = jax.jit(
            lambda p, f, r, noisy=noisy: CLIPPINGS["ghost"](f, p, r, mask, grid=noisy.grid).total,
        )
        step = make_step(loss, noisy, optax.sgd(0.1), clipping="ghost")
        state = step.init(jax.tree.map(jnp.copy, params))

        def steps(step=step, held=[state], rows=rows):  # noqa: B006
            for _ in range(4):
                held[0], info = step(held[0], rows, mask)
            if (coming := step._ahead._coming) is not None:
                jax.block_until_ready(coming.made.result().made)  # or it would count for what is run next
            return info

        runs = {
            "plain": (lambda plain=plain, p=params, f=loss, r=rows: plain(p, f, r), 1),
            "ghost sum": (lambda ghost=ghost, p=params, f=loss, r=rows: ghost(p, f, r), 1),
            "key stream": (
                lambda n=size, noisy=noisy: normals.words_on_the_host(noisy.key, 3, [(n,)]),
                1,
            ),
            "in a program": (lambda n=size, key=noisy.key: normals.standard_normals(key, 3, n), 1),
            "step": (steps, 4),
        }
        taken = {kind: [] for kind in runs}
        for turn in range(41):
            for kind, (run, calls) in runs.items():
                started = time.process_time()
                jax.block_until_ready(run())
                if turn:
                    taken[kind].append(1e3 * (time.process_time() - started) / calls)
        quartile = {kind: float(np.quantile(times, 0.25)) for kind, times in taken.items()}
        shown = (f"{value:.1f} ({value / quartile['plain']:.1f})" for value in list(quartile.values())[1:])
        print(f"| {name}, {size:,} | {quartile['plain']:.1f} | {' | '.join(shown)} |", flush=True)


class Bright(SmallCNN):
    """Of pixels as digits have them, 0 to 16: gradients of the first layer are the longest by far."""

    def __call__(self, x):
        return super().__call__(16 * x)


def groups() -> None:
    """Digits with one clip norm and with one a layer, same plan: the best learning rate of each, 3 seeds."""
    split = load("digits")
    rows, steps = split.train, 200
    plan = poisson_plan(len(rows), 72, steps, 4.0, 1e-5)
    for kind, by in itertools.product((SmallCNN, Bright), (None, "layer")):
        found = {}
        for rate in (0.0625, 0.125, 0.25):
            accuracies = []
            for seed in range(3):
                model = kind(rows.shape, split.num_classes, nnx.Rngs(seed))
                options = dict(clip_groups=by, verify=False, progress=False, clipping="ghost")
                trained = fit(plan, model, cross_entropy, rows, OPTIMIZERS["sgd"](rate, steps), **options)
                accuracies.append(accuracy(model, split.test)(trained.params)["accuracy"])
            found[rate] = accuracies
        rate, best = max(found.items(), key=lambda item: np.mean(item[1]))
        means = ", ".join(f"{np.mean(each):.3f}" for each in found.values())
        spread = f"{np.mean(best):.3f} ({min(best):.3f} to {max(best):.3f})"
        print(f"| {kind.__name__} | {by} | {rate:g} | {spread} | {means} |", flush=True)


def samplers() -> None:
    sizes = dict(dataset_size=14_745_600, batch_size=1793, iterations=7200)
    for scheme in (BMinSep.from_batch_size(**sizes, min_separation=256), Poisson.from_batch_size(**sizes)):
        started = time.perf_counter()
        sampler = Sampler(scheme, 14_745_600, 2300)
        ready = time.perf_counter() - started
        started, count = time.perf_counter(), 1000
        for _ in range(count):
            sampler.next()
        rate = count / (time.perf_counter() - started)
        print(f"| {scheme.name}, 14,745,600 examples | {rate:,.0f} batches/s | set-up {ready:.2f} s |")


PARTS = {part.__name__: part for part in (steps, kinds, clippings, costs, samplers, groups)}

if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
