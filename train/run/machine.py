"""What decides the last bits of a run beside its program: versions, devices, compiler flags, processor.

On a CPU the order of a long float32 sum depends on the instruction set and the number of threads; on a GPU it
may differ from one call to the next. A run that continues elsewhere may release other sums with the same
noise, so a folder is bound to all of this, and the noise has another key elsewhere
(proofs/released_numbers.md, section 6).
"""

import functools
import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
import scipy

# Fields of /proc/cpuinfo that are the same for every core and every boot.
_FIELDS = (
    "vendor_id, cpu family, model, model name, stepping, flags, "
    "CPU implementer, CPU architecture, CPU variant, CPU part, CPU revision, Features"
).split(", ")
# Variables, or how their names begin, of the compiler and of the libraries that it calls.
_VARIABLES = tuple(
    "XLA_FLAGS LIBTPU_INIT_ARGS NVIDIA_TF32_OVERRIDE NPROC PJRT_NPROC ONEDNN_ DNNL_ OMP_ OPENBLAS_ GOTO_ "
    "GLIBC_TUNABLES".split()
)
# Options of JAX that change the bits of a program, and which no trace shows.
_OPTIONS = "jax_threefry_partitionable", "jax_ragged_dot_use_ragged_dot_instruction"
_PACKAGES = "jax-cuda", "jax-rocm", "nvidia-"
_DETERMINISTIC = "--xla_gpu_deterministic_ops"


def platforms(tree) -> set[str]:
    """Return the platforms of the devices that hold a pytree of arrays, and of the default device."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    found = {device.platform for leaf in arrays for device in leaf.sharding.device_set}
    return found | {jax.default_backend()}


def repeats(tree) -> bool:
    """Return whether a step of these arrays has the same bits in every process, of what `describe` returns.

    On a GPU XLA promises that for `--xla_gpu_deterministic_ops=true` alone.
    """
    given = [word for word in _words("XLA_FLAGS") if word.startswith(_DETERMINISTIC)]
    return platforms(tree) <= ({"cpu", "gpu"} if given[-1:] == [f"{_DETERMINISTIC}=true"] else {"cpu"})


def process_name(tree) -> str | None:
    """Return a random name of one call where the bits of a step may differ between calls, else None."""
    return None if repeats(tree) else os.urandom(16).hex()


def describe(devices: int) -> dict[str, Any]:
    """Return JSON values that a run is bound to; `devices`: number of devices of the mesh, 1 without one."""
    return {
        "versions": versions(),
        "device": jax.devices()[0].device_kind,
        "devices": devices,
        "flags": _flags(),
        "processor": _processor(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that compute, and of the C library, whose functions XLA calls."""
    of_modules = {each.__name__: each.__version__ for each in (jax, jaxlib, np, scipy)}
    return of_modules | {"libc": " ".join(platform.libc_ver())} | _of_accelerators()


@functools.cache
def _of_accelerators() -> dict[str, str]:
    """Return the versions of installed libraries of GPUs, where JAX has one of them."""
    distributions = ((each.name or "", each.version) for each in metadata.distributions())
    found = {name: version for name, version in distributions if name.startswith(_PACKAGES)}
    return found if any(name.startswith("jax") for name in found) else {}


def _words(name: str) -> list[str]:
    """Return the words of a variable; of XLA's flags those of the file that it may name."""
    value = os.environ.get(name, "").strip()
    if name == "XLA_FLAGS" and not value.startswith("-") and Path(value).is_file():
        value = Path(value).read_text()
    return value.split()


def _flags() -> str:
    """Return compiler options in their order: the last of two counts."""
    names = [name for name in sorted(os.environ) if name.startswith(_VARIABLES) and os.environ[name]]
    found = [f"{name}={' '.join(_words(name))}" for name in names]
    if jax.config.read("jax_disable_most_optimizations"):
        found.append("jax_disable_most_optimizations")
    return " ".join(found + [f"{name}=False" for name in _OPTIONS if not getattr(jax.config, name, True)])


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model, a digest of the instruction set and the number of threads of XLA."""
    fields = {}
    if cpuinfo.exists():
        lines = cpuinfo.read_text().split("\n\n")[0].splitlines()
        split = (line.partition(":") for line in lines)
        fields = {name.strip(): value.strip() for name, _, value in split if name.strip() in _FIELDS}
    model = fields.get("model name") or platform.processor() or platform.machine()
    digest = hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:12]
    return f"{model}, instruction set {digest}, {_num_threads()} threads"


def _num_threads() -> int:
    """Return the number of threads of XLA where no variable says another: of cores, or of devices if more."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores, jax.local_device_count())
