"""Statistics of a batch of one, found in the traced program of a loss of one example.

Batch norm of Keras, Haiku or Equinox takes the mean and the variance over a leading axis of size 1, which are
not those of training or evaluation elsewhere. That costs no privacy, and spoils models.
"""

from typing import Any, NamedTuple

from . import programs as _programs
from .rows_apart import programs_in

# After these a statistic is one of many features.
_MIXING = frozenset(("dot_general", "conv_general_dilated", "ragged_dot_general"))
_SUMS = frozenset(("reduce_sum", "psum"))
_ROOTS = frozenset(("rsqrt", "sqrt", "pow"))


class _Value(NamedTuple):
    """What a value of a program depends on."""

    of_example: bool = False
    sums: frozenset[int] = frozenset()
    """Numbers of the sums over a leading axis of size 1 that it is computed of, entry by entry."""


def check(jaxpr, number: int) -> None:
    """ValueError for a loss, of `number` parameters and one example, that takes statistics of the example.

    A variance over a leading axis of size 1 is a root of a value of two sums over that axis, with another
    axis left: a mean over all axes is no batch norm, and a norm is of one sum.
    """
    _walk(jaxpr, [_Value(of_example=place >= number) for place in range(len(jaxpr.invars))], [])


def _union(values) -> _Value:
    return _Value(any(each.of_example for each in values), frozenset().union(*(each.sums for each in values)))


def _walk(jaxpr, given: list[_Value], shapes: list) -> list[_Value]:
    """Return what the results depend on; `shapes` are those of the operands of sums so far."""

    def run(place, eqn, values):
        values = [each if isinstance(each, _Value) else _Value() for each in values]  # literals
        return _step(eqn, values, shapes)

    results = _programs.evaluate(jaxpr, [_Value()] * len(jaxpr.constvars), given, run)
    return [each if isinstance(each, _Value) else _Value() for each in results]


def _step(eqn, values: list[_Value], shapes: list) -> list[_Value]:
    inside = programs_in(eqn.params)
    if inside:
        return _inner(eqn, inside, values, shapes)
    name, whole = eqn.primitive.name, _union(values)
    if name in _MIXING:
        whole = whole._replace(sums=frozenset())
    elif name in _SUMS and whole.of_example and _is_over_one(eqn):
        whole = whole._replace(sums=whole.sums | {len(shapes)})
        shapes.append(tuple(eqn.invars[0].aval.shape))
    elif name in _ROOTS and whole.of_example and len(whole.sums) > 1:
        raise ValueError(
            "loss must not divide by the statistics of a batch of one example, takes a mean and a variance "
            f"over the first axis of {shapes[max(whole.sums)]}: batch norm; use group or layer norm, stored "
            "statistics (training=False), or remove the axis where it is no batch"
        )
    return [whole] * len(eqn.outvars)


def _is_over_one(eqn) -> bool:
    """Return whether it sums over a leading axis of size 1 and leaves an axis of more entries."""
    shape, axes = eqn.invars[0].aval.shape, eqn.params["axes"]
    rest = [size for axis, size in enumerate(shape) if axis not in axes]
    return 0 in axes and shape[0] == 1 and any(size > 1 for size in rest)


def _inner(eqn, inside: list[Any], values: list[_Value], shapes: list) -> list[_Value]:
    """Return the values of an equation that runs programs; of all arguments where their order is another."""
    if eqn.primitive.name == "cond":
        values = values[1:]
    results = []
    for each in inside:
        jaxpr = getattr(each, "jaxpr", each)
        given = values if len(jaxpr.invars) == len(values) else [_union(values)] * len(jaxpr.invars)
        outputs = _walk(jaxpr, given, shapes)
        if eqn.primitive.name == "scan":  # what the first pass carries to the next
            consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
            carried = [_union(pair) for pair in zip(given[consts:], outputs[:carry], strict=False)]
            outputs = _walk(jaxpr, [*given[:consts], *carried, *given[consts + carry :]], shapes)
        results.append(outputs)
    if any(len(outputs) != len(eqn.outvars) for outputs in results):
        return [_union([*values, *(each for outputs in results for each in outputs)])] * len(eqn.outvars)
    return [_union(several) for several in zip(*results, strict=True)]
