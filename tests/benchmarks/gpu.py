"""What a GPU gives: calibrations, training, noise, its checks and the kernels.

    pip install -e '.[test,cuda]'                            # on the machine with the GPU
    python -m tests.benchmarks.gpu measure FILE [tables]     # there: all tables, or those that are named
    python -m tests.benchmarks.gpu record FILE               # anywhere, afterwards

All tables are meant to take less than ten minutes on an H200. FILE is written after each row, and what a
short loan must not miss comes first, so an interrupted measurement is not lost. A table that fails ends with
a line that says so. Times are wall times, mostly the least of three loops of calls that are waited for once.
`test_gpu.py` runs all tables at small sizes without a GPU.
"""

import functools
import itertools
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxacct import BandedInverse, BandedToeplitz, BMinSep, Mechanism, sample_privacy_loss
from jaxacct.kernels.likelihoods import gpu_recurrence
from jaxacct.kernels.programs import check_arithmetic
from jaxacct.kernels.table import first_values
from tests.benchmarks import jobs, large_steps, throughput
from tests.benchmarks.results import record
from tests.benchmarks.sharded_memory import ADAM, BANDS, BATCH, copies_of, loss, mesh_of, shapes_of, spec_of
from tests.benchmarks.steps import NOISES, fit_times, peer, plain_and_private
from tests.train.runs import plan_of
from train.noise import gpu_keystream, normals, recursion
from train.procedures.by_device import own_cut

LEVELS, KEY = 2.0**14, np.arange(8, dtype=np.uint32)
LARGEST = 30e9  # bytes that are kept
ONLY = "only on a GPU"
MODELS = ((3, 512, 1024), (8, 1024, 8192))  # layers, width, words: 10 and 109 million parameters
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


def advance(step, held: list):
    """Return what a step makes of the state that is held, and hold the next one."""
    made, held[0] = step(held[0])
    return made


def checks():
    """Yield a row for each check of a device: seconds with its compilation, and its answer."""
    refuse, works = normals._refuse_inexact.__wrapped__, {True: "works", False: ONLY}
    for name, check in {
        "kernel of ChaCha20": lambda: works[gpu_keystream._works.__wrapped__()],
        "kernel of the recurrence": lambda: works[gpu_recurrence._works.__wrapped__()],
        "sums of float32": lambda: check_arithmetic.__wrapped__() or "exact",
        "sines of float64": lambda: refuse(jax.default_backend()) or f"error {normals.sine_error():.1e}",
    }.items():
        begun = time.perf_counter()
        answer = check()
        yield name, f"{time.perf_counter() - begun:.2f}", answer


def calibrations(commands=None):
    """Yield a row for each job, a process of its own."""
    for name, command in (commands or {job: jobs.JOBS[job] for job in ("README", "production")}).items():
        own = jobs.measured(command, max_cpu=240)
        noise = own["noise"] and f"{own['noise']:.5g}"
        yield name, f"{own['wall']:.1f}", f"{own['seconds'][1]:.1f}", noise, own["by"]


def peak(size: int) -> str:
    """Return the most memory that this process has had on a device, in copies; empty where it is unknown."""
    found = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return "" if found is None else f"{found / (4 * size):.2f}"


def transformers(models=MODELS, calls: int = 10, steps: int = 120, first: int = 20, rows: int = 4096):
    """Yield a row for each step of each model, and for `fit`."""
    for shapes in (shapes_of(*model) for model in models):
        size, plain = sum(map(math.prod, shapes.values())), math.nan
        for name, (begin, run, given) in large_steps.all_kinds(shapes).items():
            held, begun = [begin(large_steps.parameters(shapes, scanned=True))], time.perf_counter()
            memory = run.trace(held[0], *given).lower().compile().memory_analysis()
            compiled = time.perf_counter() - begun
            step = functools.partial(large_steps.after, run, given)
            ms = least(functools.partial(advance, step, held), calls)
            plain = ms if name == "plain" else plain
            held.clear()
            shown = f"{ms:.2f}", f"{ms / plain:.2f}", f"{compiled:.1f}", *copies_of(memory, size)
            yield f"{size:,}", name, *shown, peak(size)
        sizes = dict(dataset_size=rows, batch_size=BATCH, iterations=steps, min_separation=BANDS)
        strategy = BandedInverse.bisr(iterations=steps, bands=BANDS)
        plan = plan_of(Mechanism(BMinSep.from_batch_size(**sizes), strategy, 1.0), rows, 1e9)
        given = large_steps.parameters(shapes, scanned=True), loss, large_steps.batch_of(shapes, rows), ADAM
        _, ms = fit_times(plan, *given, first, microbatch_size=2)
        yield f"{size:,}", "`fit`", f"{ms:.2f}", f"{ms / plain:.2f}", "", "", "", peak(size)


def draws(settings=throughput.SETTINGS, samples: int = 32_768):
    """Yield a row for each setting: the recurrence as a kernel and as a scan, and plain draws."""
    for n, b, size, batch, *_ in settings:
        scheme = BMinSep.from_batch_size(dataset_size=size, batch_size=batch, iterations=n, min_separation=b)
        path, times = scheme.table.path, []
        ratios = 2 * jax.random.normal(jax.random.key(0), (n, samples))
        table = path.weights, path.certain, path.lockout, len(path.start)
        for recurrence in (first_values, gpu_recurrence.kernel_values)[: 1 + gpu_recurrence._works()]:
            program = jax.jit(lambda r, run=recurrence, table=table: run(r, *table))
            times.append(1e3 * least(functools.partial(program, ratios), 3) / samples)
        scan, *kernel = times
        shown = [f"{kernel[0]:.4f}", f"{scan / kernel[0]:.0f}"] if kernel else [ONLY, ""]
        mechanism = Mechanism(scheme, BandedToeplitz.square_root(b), 0.47)
        draw = functools.partial(sample_privacy_loss, jax.random.key(0), mechanism)
        rate = throughput.rate(lambda samples, draw=draw: np.asarray(draw(samples)), 8 * samples)
        yield n, b, shown[0], f"{scan:.4f}", shown[1], f"{rate:,.0f}"


def steps(settings=STEPS):
    """Yield a row for each model, batch size and number of bands: SGD, plain and with ghost clipping."""
    for name, size, bands in settings:
        of_one, params, batch, _, runs = plain_and_private(name, size, bands)
        if bands > 1:
            runs["jax-privacy"] = peer(of_one, params, batch, bands, min(8, size))
        found = [least(run, 20) for run in runs.values()]
        shown = [*(f"{ms:.2f}" for ms in found), ""][:3]
        yield name, size, bands, *shown, f"{found[1] / found[0]:.1f}"


def noise(sizes=(10_000_000, 100_000_000), names=tuple(NOISES)):
    """Yield a row for each size and strategy: a draw by one device, and by all, each of its own shard."""
    mesh, spec, whole = mesh_of((1, -1)), spec_of(2), PartitionSpec()
    state = recursion.NoiseState(whole, spec_of(3), whole)
    layout: dict[str, Any] = dict(mesh=mesh, in_specs=(state,), out_specs=(spec, state), check_vma=False)
    normal = {n: jax.jit(functools.partial(jax.random.normal, shape=(n,))) for n in sizes}
    beside = {n: least(functools.partial(each, jax.random.key(0))) for n, each in normal.items()}
    for size, name in itertools.product(sizes, names):
        strategy, like = NOISES[name], jax.ShapeDtypeStruct((size // 1024, 1024), jnp.float32)
        copies = strategy.noise_copies
        if 4 * size * (copies + 1) > LARGEST:
            continue
        draw, found, drawn = functools.partial(recursion.draw, strategy, LEVELS, params=like), [], []

        def own(state, draw=draw, shape=like.shape):
            return draw(state, cuts=[own_cut(shape, spec, mesh)])

        for program, device in ((draw, None), (jax.shard_map(own, **layout), NamedSharding(mesh, spec))):
            held = [recursion.init(strategy, jnp.zeros(like.shape, device=device), KEY)]
            run = functools.partial(advance, jax.jit(program, donate_argnums=0), held)
            found.append(least(run))
            drawn.append(np.asarray(run()))
            held.clear()
        kept = jnp.zeros((max(1, copies), *like.shape), jnp.int32)
        passed = least(functools.partial(jax.jit(lambda kept: kept.astype(jnp.float32).sum(0)), kept))
        shown = f"{found[0]:.3f}", f"{passed:.3f}", f"{found[0] / passed:.1f}", f"{beside[size]:.3f}"
        yield name, size, copies, *shown, f"{found[1]:.3f}", mesh.size, np.sum(drawn[0] != drawn[1])


# Name of the record -> (rows, question, order, columns, note); in the order of measuring.
TABLES = {
    "gpu_checks": (
        checks, "Checks of a GPU before the first number is drawn", 85, ["check", "s", "answer"],
        "Each runs once in a process; seconds with its compilation.",
    ),
    "gpu_calibrations": (
        calibrations, "`calibrate` from the command line to its last certified number on a GPU", 86,
        ["job", "s", "CPU s", "noise multiplier", "by"],
        "Wall time of a process of its own with import and compilation; command lines as of `jobs`.",
    ),
    "gpu_transformers": (
        transformers, "Steps, `fit` and memory of transformers of 10 and 109 million parameters on a GPU", 87,
        ["parameters", "step", "ms", "over plain", "compile, s", "state, copies", "beyond it", "peak so far"],
        f"Adam, inverse of {BANDS} bands, {BATCH} rows, two at a time, a scan of checkpointed layers. `fit`: "
        f"mean batch {BATCH}, with drawing and reading batches. State and beyond it: by the compiler, of a "
        "device. Peak: of the device in this process until then.",
    ),
    "gpu_draws": (
        draws, "Draws of the privacy loss on a GPU, and the Pallas kernel beside the scan", 81,
        ["n", "b", "kernel, us a sample", "scan", "times", "plain draws a second"],
        "The recurrence alone as one Triton kernel and as a `lax.scan`, of 32,768 samples; draws of 262,144.",
    ),
    "gpu_noise": (
        noise, "Correlated noise on a GPU", 82,
        ["noise", "parameters", "copies kept", "ms", "a pass, ms", "ratio", "jax.random.normal, ms",
         "by shards, ms", "devices", "differ"],
        "One draw with its key stream, normals and storing. A pass: XLA's sum over as many vectors as are "
        "kept, which reads them and writes one; one band keeps nothing, a pass reads one vector there. By "
        "shards: every device draws its own, without the kernel of ChaCha20. Differ: integers that do.",
    ),
    "gpu_steps": (
        steps, "Private steps on a GPU", 83,
        ["model", "batch", "bands", "plain, ms", "private, ms", "jax-privacy, ms", "private over plain"],
        "SGD with ghost clipping; wall time. jax-privacy 2.0.0: clipped_grad by up to 8 examples and its own "
        "streamed noise of as many bands, float32.",
    ),
}  # fmt: skip


def or_failure(rows):
    """Yield the rows, and after an error a row of one entry that names it."""
    try:
        yield from rows
    except Exception as error:
        yield (f"failed: {type(error).__name__}: {error}".splitlines()[0],)


def main(verb: str, file: str, *names: str) -> None:
    path = Path(file)
    found = json.loads(path.read_text()) if path.exists() else {}
    if verb == "record":  # FILE may lack tables that time did not suffice for
        for name, (_, question, order, columns, note) in TABLES.items():
            rows = [row for row in found.get(name, ()) if len(row) == len(columns)]
            failed = [row[0] for row in found.get(name, ()) if len(row) == 1]
            print(name, len(rows), *failed)
            if rows:
                note = " ".join([note, *failed, f"JAX {found['jax']}, measured {found['date']}."])
                options = dict(question=question, order=order, columns=columns, rows=rows)
                record(name, note=note, machine=found["device"], **options)
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # calibrations need a part of its memory
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}, {os.cpu_count()} cores"
    found |= {"device": device, "jax": jax.__version__, "date": time.strftime("%Y-%m-%d", time.gmtime())}
    for name, (rows_of, *_) in {name: TABLES[name] for name in names or TABLES}.items():
        found[name] = []
        for row in or_failure(rows_of()):
            found[name].append([str(cell) for cell in row])
            path.write_text(json.dumps(found))
            print(name, *row, sep=" | ", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
