"""Statistics of a batch of one, found in the traced program of a loss of one example.

Batch norm of Keras, Haiku or Equinox takes the mean and the variance over a leading axis of size 1, which are
not those of training or evaluation elsewhere. That costs no privacy, and spoils models.
"""

from .programs import flow

# After these a statistic is one of many features.
_MIXING = frozenset(("dot_general", "conv_general_dilated", "ragged_dot_general"))
_SUMS = frozenset(("reduce_sum", "psum"))
_ROOTS = frozenset(("rsqrt", "sqrt", "pow"))
_EXAMPLE = frozenset(("example",))


def check(jaxpr, number: int) -> None:
    """ValueError for a loss, of `number` parameters and one example, that takes statistics of the example.

    A variance over a leading axis of size 1 is a root of a value of two sums over that axis, with another
    axis left: a mean over all axes is no batch norm, and a norm is of one sum.
    """
    shapes: list[tuple[int, ...]] = []  # of the operands of sums so far

    def step(eqn, results):
        """Add a sum over a leading axis of size 1, by its number, to what its result is computed of."""
        name, sources = eqn.primitive.name, frozenset().union(*results)
        if name in _MIXING:
            return [each & _EXAMPLE for each in results]
        if name in _SUMS and sources & _EXAMPLE and _is_over_one(eqn):
            shapes.append(tuple(eqn.invars[0].aval.shape))
            return [each | {len(shapes) - 1} for each in results]
        if name in _ROOTS and sources & _EXAMPLE and len(sums := sources - _EXAMPLE) > 1:
            raise ValueError(
                "loss must not divide by the statistics of a batch of one example, takes a mean and a "
                f"variance over the first axis of {shapes[max(sums)]}: batch norm; use group or layer norm, "
                "stored statistics (training=False), or remove the axis where it is no batch"
            )
        return results

    flow(jaxpr, [_EXAMPLE if place >= number else frozenset() for place in range(len(jaxpr.invars))], step)


def _is_over_one(eqn) -> bool:
    """Return whether it sums over a leading axis of size 1 and leaves an axis of more entries."""
    shape, axes = eqn.invars[0].aval.shape, eqn.params["axes"]
    rest = [size for axis, size in enumerate(shape) if axis not in axes]
    return 0 in axes and shape[0] == 1 and any(size > 1 for size in rest)
