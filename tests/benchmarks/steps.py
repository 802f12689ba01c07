"""Private steps beside plain ones by bands, batch and model; noise beside a pass over its memory.

    python -m tests.benchmarks.steps [noise] [steps] [memory] [loop]

All kinds of a table take turns in one process; a time is the lower quartile of CPU time of all threads (least
wall time in brackets), milliseconds, as other jobs on the machine then count for little.
"""

import functools
import itertools
import math
import multiprocessing
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from flax import nnx
from jax_privacy.matrix_factorization import toeplitz

from jaxacct import BandedInverse, BandedToeplitz, BMinSep, BufferedToeplitz, Mechanism, Poisson
from jaxacct.calibration.calibrate import calibrate
from jaxacct.calibration.options import CalibrationOptions
from jaxacct.core.plan import Plan
from tests.benchmarks.results import recorded
from tests.train.runs import fit
from train.models.lora import add_lora
from train.models.loss import nnx_loss
from train.models.networks import SmallCNN, Transformer, cross_entropy, next_token
from train.noise import recursion
from train.noise.normals import normals_on_host
from train.optimizers import privatize
from train.procedures.step import make_step


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


def _network() -> SmallCNN:
    return SmallCNN((8, 8, 1), 10, nnx.Rngs(0))


def _images(*shape):
    generator = np.random.default_rng(0)
    return lambda n: dict(inputs=np.float32(generator.normal(size=(n, *shape))), labels=np.zeros(n, np.int32))


def _text(n):
    return np.random.default_rng(0).integers(0, 128, (n, 65)).astype(np.int32)


# Model, loss, what is trained, rows.
KINDS = {
    "perceptron": (lambda: Perceptron(nnx.Rngs(0)), cross_entropy, nnx.Param, _images(784)),
    "CNN on 8 x 8": (_network, cross_entropy, nnx.Param, _images(8, 8, 1)),
    "transformer": (_transformer, next_token, nnx.Param, _text),
    "its adapters of rank 4": (lambda: _transformer(4), next_token, nnx.LoRAParam, _text),
    "transformer of 10M": (lambda: _transformer(None, 512, 3), next_token, nnx.Param, _text),
    "its adapters of rank 8": (lambda: _transformer(8, 512, 3), next_token, nnx.LoRAParam, _text),
}

TURNS, KEY = 9, np.arange(8, dtype=np.uint32)
SIZES, STEPS = (100_000, 669_706, 10_000_000, 100_000_000), 100_000
MAX_KEPT = 1.6e9  # numbers of 4 bytes


def strategies_of(steps: int) -> dict:
    """All kinds of noise that are measured, by name."""
    found = {f"{b} band{'s' * (b > 1)}": BandedToeplitz.square_root(b) for b in (1, 2, 4, 16, 64, 256)}
    found["inverse of 16 bands"] = BandedInverse.bisr(iterations=steps, bands=16)
    found["4 buffers"] = BufferedToeplitz((0.99, 0.9, 0.5, 0.2), (0.2, 0.2, 0.1, 0.1), steps)
    return found


NOISES = strategies_of(STEPS)
JOBS = [
    *(("perceptron", 64, bands) for bands in (1, 4, 16, 64, 256)),
    *(("perceptron", size, bands) for size in (256, 1024) for bands in (1, 16)),
    *((name, 64, b) for name in ("CNN on 8 x 8", "transformer", "its adapters of rank 4") for b in (1, 16)),
    *((name, 4, b) for name in ("transformer of 10M", "its adapters of rank 8") for b in (1, 16)),
]  # fmt: skip


def by_turns(runs: dict, calls: int = 1) -> dict:
    """(CPU, wall) milliseconds a call of each."""
    taken = {name: [] for name in runs}
    for turn in range(TURNS + 1):
        for name, run in runs.items():
            begun = time.process_time(), time.perf_counter()
            jax.block_until_ready([run() for _ in range(calls)][-1])
            ended = time.process_time(), time.perf_counter()
            if turn:
                taken[name].append(np.subtract(ended, begun) * 1e3 / calls)
    return {name: (np.quantile(t, 0.25, 0)[0], np.min(t, 0)[1]) for name, t in taken.items()}


def bands_of(number: int) -> Mechanism:
    """Noise multiplier 1, square-root bands."""
    scheme = BMinSep(100_000, number, 0.01) if number > 1 else Poisson(100_000, 0.01)
    return Mechanism(scheme, BandedToeplitz.square_root(number), 1.0)


def noise_of(name: str, size: int) -> list[str] | None:
    """A row of `noise`, of a process of its own; None where memory does not suffice."""
    strategy = NOISES[name]
    copies = max(1, strategy.noise_copies)
    if copies * size > MAX_KEPT:
        return None
    mechanism = Mechanism(BMinSep(STEPS, 256, 0.001), strategy, 1.0)
    levels = privatize(mechanism, clip_norm=1.0, expected_batch_size=64).levels
    held = [recursion.init(strategy, jnp.zeros(size), KEY)]
    kept, weights = np.ones((copies, size), np.float32), np.ones(copies, np.float32)
    out, like = np.empty(size, np.float32), jax.ShapeDtypeStruct((size,), np.float32)
    draw = jax.jit(lambda state: recursion.draw(strategy, levels, state, like), donate_argnums=0)

    def ours():
        drawn, held[0] = draw(held[0])
        return drawn, held[0].recent

    runs = {"ours": ours, "beside": lambda: np.matmul(weights, kept, out=out)}
    found = by_turns(runs, max(1, int(2e7 / (copies * size))))
    ours_ms, other = (found[kind][1] for kind in ("ours", "beside"))
    row = [name, f"{size:,}", copies, f"{ours_ms:.2f}", f"{other:.2f}", f"{ours_ms / other:.2f}"]
    return [*map(str, row), f"{1e6 * ours_ms / size:.1f}"]


def noise():
    """Yield rows of correlated noise of a step: key stream, normals, sum, and what is kept."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the processes of rows
    for size, name in itertools.product(SIZES, NOISES):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            if row := pool.apply(noise_of, (name, size)):
                yield row


def plain_and_private(name: str, size: int, bands: int) -> tuple:
    """Return (loss, parameters, batch, private step, {"plain" and "private": SGD's next step})."""
    make, of_one, wrt, rows_of = KINDS[name]
    loss, params = nnx_loss(make(), of_one, wrt)
    batch, mask = jax.tree.map(jnp.asarray, rows_of(size)), jnp.ones(size, bool)
    private = privatize(bands_of(bands), clip_norm=1.0, expected_batch_size=size)
    step = make_step(loss, private, optax.sgd(0.1), clipping="ghost")

    @functools.partial(jax.jit, donate_argnums=0)
    def plain(params, loss, batch):
        gradient = jax.grad(lambda p: jax.vmap(loss, (None, 0))(p, batch).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    held = {"plain": jax.tree.map(jnp.copy, params), "private": step.init(jax.tree.map(jnp.copy, params))}

    def plainly():
        held["plain"] = plain(held["plain"], loss, batch)
        return held["plain"]

    def privately():
        held["private"], info = step(held["private"], batch, mask)
        return info, held["private"].params

    return loss, params, batch, step, {"plain": plainly, "private": privately}


def steps():
    """Yield rows of SGD with ghost clipping, and jax-privacy's with gradients of 8 examples at a time."""
    for name, size, bands in JOBS:
        loss, params, batch, _, runs = plain_and_private(name, size, bands)
        if size == 64 and bands == 16 and name != "transformer":
            runs["jax-privacy"] = peer(loss, params, batch, bands)
        number = sum(leaf.size for leaf in jax.tree.leaves(params))
        runs["normals"] = functools.partial(normals_on_host, KEY.tobytes(), 0, number)
        found = by_turns(runs, 16 if size > 4 else 1)
        row = [name, size, bands, *(f"{found['plain'][i]:.1f}" for i in (0, 1))]
        for kind in ("private", "jax-privacy"):
            ratios = [found[kind][i] / found["plain"][i] for i in (0, 1)] if kind in found else []
            row.append(f"{found[kind][0]:.1f}: {ratios[0]:.2f} ({ratios[1]:.2f})" if ratios else "")
        yield [*row, f"{found['normals'][0]:.1f}"]


def peer_of(loss, bands: int, size: int, optimizer):
    """(first state of parameters, step) of jax-privacy in the configuration that takes least memory."""
    gradient = jax_privacy.clipped_grad(loss, l2_clip_norm=1.0, keep_batch_dim=False, microbatch_size=size)
    matrix = toeplitz.inverse_as_streaming_matrix(jnp.asarray(BandedToeplitz.square_root(bands).array))
    noisy = jax_privacy.noise_addition.matrix_factorization_privatizer(matrix, stddev=1.0, prng_key=0)

    def step(state, batch):
        params, kept, moments = state
        update, kept = noisy.update(gradient(params, batch), kept)
        update, moments = optimizer.update(update, moments, params)
        return optax.apply_updates(params, update), kept, moments

    return lambda params: (params, noisy.init(params), optimizer.init(params)), step


def peer(loss, params, batch, bands: int, size: int = 8):
    """One step of SGD after another."""
    first, step = peer_of(loss, bands, size, optax.sgd(0.1 / 64))
    held, step = [first(params)], jax.jit(step)

    def run():
        held[0] = step(held[0], batch)
        return held[0]

    return run


def clock(first: int, steps: int):
    """Return (function of a step's number and result, function that returns (CPU, wall) ms a later step)."""
    begun = {}

    def at(number: int, seen) -> None:
        if number == first:
            jax.block_until_ready(seen)
            begun["at"] = time.process_time(), time.perf_counter()

    def taken() -> np.ndarray:
        now = time.process_time(), time.perf_counter()
        return 1e3 * np.subtract(now, begun["at"]) / (steps - first)

    return at, taken


def fit_times(plan, model, loss, data, optimizer, first: int, **options) -> np.ndarray:
    """Return (CPU, wall) ms a step of `fit` with ghost clipping after the first steps.

    The loop waits for a step where it would store it, and calls back at once.
    """
    at, taken = clock(first, plan.mechanism.scheme.iterations)
    options |= dict(clipping="ghost", verify=False, progress=False, callback=at, checkpoint_every=first)
    fit(plan, model, loss, data, optimizer, **options)
    return taken()


def fits(runs: int):
    """Yield a row for each run: `fit` in memory, a bare loop over `make_step`, ms a step after 50 steps."""
    make, of_one, wrt, rows_of = KINDS["perceptron"]
    data, steps, first = rows_of(5000), 550, 50
    plan = poisson_plan(5000, 64, steps, 4.0, 1e-5)
    padded = plan.max_batch_size
    loss, params = nnx_loss(make(), of_one, wrt)
    private = privatize(plan.mechanism, clip_norm=1.0, expected_batch_size=64)
    step = make_step(loss, private, optax.sgd(0.1), clipping="ghost", skip_padding=True)
    batch, mask = jax.tree.map(lambda leaf: jnp.asarray(leaf[:padded]), data), jnp.arange(padded) < 64
    at, taken = clock(first, steps)
    for _ in range(runs):
        fitted = fit_times(plan, make(), of_one, data, optax.sgd(0.1), first, wrt=wrt)
        state = step.init(jax.tree.map(jnp.copy, params))
        for number in range(steps):
            state, _ = step(state, batch, mask)
            at(number, state.params)
        jax.block_until_ready(state.params)
        bare = taken()
        yield [f"{each[0]:.2f} ({each[1]:.2f})" for each in (fitted, bare, fitted / bare)]


def memory_of(name: str) -> list[str]:
    """A row of `memory`, of a process of its own."""
    shape, batch = (10_000, 10_000), {"x": jnp.ones((4, 10_000)), "y": jnp.ones((4, 10_000))}

    def resident(field: str) -> float:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return 1024 * float(next(line.split()[1] for line in lines if line.startswith(field)))

    mechanism = Mechanism(BMinSep(1000, 16, 0.01), strategies_of(1000)[name], 1.0)
    private = privatize(mechanism, clip_norm=1.0, expected_batch_size=4)
    step = make_step(lambda p, e: jnp.sum(jnp.tanh(e["x"] @ p) * e["y"]), private, optax.sgd(0.1))
    before, state = resident("VmRSS"), step.init(jnp.zeros(shape))
    kept, size = sum(leaf.nbytes for leaf in jax.tree.leaves(state)), 4 * math.prod(shape)
    for _ in range(4):
        state, _ = step(state, batch, jnp.ones(4, bool))
    jax.block_until_ready(state.params)
    return [name, f"{kept / size:.0f}", f"{(resident('VmHWM') - before - kept) / size:.1f}"]


def memory():
    """Yield rows of the peak resident memory of steps of one dense layer, beyond their state."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        yield from pool.map(memory_of, ("1 band", "16 bands", *list(NOISES)[-2:]), chunksize=1)


# Part -> (name of its record, rows, question, order, columns, note).
PARTS = {
    "noise": (
        "noise", noise, "Correlated noise beside one pass over its memory", 64,
        ["noise", "parameters", "copies kept", "ours, ms", "a pass, ms", "ratio", "ns a parameter"],
        "Least wall time of a step's noise: key stream, normals, sum over what is kept, and storing. A pass: "
        "NumPy's product of a vector and a float32 matrix of as many bytes as what is kept, on one core: it "
        "reads them and writes one vector. One band keeps nothing; a pass reads one vector there. Buffers "
        "write all that they keep, too.",
    ),
    "steps": (
        "steps", steps, "Private steps by bands, batch and model, over plain ones", 65,
        ["model", "batch", "bands", "plain, CPU ms", "wall ms", "private", "jax-privacy", "normals"],
        "Private: CPU ms: over plain, CPU (wall). jax-privacy 2.0.0: clipped_grad by 8 examples and its own "
        "streamed noise of as many bands, float32. Normals: CPU ms of a step's normals alone, most of "
        "what a private step adds to a plain one of few examples.",
    ),
    "memory": (
        "step_memory", memory, "Memory of a private step beyond its state, in copies of the parameters", 66,
        ["noise", "state, copies", "beyond it at the peak, copies"],
        "One dense layer of 100 million parameters, batch 4, SGD, ghost clipping; resident memory, with that "
        "of compiling the step (0.1 GB is a quarter of a copy).",
    ),
    "loop": (
        "fit", lambda: fits(7), "`fit` beside a bare loop over `make_step`", 67,
        ["fit, ms a step", "bare loop", "ratio"],
        "Perceptron, mean batch 64, one band: CPU (wall), steps 50 to 550; seven runs. `fit` draws batches "
        "and reads their rows; the bare loop is given the same 64 rows, padded as `fit` pads.",
    ),
}  # fmt: skip

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        name, rows_of, question, order, columns, note = PARTS[part]
        recorded(name, rows=rows_of(), question=question, order=order, columns=columns, note=note)
