"""Compiled programs kept between runs of the commands, in JAX's own persistent cache.

A second `jaxacct calibrate` of the same shape then draws at once. Commands switch it on; `import jaxacct`
leaves JAX as it is. Programs hold the public numbers of a mechanism or a model; keys, data and who was in a
batch are arguments of them and never stored.

    JAX_COMPILATION_CACHE_DIR   another folder (JAX's own variable)
    JAXACCT_NO_CACHE=1          no cache
"""

import hashlib
import os
import platform
import sys
from collections.abc import MutableMapping
from pathlib import Path

# Seconds; JAX would keep only what takes a second or longer to compile.
_WORTH_KEEPING = "0.1"


def keep_compiled_programs(environment: MutableMapping[str, str] = os.environ) -> Path | None:
    """Point JAX's persistent cache at the user's cache folder.

    Returns:
      The folder, made for its owner only; None where a cache was chosen or refused by `environment`, or where
      no folder can be made.
    """
    if environment.get("JAXACCT_NO_CACHE") or "JAX_COMPILATION_CACHE_DIR" in environment:
        return None
    try:
        folder = _user_cache(environment) / "jaxacct" / _machine()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    if hasattr(os, "getuid") and owner != os.getuid():  # what another user wrote would run as ours
        return None
    environment["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    seconds = environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", _WORTH_KEEPING)
    if environment is os.environ and "jax" in sys.modules:  # which has read its environment already
        sys.modules["jax"].config.update("jax_compilation_cache_dir", str(folder))
        sys.modules["jax"].config.update("jax_persistent_cache_min_compile_time_secs", float(seconds))
    return folder


def _user_cache(environment) -> Path:
    if sys.platform == "win32" and environment.get("LOCALAPPDATA"):
        return Path(environment["LOCALAPPDATA"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _machine() -> str:
    """A name for this kind of processor: homes are shared by machines that lack each other's instructions."""
    features = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features = next((line for line in lines if line.lower().startswith(("flags", "features"))), features)
    except OSError:
        pass
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"
