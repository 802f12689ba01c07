"""Compiled functions of schemes and strategies, whose numbers are arguments of the program.

A function is traced for every scheme and strategy, but its tables (and what is marked by `number`) are passed
to the compiled program beside the data. Another sampling probability or other coefficients then make the same
program, which JAX's compilation cache has already. Whatever is not passed is a literal of the program and
makes another one: forgetting a number costs time, and can never take the number of another scheme.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

# Traced programs that are kept of a function; each holds its tables.
_KEPT = 64


def number(value: float, dtype=jnp.float32):
    """A () array of `dtype` that is an argument of a program of `compiled`, and a number elsewhere.

    JAX writes scalars into a program and passes arrays: so it is an array with one entry, reshaped.
    """
    return jnp.reshape(jnp.asarray(np.array([value]), dtype), ())


def compiled(*, static: int) -> Callable[[Callable[..., Any]], "Compiled"]:
    """`jax.jit` of a function of positional arguments whose first `static` ones are hashable and no arrays.

    The others are pytrees of arrays. NumPy arrays that the function makes of the static ones become arguments
    of the program, unless they are scalars; see the top of this file.
    """
    return functools.partial(Compiled, static=static)


class Compiled:
    """A function as `compiled` makes it."""

    def __init__(self, function: Callable[..., Any], static: int):
        self._function, self._static = function, static
        self._lock = threading.RLock()
        self._programs: dict[Any, tuple[jax.stages.Wrapped, list]] = {}
        functools.update_wrapper(self, function)

    def __call__(self, *args):
        (program, constants), leaves = self._program(*args)
        return program(constants, leaves)

    def lower(self, *args) -> jax.stages.Lowered:
        """The program of these arguments."""
        (program, constants), leaves = self._program(*args)
        return program.lower(constants, leaves)

    def _program(self, *args):
        fixed, (leaves, tree) = args[: self._static], jax.tree.flatten(args[self._static :])
        kinds = tuple(map(jax.typeof, leaves))
        in_64_bits = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        key = fixed, tree, kinds, in_64_bits
        with self._lock:
            found = self._programs.pop(key, None) or _traced(self._function, fixed, tree, leaves)
            self._programs[key] = found  # the one used last comes last
            if len(self._programs) > _KEPT:
                del self._programs[next(iter(self._programs))]
        return found, leaves

    def traced(self) -> int:
        """How many programs are kept."""
        return len(self._programs)

    def clear_cache(self) -> None:
        """Forget them all."""
        self._programs.clear()


def _traced(function, fixed, tree, leaves) -> tuple[jax.stages.Wrapped, list]:
    """The program of these static arguments and kinds of arrays, and what to call it with first."""

    def of_leaves(*leaves):
        return function(*fixed, *jax.tree.unflatten(tree, leaves))

    closed, shape = jax.make_jaxpr(of_leaves, return_shape=True)(*leaves)
    result = jax.tree.structure(shape)

    def program(constants, leaves):
        passed = jax.extend.core.ClosedJaxpr(closed.jaxpr, constants)
        return jax.tree.unflatten(result, jax.extend.core.jaxpr_as_fun(passed)(*leaves))

    program.__name__ = program.__qualname__ = function.__name__.strip("_")
    with jax.ensure_compile_time_eval():
        constants = [jax.device_put(each) for each in closed.consts]
    return jax.jit(program), constants
