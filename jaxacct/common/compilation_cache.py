"""Compiled programs stored between runs of the commands, in JAX's own persistent cache.

A second `jaxacct calibrate` of the same shape then starts drawing at once. Commands enable it;
`import jaxacct` leaves JAX as it is. Programs hold the public numbers of a mechanism or a model; keys, data
and the members of a batch are arguments and never stored.

    JAX_COMPILATION_CACHE_DIR   another folder (JAX's own variable)
    JAXACCT_NO_CACHE=1          no cache
"""

import hashlib
import os
import platform
import sys
from pathlib import Path

import platformdirs

_MIN_COMPILE_SECONDS = "0.1"  # JAX would store only programs that take a second or longer to compile


def keep_compiled_programs() -> Path | None:
    """Point JAX's persistent cache at the user's cache folder, and return it; its owner alone may read it.

    None where the environment chose or refused a cache, or where no folder can be created.
    """
    environment = os.environ
    if environment.get("JAXACCT_NO_CACHE") or "JAX_COMPILATION_CACHE_DIR" in environment:
        return None
    try:
        folder = platformdirs.user_cache_path("jaxacct", appauthor=False) / _machine()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    if hasattr(os, "getuid") and owner != os.getuid():  # programs of another user would run as ours
        return None
    environment["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    seconds = environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", _MIN_COMPILE_SECONDS)
    if "jax" in sys.modules:  # which has read its environment already
        sys.modules["jax"].config.update("jax_compilation_cache_dir", str(folder))
        sys.modules["jax"].config.update("jax_persistent_cache_min_compile_time_secs", float(seconds))
    return folder


def _machine() -> str:
    """Return a name of this kind of processor: homes are shared by machines with other instructions."""
    features = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features = next((line for line in lines if line.lower().startswith(("flags", "features"))), features)
    except OSError:
        pass
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"
