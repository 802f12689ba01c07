"""Draws, noise and private steps on a GPU.

    python -m tests.benchmarks.gpu measure FILE    # on the machine with the GPU
    python -m tests.benchmarks.gpu record FILE     # anywhere, afterwards

Times are the least of three loops of calls that are waited for once. FILE is written after each row, so that
an interrupted measurement is not lost.
"""

import functools
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct import BandedToeplitz, BMinSep, Mechanism, sample_privacy_loss
from jaxacct.kernels.likelihoods import gpu_recurrence
from jaxacct.kernels.table import first_values
from tests.benchmarks import throughput
from tests.benchmarks.results import record
from tests.benchmarks.steps import fits, peer, plain_and_private, strategies_of
from train.noise import recursion

LEVELS, KEY = 2.0**14, np.arange(8, dtype=np.uint32)
SAMPLES, SIZES = 32_768, (669_706, 10_000_000, 100_000_000)
LARGEST = 30e9  # bytes that are kept
STEPS = [("perceptron", 64, 1), ("perceptron", 64, 16), ("perceptron", 1024, 16), ("CNN on 8 x 8", 64, 16)]
STEPS += [("transformer of 10M", 4, 16), ("its adapters of rank 8", 4, 16)]


def least(run, calls: int = 10) -> float:
    """Return milliseconds a call."""
    jax.block_until_ready(run())
    found = []
    for _ in range(3):
        begun = time.perf_counter()
        out = [run() for _ in range(calls)][-1]
        jax.block_until_ready(out)
        found.append((time.perf_counter() - begun) / calls * 1e3)
    return min(found)


def draws():
    """Yield a row for each setting: the recurrence as a kernel and as a scan, and plain draws."""
    for n, b, size, batch, *_ in throughput.SETTINGS:
        scheme = BMinSep.from_batch_size(dataset_size=size, batch_size=batch, iterations=n, min_separation=b)
        path, times = scheme.table.path, []
        ratios = 2 * jax.random.normal(jax.random.key(0), (n, SAMPLES))
        table = path.weights, path.certain, path.lockout, len(path.start)
        for recurrence in (gpu_recurrence.kernel_values, first_values):
            program = jax.jit(lambda r, run=recurrence, table=table: run(r, *table))
            times.append(1e3 * least(functools.partial(program, ratios), 3) / SAMPLES)
        mechanism = Mechanism(scheme, BandedToeplitz.square_root(b), 0.47)
        draw = functools.partial(sample_privacy_loss, jax.random.key(0), mechanism)
        rate = throughput.rate(lambda samples, draw=draw: np.asarray(draw(samples)), 8 * SAMPLES)
        yield n, b, *(f"{us:.4f}" for us in times), f"{times[1] / times[0]:.0f}", f"{rate:,.0f}"


def noise():
    """Yield a row for each strategy and number of parameters."""
    strategies = strategies_of(1000)
    for size in SIZES:
        normal = jax.jit(functools.partial(jax.random.normal, shape=(size,)))
        beside = least(functools.partial(normal, jax.random.key(0)))
        for name, strategy in strategies.items():
            copies = strategy.noise_copies
            if 4 * size * (copies + 1) > LARGEST:
                continue
            params = jnp.zeros(size)
            draw = jax.jit(functools.partial(recursion.draw, strategy, LEVELS), donate_argnums=0)
            held = [recursion.init(strategy, params, KEY)]

            def run(draw=draw, held=held, params=params):
                made, held[0] = draw(held[0], params)
                return made

            ms = least(run)
            read_and_write = jax.jit(lambda kept: kept.astype(jnp.float32).sum(0))
            kept = held.pop().recent if copies else jnp.zeros((1, size))
            passed = least(functools.partial(read_and_write, kept))
            yield name, size, copies, f"{ms:.3f}", f"{passed:.3f}", f"{ms / passed:.1f}", f"{beside:.3f}"


def steps():
    """Yield a row for each model, batch size and number of bands: SGD, plain and with ghost clipping."""
    for name, size, bands in STEPS:
        loss, params, batch, _, runs = plain_and_private(name, size, bands)
        if bands > 1:
            runs["jax-privacy"] = peer(loss, params, batch, bands, min(8, size))
        found = [least(run, 20) for run in runs.values()]
        shown = [*(f"{ms:.2f}" for ms in found), ""][:3]
        yield name, size, bands, *shown, f"{found[1] / found[0]:.1f}"


TABLES = {
    "gpu_draws": (
        draws, "Draws of the privacy loss on a GPU, and the Pallas kernel beside the scan", 81,
        ["n", "b", "kernel, us a sample", "scan", "times", "plain draws a second"],
        "The recurrence alone as one Triton kernel and as a `lax.scan`, of 32,768 samples; draws "
        "of 262,144.",
    ),
    "gpu_noise": (
        noise, "Correlated noise on a GPU", 82,
        ["noise", "parameters", "copies kept", "ms", "a pass, ms", "ratio", "jax.random.normal, ms"],
        "One draw with its key stream, normals and storing. A pass: XLA's sum over as many vectors as are "
        "kept, which reads them and writes one; one band keeps nothing, a pass reads one vector there.",
    ),
    "gpu_steps": (
        steps, "Private steps on a GPU", 83,
        ["model", "batch", "bands", "plain, ms", "private, ms", "jax-privacy, ms", "private over plain"],
        "SGD with ghost clipping; wall time. jax-privacy 2.0.0: clipped_grad by up to 8 examples and its own "
        "streamed noise of as many bands, float32.",
    ),
    "gpu_fit": (
        lambda: fits(3), "`fit` beside a bare loop over `make_step` on a GPU", 84,
        ["fit, ms a step", "bare loop", "ratio"],
        "Perceptron, mean batch 64, one band: CPU (wall), steps 50 to 550.",
    ),
}  # fmt: skip


def main() -> None:
    verb, path = sys.argv[1], Path(sys.argv[2])
    found = json.loads(path.read_text()) if path.exists() else {}
    if verb == "record":  # FILE may lack tables that time did not suffice for
        for name, (_, question, order, columns, note) in TABLES.items():
            if name not in found:
                continue
            options = dict(question=question, order=order, columns=columns, rows=found[name])
            record(name, note=f"{note} JAX {found['jax']}.", machine=found["device"], **options)
        return
    device = jax.devices()[0].device_kind
    found |= {"device": device, "jax": jax.__version__, "date": time.strftime("%Y-%m-%d", time.gmtime())}
    for name in TABLES:
        found[name] = []
        for row in TABLES[name][0]():
            found[name].append(row)
            path.write_text(json.dumps(found))
            print(name, *row, flush=True)


if __name__ == "__main__":
    main()
