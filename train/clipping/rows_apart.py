"""Whether a loss of one example stays one of one example when `jax.vmap` computes many of them together.

`jax.vmap` replaces each primitive of a traced program by that primitive's rule for batches. The tables below
list the primitives of JAX whose rule computes a row from that row alone. Of the others a few (`_alone`) are
computed one example at a time, without a rule for batches. Every other primitive is refused: a callback, a
foreign kernel or a custom rule receives all rows, a collective reads the other rows of its axis, and
generators other than threefry draw the bits of a batch from its first row's key. One example could then
change what others contribute, and clipping would not bound it.

`regularized_incomplete_beta` is not in the tables: JAX iterates it until all rows have converged. The tables
hold the primitives themselves, as another library may use a name again. Not noticed: a rule of JAX that was
replaced, and a loss that computes otherwise when it is traced again.
"""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

APART = {
    "acts on each element alone": """
        abs acos acosh add add_jaxvals and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
        clz complex conj convert_element_type cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1
        floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2
        logistic lt lt_to max min mul ne neg nextafter not one_minus_square or polygamma population_count
        pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
        shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta""",
    "reduces, accumulates or sorts along axes of one example": """
        argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce_and reduce_max reduce_min reduce_or
        reduce_prod reduce_sum reduce_xor sort top_k""",
    "is a constant": "empty2 iota",
    "rearranges one example": """
        bitcast_convert_type broadcast_in_dim concatenate pad reshape rev slice split squeeze
        stack tile transpose unstack""",
    "reads or writes one example at places that are clamped to it, or dropped outside of it": """
        dynamic_slice dynamic_update_slice gather scatter scatter_add scatter_max scatter_min scatter_mul
        scatter_sub""",
    "contracts axes of one example": "conv_general_dilated dot_general",
    "slides a window over one example": """
        reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add select_and_scatter_add""",
    "transforms one example": "fft",
    "factorizes matrices, or solves with them, one at a time": """
        cholesky eig eigh hessenberg householder_product lu qr schur svd triangular_solve tridiagonal
        tridiagonal_solve""",
    "draws from the row's own key, which is threefry's": """
        random_bits random_fold_in random_gamma random_seed random_split threefry2x32""",
    "hands its operand on": "copy device_put name optimization_barrier sharding_constraint",
}
"""Reason -> names of primitives, as the public modules of JAX have them."""

PROGRAMS = """
    closed_call cond custom_jvp_call custom_vjp_call jit linear_solve reduce reduce_window remat scan while"""
"""Names of primitives that run programs, each of which must keep rows apart in turn."""


class OneAtATimeError(ValueError):
    """A loss with a primitive that keeps examples apart only where they are computed one after the other."""


_THREEFRY = "threefry2x32"
_MESH = AbstractMesh((1,), ("x",), axis_types=(AxisType.Explicit,))
_EXPLICIT = NamedSharding(_MESH, PartitionSpec())


@functools.cache
def _tables() -> tuple[frozenset, frozenset]:
    """Return the primitives that keep rows apart, and those that do if their programs do."""
    running = _public(PROGRAMS) | _of(jax.checkpoint(jnp.negative))
    # Those that no public module names are taken from programs that have them.
    apart = _public(" ".join(APART.values())).union(
        _of(lambda x: checkpoint_name(x, "x")),
        _of(lambda x: lax.platform_dependent(x, cpu=jnp.negative, default=jnp.negative)),
        _of(lambda x: jax.random.key_data(jax.random.clone(jax.random.key(x.astype(int), impl=_THREEFRY)))),
        _of(lambda x: jax.random.wrap_key_data(jnp.stack([x, x]).astype(jnp.uint32), impl=_THREEFRY)),
        _of(lambda x: jax.sharding.reshard(x, _EXPLICIT)),
        # These return nothing that others could read.
        _of(lambda x: jax.debug.callback(lambda x: None, x)),
        _of(lambda x: jax.debug.print("{}", x)),
    )
    if jax.default_backend() == "tpu":
        apart -= {primitives.eigh_p, primitives.svd_p}  # iterated there until all matrices have converged
    return apart - running, running


@functools.cache
def _alone() -> frozenset:
    """Return primitives of JAX whose rules for batches are not known to keep rows apart, functions all.

    One example after the other, they have no other rows. Callbacks and foreign kernels may keep a state, and
    are refused.
    """
    ragged = _of(lambda x: lax.ragged_dot(x[None, None], x[None, None, None], jnp.ones(1, int)))
    return _public("approx_top_k regularized_incomplete_beta") | (ragged - _tables()[0] - _tables()[1])


def check(jaxpr, *, one_at_a_time: bool) -> bool:
    """Return whether examples must be computed one at a time, with a warning of what that costs.

    Raises:
      OneAtATimeError: a program that must, where that is not allowed.
      ValueError: any other program that may mix rows.
    """
    why = why_not(jaxpr)
    if why is None:
        return False
    if why_not(jaxpr, _alone()) is not None:
        raise ValueError(f"loss must keep examples apart: {why}")
    name = why.split()[0]
    if not one_at_a_time:
        raise OneAtATimeError(
            f"loss must keep examples apart, {name} does one at a time: clipping must be 'per_example'"
        )
    warnings.warn(
        f"loss uses {name}, which is not known to keep the examples of a batch apart: they are computed one "
        "at a time, and a step takes as long as its examples one after the other",
        stacklevel=2,
    )
    return True


def _public(names: str) -> frozenset:
    """Return the primitives of these names that this version of JAX has."""
    found = (getattr(module, f"{name}_p", None) for name in names.split() for module in (primitives, lax))
    return frozenset(each for each in found if each is not None)


def _of(function) -> frozenset:
    """Return the primitives of the program of a function of a number."""
    return frozenset(eqn.primitive for eqn in jax.make_jaxpr(function)(0.0).jaxpr.eqns)


def why_not(jaxpr, allowed: frozenset = frozenset()) -> str | None:
    """Return a clause on what in a traced program may mix rows; None where nothing but `allowed` does."""
    threefry = jax.random.key(0, impl=_THREEFRY).dtype
    apart, running = _tables()
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for var in (*eqn.invars, *eqn.outvars):
            kind = getattr(var.aval, "dtype", None)
            if kind is not None and jnp.issubdtype(kind, jax.dtypes.prng_key) and kind != threefry:
                return f"keys of {kind} draw for a whole batch at once; use those of threefry2x32"
        inside = programs_in(eqn.params)
        known = eqn.primitive in apart | allowed or (inside and eqn.primitive in running)
        # A sum over an axis that the loss itself has named; with a name it would be over the examples.
        own = eqn.primitive is primitives.psum_p and all(type(axis) is int for axis in eqn.params["axes"])
        if not (known or own):
            return (
                f"{eqn.primitive.name} is not one of the primitives known to compute each row alone; "
                "compute it before training, as part of the data, or by functions of jax.numpy and jax.nn"
            )
        if (number := _num_devices(eqn.params)) > 1:
            return (
                f"{eqn.primitive.name} would leave {number} devices to the compiler; shard parameters alone: "
                "each device of a mesh computes examples of its own"
            )
        for inner in inside:
            if (found := why_not(inner, allowed)) is not None:
                return found
    return None


def _num_devices(params) -> int:
    """Return the most devices that a sharding among the parameters of an equation has; 1 without one."""
    meshes = [each.mesh for each in jax.tree.leaves(params) if isinstance(each, NamedSharding)]
    manual = AxisType.Manual  # of an axis that the programs here have taken over
    axes = [zip(mesh.axis_sizes, mesh.axis_types, strict=True) for mesh in meshes]
    return max((math.prod(size for size, kind in each if kind != manual) for each in axes), default=1)


def programs_in(params) -> list:
    """Return the programs among the parameters of an equation, with their constants where they have some."""
    leaves = jax.tree.leaves(params, is_leaf=is_program)
    return [leaf for leaf in leaves if is_program(leaf)]


def is_program(part) -> bool:
    """Return whether a parameter of an equation is a program."""
    return hasattr(getattr(part, "jaxpr", part), "eqns")
