"""Convolutions in the layout that XLA is fast with on CPUs, and without groups of their batch.

The gradient of a grouped convolution's kernel groups the batch, and `jax.vmap` adds the rows to these groups.
XLA may compute it as one convolution of all groups with zeros in between: zero times a value of one row that
is not finite is NaN in all of them. As groups of features the rows stay apart.

XLA's pass for the fast layout (images batch, places, channels; kernels window, inputs, outputs) visits only
the outermost program: convolutions of a backward pass in a loop over microbatches take ten times as long
without this.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import programs as _programs
from .rows_apart import programs_in

# Programs within programs, whose arguments are the equation's in the same order.
_CALLS = frozenset("jit pjit closed_call custom_jvp_call custom_vjp_call".split())


def in_fast_layout(function):
    """Return `function` of arrays with its convolutions in the fast layout."""
    return _rewritten(function, _turned)


def without_batch_groups(function):
    """Return `function` of one example with groups of features in place of groups of the batch."""
    return _rewritten(function, _ungrouped, _has_batch_groups)


def _rewritten(function, rewrite, is_needed=lambda program: True):
    """Return `function`, each equation of its program by `rewrite`, where that is needed."""

    def run(*args):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        if not is_needed(closed):
            return function(*args)
        found = _programs.evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), rewrite)
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return run


def _turned(_, eqn, values):
    if eqn.primitive.name in _CALLS and len(inside := programs_in(eqn.params)) == 1:
        inner = inside[0]
        return _programs.evaluate(
            getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), values, _turned
        )
    if eqn.primitive.name != "conv_general_dilated":
        return _programs.bind(eqn, values)
    image, kernel, result = (list(spec) for spec in eqn.params["dimension_numbers"])
    # From (batch, channels, places) and (outputs, inputs, window), by axis.
    orders = [spec[:1] + spec[2:] + spec[1:2] for spec in (image, result)]
    turned = values[0].transpose(orders[0]), values[1].transpose(kernel[2:] + [kernel[1], kernel[0]])
    last, places = len(image) - 1, list(range(1, len(image) - 1))
    numbers = lax.ConvDimensionNumbers(
        (0, last, *places), (last, last - 1, *range(last - 1)), (0, last, *places)
    )
    found = eqn.primitive.bind(*turned, **eqn.params | {"dimension_numbers": numbers})
    return [found.transpose(np.argsort(orders[1]))]


def _has_batch_groups(program) -> bool:
    return any(
        eqn.params.get("batch_group_count", 1) > 1 or any(map(_has_batch_groups, programs_in(eqn.params)))
        for eqn in getattr(program, "jaxpr", program).eqns
    )


def _ungrouped(_, eqn, values):
    inside = [inner for inner in programs_in(eqn.params) if _has_batch_groups(inner)]
    if inside:
        inner, name = inside[0], eqn.primitive.name

        def run(*values):
            consts = getattr(inner, "consts", ())
            return _programs.evaluate(getattr(inner, "jaxpr", inner), consts, values, _ungrouped)

        if name in _CALLS:
            return run(*values)
        if name == "remat2":
            return jax.checkpoint(run)(*values)
        raise ValueError(
            f"loss must not have a grouped convolution within {name}, where its gradient mixes rows"
        )
    groups = eqn.params.get("batch_group_count", 1)
    if groups == 1:
        return _programs.bind(eqn, values)
    image, kernel, result = eqn.params["dimension_numbers"]
    # (groups * batch, channels, places) to (batch, places, groups * channels).
    given = jnp.transpose(values[0], image)
    given = given.reshape(groups, -1, *given.shape[1:])
    given = jnp.moveaxis(given, (0, 2), (-2, -1))
    given = given.reshape(*given.shape[:-2], -1)
    last = given.ndim - 1
    numbers = lax.ConvDimensionNumbers((0, last, *range(1, last)), kernel, result)
    changed = {"dimension_numbers": numbers, "batch_group_count": 1, "feature_group_count": groups}
    return [eqn.primitive.bind(given, values[1], **eqn.params | changed)]
