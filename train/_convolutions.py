"""Convolutions in the one layout that XLA is fast with on CPUs.

Its pass that brings convolutions into that layout (images batch, places, channels; kernels window, inputs,
outputs) looks at the outermost program only. Those of a backward pass in a loop over microbatches keep
theirs, and take ten times as long.
"""

import jax
import numpy as np
from jax import lax

from . import _uses


def in_fast_layout(function):
    """`function` of arrays, with its convolutions between transpositions."""

    def run(*args):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        found = _uses.evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), _run)
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return run


def _run(_, eqn, values):
    if eqn.primitive.name != "conv_general_dilated":
        return _uses.bind(eqn, values)
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
