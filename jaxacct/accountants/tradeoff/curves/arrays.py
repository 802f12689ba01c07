"""NumPy or JAX: the closed forms are written once and run on either, always in float64.

Python numbers and NumPy arrays are computed by NumPy and SciPy. JAX arrays, traced ones too, are computed by
jax.numpy, so that the closed forms can be jitted and vmapped over arrays of parameters; they must be float64,
since float32 cannot resolve a delta below about 1e-6.
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.scipy import special as jax_special
from scipy import special

from jaxacct.common import validate as _validate


def library(*values) -> tuple[Any, Any, list]:
    """`(numpy or jax.numpy, its special functions, the values as float64 arrays)`.

    Raises:
      ValueError: for JAX arrays while float64 is off, or values that are not numbers.
    """
    if any(isinstance(value, jax.Array) for value in values):
        if not jax.config.read("jax_enable_x64"):
            raise ValueError("jax_enable_x64 must be on for privacy accounting on JAX arrays, was off")
        return jnp, jax_special, [jnp.asarray(value, jnp.float64) for value in values]
    try:
        arrays = [np.asarray(value, np.float64) for value in values]
    except (TypeError, ValueError):
        raise ValueError(f"arguments must be numbers, were {values!r}") from None
    return np, special, arrays


def plain(value) -> Any:
    """A NumPy array without axes as a float, anything else as it is."""
    return float(value) if isinstance(value, (np.ndarray, np.generic)) and np.ndim(value) == 0 else value


def is_placeholder(value) -> bool:
    """Whether there is nothing to look at: a traced value, or what JAX puts into a pytree's place."""
    return isinstance(value, jax.core.Tracer) or type(value) is object


def check(name: str, value, allowed: str, accept) -> None:
    """ValueError unless `accept` holds for every entry; traced values cannot be looked at and pass."""
    if is_placeholder(value):
        return
    if isinstance(value, (bool, str)) or value is None:
        raise ValueError(f"{name} must be {allowed}, was {value!r}")
    try:
        entries = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be {allowed}, was {value!r}") from None
    with np.errstate(invalid="ignore"):
        good = accept(entries)
    if entries.size == 0 or not np.all(good):
        bad = entries[~good].ravel() if entries.ndim else entries
        shown = float(np.ravel(bad)[0]) if np.size(bad) else "empty"
        raise ValueError(f"{name} must be {allowed}, was {shown}")


def check_scale(name: str, value, *, zero: bool = False) -> None:
    """ValueError unless every entry is in [1e-30, 1e30], or 0 where `zero` allows it (`_validate.scale`)."""

    def accept(entries):
        inside = (entries >= _validate.MIN_SCALE) & (entries <= _validate.MAX_SCALE)
        return inside | (entries == 0) if zero else inside

    check(name, value, "0 or in [1e-30, 1e30]" if zero else "in [1e-30, 1e30]", accept)


def check_level(alpha) -> None:
    """A type I error is in [0, 1]."""
    check("alpha", alpha, "in [0, 1]", lambda a: (a >= 0) & (a <= 1))


def check_epsilon(epsilon) -> None:
    """Public functions take epsilon of at least 0."""
    check("epsilon", epsilon, "at least 0", lambda e: e >= 0)


def check_delta(delta) -> None:
    """Public functions take delta strictly between 0 and 1."""
    check("delta", delta, "in (0, 1)", lambda d: (d > 0) & (d < 1))


def check_mu(mu, name: str = "mu") -> None:
    """A Gaussian parameter is at least 0; infinity is no privacy."""
    check(name, mu, "at least 0", lambda m: m >= 0)


def check_positive(name: str, value) -> None:
    """A finite number above 0."""
    check(name, value, "a finite number above 0", lambda v: np.isfinite(v) & (v > 0))


def bisect(above, low, high, iterations: int = 110):
    """`(low, high)` around the point where `above(x)` turns from True to False; elementwise, jittable.

    `above` must hold at `low` and not at `high` (or the ends are returned as they are).
    """

    def halve(_, ends):
        low, high = ends
        middle = low + (high - low) / 2
        seen = above(middle)
        xp = jnp if isinstance(seen, jax.Array) else np
        return xp.where(seen, middle, low), xp.where(seen, high, middle)

    if any(isinstance(value, jax.Array) for value in (low, high)):
        low, high = jnp.broadcast_arrays(low, high)
        return jax.lax.fori_loop(0, iterations, halve, (low, high))
    ends = np.broadcast_arrays(low, high)
    for index in range(iterations):
        before, ends = ends, halve(index, ends)
        if all(np.array_equal(now, then) for now, then in zip(ends, before, strict=True)):
            break  # no number is between them, so they stay what they are
    return ends
