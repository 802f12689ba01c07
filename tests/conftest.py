"""Shared fixtures. Statistical tests fix their keys and derive tolerances from a stated false alarm."""

import functools
import gc
import hashlib
import itertools
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

# Before NumPy is loaded: two workers with a thread for every core each spend half of their time waiting.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import chex
import jax
import pytest

MIN_COMPILE_SECONDS = 0.1  # what takes less to compile is not worth a file
OPTIMIZE = os.environ.get("JAXACCT_TESTS_OPTIMIZE") == "1"
"""Whether all programs are compiled as users have them; else those of modules marked `optimized` alone."""

# Of XLA for CPUs, which cut the time to compile to a third: no loops written by MLIR, no splitting of small
# programs, of LLVM's optimizations (where a module is marked, else none) those that programs are faster for.
# A version that does not know a flag stops, so each is for those that do.
QUICK_FLAGS = ["--xla_cpu_use_fusion_emitters=false"] * (jax.__version_info__ < (0, 11)) + [
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_backend_optimization_level=1",
]

STRICT = set(
    "accountants calibration checker cli common conformance core estimates individual interoperation kernels "
    "likelihood proposals recommendation report schemes statistics strategies train verification".split()
)

# From twenty seconds down to eight: run first, so that no worker is left alone with one of them.
LONG_FILES = (
    "test_questions test_pairs test_redrawn_bins test_batch_clipping test_interoperation test_checker "
    "test_choosing test_replace_one test_independent_truncation test_gpu test_audit_command test_ghost "
    "test_loop test_loaders test_randomness test_fine_tuning test_gpu_recurrence test_curves test_history "
    "test_inflated test_start test_plan test_random_allocation test_add_direction test_notebooks "
    "test_truncated_b_min_sep test_overlapping_replicas test_report "
    "test_composed test_composed_losses test_non_banded "
    "test_large_replicas test_individual test_cli test_dice"
).split()


def pytest_collection_modifyitems(items):
    """Modules marked `optimized` together, as each change of the mark forgets all programs; long files first.

    The sort keeps the order within a file.
    """

    def place(item):
        long = LONG_FILES.index(item.path.stem) if item.path.stem in LONG_FILES else len(LONG_FILES)
        return item.get_closest_marker("optimized") is None, long

    items.sort(key=place)


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch):
    """On a busy machine a line every ten seconds would be counted among what a command says."""
    monkeypatch.setattr("jaxacct.common.progress.PLAIN_SECONDS", 3600.0)


def pytest_collection_finish(session):
    """Traced programs are many objects that live long: not looked through again once they survived twice."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 10_000)


def pytest_sessionfinish():
    """At its end pytest looks through all objects five times for what was never raised: once is enough."""
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    """One compilation cache a run, for its workers and for the commands and notebooks under test.

    New each time, unless JAX_COMPILATION_CACHE_DIR names one to keep.
    """
    if not OPTIMIZE:
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *QUICK_FLAGS])
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="jaxacct-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    metadata.version = functools.cache(metadata.version)  # of every plan that is made: 5 milliseconds
    # Again for this process: a plugin may have imported JAX, which reads its environment only then.
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = str(MIN_COMPILE_SECONDS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of one file in one worker: what they have in common is traced and compiled once."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # as `pytest_collection_modifyitems` has them
    return LoadFileScheduling(config, log)


@pytest.fixture(scope="module", autouse=True)
def compilation(request):
    """Without LLVM's optimizations, which take most of the time and are run once, unless a module is marked.

    Programs are forgotten in between, or one compiled for the module before would be run.
    """
    # On GPUs XLA (jaxlib 0.11.2, an H200) then loses the last 32 bits of some float64 numbers.
    quick = not OPTIMIZE and jax.default_backend() == "cpu"
    wanted = quick and request.node.get_closest_marker("optimized") is None
    if jax.config.read("jax_disable_most_optimizations") != wanted:
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", wanted)


@pytest.fixture(scope="module", autouse=True)
def promotion(request):
    """Refuse implicit promotion of dtypes and ranks in the folders of `STRICT`."""
    strict = request.path.relative_to(Path(__file__).parent).parts[0] in STRICT
    with (
        jax.numpy_dtype_promotion("strict" if strict else "standard"),
        jax.numpy_rank_promotion("raise" if strict else "allow"),
    ):
        yield


@pytest.fixture(scope="module", autouse=True)
def entropy(request):
    """What the operating system's generator gives, fixed for a module: no run fails by luck of its keys.

    Code under test still asks for it anew each time. Commands in processes of their own have the real one.
    """
    name, calls = request.node.nodeid, itertools.count()

    def urandom(size: int) -> bytes:
        return hashlib.shake_256(f"{name} {next(calls)}".encode()).digest(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", urandom)
        yield


@pytest.fixture
def default_promotion():
    """JAX's default promotion, for other libraries: flax's pooling, optax's Adam and bfloat16 mix dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def traced_once(monkeypatch):
    """Let a function made by `jaxacct.kernels.programs.compiled` be traced only once more."""

    def once(compiled):
        chex.clear_trace_counter()
        compiled.clear_cache()
        monkeypatch.setattr(compiled, "_function", chex.assert_max_traces(compiled.__wrapped__, n=1))

    return once


@pytest.fixture
def x64():
    """Run a test in float64; off again afterwards."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def key():
    """A fixed key; tests alone may fix one."""
    return jax.random.key(20260209)


@pytest.fixture(scope="session")
def as_installed(tmp_path_factory):
    """A folder to import from that looks like an installation: `jaxacct.train`, and no `train`."""
    from tests.commands import link_installation

    return link_installation(tmp_path_factory.mktemp("installed"))
