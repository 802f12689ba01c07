"""Compiled functions of schemes and strategies whose numbers are arguments of the program.

A function is traced for every scheme and strategy, but its tables (and numbers marked by `number`) are passed
to the compiled program beside the data. Another sampling probability or other coefficients then give the same
program, which JAX's compilation cache holds. A number that is not passed is a literal of the program and
gives another program: forgetting one costs time, and can never use the number of another scheme.
"""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
import jaxlib
import numpy as np

# Maximum number of traced programs of a function; each holds its tables.
_KEPT = 64
# Options of XLA's compiler for CPUs, unless `XLA_FLAGS` sets them: AVX-512 vectors, of which XLA uses half
# the width by default, and the LLVM optimizations that make programs faster. The bits are the same; programs
# take 12 % less time, compilation 25 % less.
# Programs of `compiled` are called by several threads at once (`proposals.base.workers`), each on one core:
# a third faster. In jaxlib 0.11 two Fourier transforms at once wait for each other forever where a program
# may use all cores: each holds a core, and waits for parts of its own that no core is left for.
_CPU_OPTIONS = {
    "xla_cpu_prefer_vector_width": 512,
    "xla_backend_optimization_level": 1,
    "xla_cpu_multi_thread_eigen": False,
}


def outside_of_traces(function: Callable[[], Any]):
    """Return `function()`, run by a thread of its own: programs that are traced meanwhile are not its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


class _Program(NamedTuple):
    """Traced function, for direct calls and for calls inside another program.

    Attributes:
      inside: without compiler options: those of the outer program apply.
    """

    alone: jax.stages.Wrapped
    inside: jax.stages.Wrapped
    constants: list


def number(value: float, dtype=jnp.float32):
    """Return a () array of `dtype` that is an argument of a program of `compiled`, and a number elsewhere.

    JAX writes scalars into a program and passes arrays, so it is an array with one entry, reshaped.
    """
    return jnp.reshape(jnp.asarray(np.array([value]), dtype), ())


def compiled(*, static: int) -> Callable[[Callable[..., Any]], "Compiled"]:
    """Return a decorator: `jax.jit` of a function whose first `static` positional arguments are hashable.

    The others are pytrees of arrays. NumPy arrays that the function derives from the static ones become
    arguments of the program, unless they are scalars (see the module docstring).
    """
    return functools.partial(Compiled, static=static)


class Compiled:
    """Function compiled by `compiled`."""

    def __init__(self, function: Callable[..., Any], static: int):
        self._function, self._static = function, static
        self._lock = threading.RLock()
        self._programs: dict[Any, _Program] = {}
        functools.update_wrapper(self, function)

    def __call__(self, *args):
        program, leaves = self._program(*args)
        # Part of another program or of a `vmap`?
        if any(isinstance(each, jax.core.Tracer) for each in (*leaves, jnp.negative(_zero()))):
            return program.inside(program.constants, leaves)
        return program.alone(program.constants, leaves)

    def lower(self, *args) -> jax.stages.Lowered:
        """Return the lowered program of these arguments."""
        program, leaves = self._program(*args)
        return program.alone.lower(program.constants, leaves)

    def _program(self, *args) -> tuple[_Program, list]:
        fixed, (leaves, tree) = args[: self._static], jax.tree.flatten(args[self._static :])
        kinds = tuple(map(jax.typeof, leaves))
        in_64_bits = jax.config.jax_enable_x64  # pyrefly: ignore[missing-attribute]
        key = fixed, tree, kinds, in_64_bits
        with self._lock:
            found = self._programs.pop(key, None) or _traced(self._function, fixed, tree, leaves)
            self._programs[key] = found  # the most recently used comes last
            if len(self._programs) > _KEPT:
                del self._programs[next(iter(self._programs))]
        return found, leaves

    def clear_cache(self) -> None:
        """Drop all traced programs."""
        self._programs.clear()


def _traced(function, fixed, tree, leaves) -> _Program:
    """Return the program of these static arguments and kinds of arrays, and its first arguments."""

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
    inside = jax.jit(program)
    options = compiler_options() if jax.default_backend() == "cpu" else {}
    return _Program(jax.jit(program, compiler_options=options) if options else inside, inside, constants)


@functools.cache
def _zero():
    """Return a cached zero: creating one takes three times as long as its use."""
    with jax.ensure_compile_time_eval():
        return jnp.zeros(())


@functools.cache
def compiler_options() -> dict[str, int]:
    """Return the options that are not set and that this XLA has."""
    asked = os.environ.get("XLA_FLAGS", "")
    return {
        name: value for name, value in _CPU_OPTIONS.items() if name not in asked and _is_known(name, value)
    }


@functools.cache
def check_arithmetic() -> None:
    """Refuse a compiler that reorders sums or takes NaN for a number, as with XLA's fast-math flags.

    The rounding margins need compensated sums of float32, and refusals of NaN on its comparisons. The
    numbers are arguments of the program, so that the compiler cannot compute them beforehand. jaxlib 0.10.2
    computes sums of small products wrong from 32,769 rows on (proofs/errata.md).

    Raises:
      ValueError: compiled arithmetic that is not that of NumPy.
    """
    found = [np.asarray(each) for each in _compiled_arithmetic(*_NUMBERS)]
    with np.errstate(all="ignore"):
        expected = _arithmetic(np, *_NUMBERS)
    if not all(np.array_equal(*pair, equal_nan=True) for pair in zip(found, expected, strict=True)):
        raise ValueError(
            "XLA_FLAGS must not let the compiler reorder sums or ignore NaN, as --xla_cpu_enable_fast_math "
            f"does, got {os.environ.get('XLA_FLAGS', '')!r:.200}: rounding would not be within its margins"
        )
    squares = np.asarray(_compiled_squares(np.eye(3, dtype=np.float32), _ROWS))
    if not np.array_equal(squares, np.square(_ROWS).sum(axis=1)):
        raise ValueError(
            f"jaxlib must compute sums of products of {len(_ROWS)} rows right, and {jaxlib.__version__} does "
            "not: install another version"
        )


_NUMBERS = (
    np.float32(2) ** np.arange(-20, 12, dtype=np.float32) * np.float32(1.1),
    np.float32(2) ** np.arange(-32, 0, dtype=np.float32) * np.float32(1.3),
    np.tile(np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -2.5, 3e38], np.float32), 4),
)


_ROWS = (np.arange(3 * 32_769) % 7).astype(np.float32).reshape(-1, 3)


@jax.jit
def _compiled_squares(matrix, rows):
    return jax.vmap(lambda row: jnp.sum(jnp.square(matrix @ row)))(rows)


def _arithmetic(xp, sums, remainders, losses):
    """Return sums whose rounding is observed, and what becomes of losses that are not finite."""
    total = sums + remainders
    largest = xp.maximum(losses, np.float32(0))
    return (
        (sums - (total - (total - sums))) + (remainders - (total - sums)),  # what the sum rounded off
        (total - sums) - remainders,
        xp.isnan(losses),
        xp.isfinite(losses),
        losses != losses,
        losses > np.float32(0),
        xp.where(losses == losses, np.float32(1), np.float32(2)),
        xp.isnan(largest),
        xp.isnan(losses - losses),
        xp.isnan(xp.exp(losses)),
    )


@compiled(static=0)
def _compiled_arithmetic(*numbers):
    return _arithmetic(jnp, *numbers)


def _is_known(name: str, value: int) -> bool:
    try:
        jax.jit(jnp.negative, compiler_options={name: value}).lower(jnp.float32(0)).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


@jax.custom_batching.custom_vmap
def any_left(unfinished):
    """Return whether any sample is unfinished; under `jax.vmap` over blocks of samples, in any block.

    As the condition of a `lax.while_loop` it keeps one flag for all blocks. With one flag per block, JAX
    would copy the whole state in every turn, to keep that of the finished blocks. A turn must leave finished
    samples unchanged.
    """
    return jnp.any(unfinished)


@any_left.def_vmap
def _(axis_size, in_batched, unfinished):
    return any_left(unfinished), False
