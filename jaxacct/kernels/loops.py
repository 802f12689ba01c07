"""Loops over many samples: such as stop together, and such as a CPU does in one piece of machine code."""

import contextlib
import contextvars
import functools

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

# Numbers of an array that a kernel may be given as a copy.
_SMALL = 2**14
_kernels = {"made": True}
# Whether the arrays of the program that is being traced are its arguments, not constants of a user's program.
_of_arguments = contextvars.ContextVar("of_arguments", default=False)
# The mark is no public part of XLA, so it is for versions that were tried alone.
_TRIED = jax.__version_info__ < (0, 13)


@jax.custom_batching.custom_vmap
def any_left(unfinished):
    """Whether any sample is unfinished, under `jax.vmap` over blocks of samples: in any block.

    As the condition of a `lax.while_loop` it keeps one verdict for all blocks. With a verdict for each, JAX
    would copy the whole state in every turn, to hold on to that of the blocks that are done. A turn must
    leave finished samples as they are.
    """
    return jnp.any(unfinished)


@any_left.def_vmap
def _(axis_size, in_batched, unfinished):
    del axis_size, in_batched
    return any_left(unfinished), False


def in_one_kernel(function):
    """`function` of arrays, a loop of some turns, compiled for a CPU as one piece of machine code.

    XLA starts each fusion in the body of a loop anew in every turn, which takes longer than what it does with
    a few hundred numbers. Of a call that is marked so it makes one kernel, loops and all. There must be no
    Fourier transform, sum over an axis, sorting or scattering in it: of these XLA has other kernels.

    The function is left as it is under `jax.vmap`, as a kernel with one large result may be refused, and in
    programs of users, which may hold large constants: XLA stops the process at one that a kernel is given.
    """

    @functools.wraps(function)
    def told(*arrays):
        wanted = _TRIED and _kernels["made"] and _of_arguments.get()
        if not wanted or jax.default_backend() != "cpu":
            return function(*arrays)
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*arrays)
        leaves = [*closed.consts, *jax.tree.leaves(arrays)]
        passed = [k for k, each in enumerate(leaves) if isinstance(each, jax.core.Tracer)]
        if not passed:
            return function(*arrays)

        def plain(*given):
            whole = list(leaves)
            for k, each in zip(passed, given, strict=True):
                whole[k] = each
            known = len(closed.consts)
            program = jax.extend.core.ClosedJaxpr(closed.jaxpr, whole[:known])
            return tuple(jax.extend.core.jaxpr_as_fun(program)(*whole[known:]))

        found = _kernel(plain)(*(leaves[k] for k in passed))
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return told


def _kernel(plain):
    """The marked call of a function of arrays that gives a tuple of them."""

    def kernel_of_loops(*given):
        first, *others = plain(*given)
        # XLA's emitter stops the process at an array that a kernel does not read.
        corner = jax.lax.slice(first, (0,) * first.ndim, (1,) * first.ndim)
        none = jnp.where(functools.reduce(jnp.logical_or, map(_false, given)), 0, corner)
        return [jax.lax.dynamic_update_slice(first, none, (0,) * first.ndim), *others]

    @jax.custom_batching.custom_vmap
    def marked(*given):
        # And at one that it finds to be constant: of our own programs these are small ones.
        never = _false(max(given, key=jnp.size))
        hidden = [
            each if jnp.size(each) >= _SMALL else jnp.where(never, jnp.zeros_like(each), each)
            for each in given
        ]
        first, *others = jax.jit(kernel_of_loops)(*hidden)
        # What is marked is the call that makes the value.
        return set_xla_metadata(first, inlineable="false", xla_cpu_small_call="true"), *others

    @marked.def_vmap
    def _(size, in_batched, *given):
        del size
        found = jax.vmap(plain, in_axes=[0 if batched else None for batched in in_batched])(*given)
        return found, (True,) * len(found)

    return marked


def _false(array):
    """() bool, never true, which XLA does not find out as long as it does not know the array."""
    number = jnp.real(array.ravel()[0]).astype(jnp.float32)
    word = jax.lax.bitcast_convert_type(number, jnp.uint32)
    return (word | 1) == 0


def of_arguments() -> bool:
    """Whether what is being traced has its arrays from arguments; not known of a user's program."""
    return _of_arguments.get()


@contextlib.contextmanager
def from_arguments(known: bool):
    """While a program is traced: whether all its arrays come from arguments."""
    token = _of_arguments.set(known)
    try:
        yield
    finally:
        _of_arguments.reset(token)


def kernels_made() -> bool:
    """Whether `in_one_kernel` does anything."""
    return _kernels["made"]


def give_up_kernels() -> bool:
    """Leave functions as they are from now on, for a compiler that cannot; whether there were kernels."""
    before, _kernels["made"] = _kernels["made"], False
    return before


def samples_together(function):
    """`function`, which under `jax.vmap` over blocks of samples is called once, with the samples of all.

    It takes (steps, num_samples) arrays, (steps, 1) ones and numbers, and gives a tuple of (num_samples,)
    arrays.
    """
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def _(blocks, in_batched, *arrays):
        samples = max(one.shape[-1] for one in arrays if one.ndim > 1)

        def together(one, batched):
            if not batched and (one.ndim < 2 or one.shape[-1] == 1):
                return one
            steps = one.shape[batched:-1] or (1,)
            one = jnp.broadcast_to(
                one.reshape(blocks if batched else 1, *steps, -1), (blocks, *steps, samples)
            )
            return jnp.moveaxis(one, 0, 1).reshape(*steps, blocks * samples)

        found = [one.reshape(blocks, samples) for one in mapped(*map(together, arrays, in_batched))]
        return tuple(found), (True,) * len(found)

    return mapped
