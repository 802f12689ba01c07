"""What decides the last bits of a run beside its program: versions, devices, compiler flags, processor.

On a CPU the order of a long float32 sum depends on the instruction set and the number of threads. A run that
continues elsewhere may release other sums with the same noise, so a folder is bound to all of this, and the
noise has another key elsewhere.
"""

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

# Fields of /proc/cpuinfo that are the same for every core and every boot.
_FIELDS = (
    "vendor_id, cpu family, model, model name, stepping, flags, "
    "CPU implementer, CPU architecture, CPU variant, CPU part, CPU revision, Features"
).split(", ")
_VARIABLES = "XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE"


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
    """Return the versions of the packages that compute."""
    return {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "numpy": np.__version__}


def _flags() -> str:
    """Return compiler options in their order: the last of two counts."""
    found = [f"{name}={' '.join(os.environ[name].split())}" for name in _VARIABLES if os.environ.get(name)]
    if jax.config.read("jax_disable_most_optimizations"):
        found.append("jax_disable_most_optimizations")
    # It decides the bits of a loss' random numbers, and no trace shows it.
    if not jax.config.jax_threefry_partitionable:  # pyrefly: ignore[missing-attribute]
        found.append("jax_threefry_partitionable=False")
    return " ".join(found)


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
    """Return NPROC, which XLA reads first, or the number of cores that the process may use."""
    given = os.environ.get("NPROC", "")
    if given.isdigit() and int(given):
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
