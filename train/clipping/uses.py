"""Taps: the one equation of a loss's program that uses a parameter.

The gradient of a matrix W in `y = x W` is the outer product of x and the cotangent of y. A *tap* is such an
equation: x is read from it, and the cotangent is the gradient with respect to a zero that is added to y. That
is the gradient of W only if nothing else uses W. A parameter has a tap where its only use, after changes of
shape or dtype, is one equation of a known kind; others are differentiated as they are.
"""

import collections
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import programs as _programs
from .equations import KNOWN, Equation, Lookup

# Primitives that are replaced by the program that they call.
_CALLS = frozenset(("jit", "pjit", "closed_call"))


def _back(eqn) -> Callable[[Any], Any] | None:
    """Return the inverse of an equation that changes only shape, order or dtype; None for any other."""
    before, after, name = eqn.invars[0].aval, eqn.outvars[0].aval, eqn.primitive.name
    if name == "transpose":
        return lambda array: array.transpose(np.argsort(eqn.params["permutation"]))
    if (name == "reshape" and eqn.params["dimensions"] is None) or name in ("squeeze", "copy", "copy_p"):
        return lambda array: array.reshape(before.shape)
    if name == "convert_element_type" and all(
        jnp.issubdtype(kind.dtype, jnp.floating) for kind in (before, after)
    ):
        return lambda array: array
    return None


class Tap(NamedTuple):
    """The equation that uses a parameter: its number in the program, and that of the parameter."""

    leaf: int
    place: int
    equation: Equation
    back: tuple[Callable[[Any], Any], ...]
    """Inverses of the changes of shape before it, the last first."""

    def gradient(self, array) -> jax.Array:
        """Return a gradient as `equation` has it, in the shape of the parameter."""
        array = self.equation.laid_out(array)
        for undo in self.back:
            array = undo(array)
        return array


@dataclass(frozen=True)
class Program:
    """A loss of one example as equations, with a result of this `structure`."""

    closed: Any  # the traced program of parameters and example; calls inlined
    number: int  # of leaves of the parameters
    taps: tuple[Tap, ...]  # at most one a leaf
    structure: Any

    @property
    def computed(self) -> int:
        """Number of entries computed from one example."""
        jaxpr = self.closed.jaxpr
        of_example = _reached(jaxpr, self.number)
        outs = (var for eqn in jaxpr.eqns for var in eqn.outvars if var in of_example)
        return sum(math.prod(var.aval.shape) for var in outs)

    def tapped(self, params, example, added):
        """Return the loss's result and the other argument of each tap's equation.

        `params` and `example` are lists of leaves; `added` has an array a tap, added to the result of its
        equation.
        """
        more = dict(zip((tap.place for tap in self.taps), added, strict=True))
        beside = {}

        def run(place, eqn, values):
            found = _programs.bind(eqn, values)
            if place not in more:
                return found
            tap = next(tap for tap in self.taps if tap.place == place)
            beside[place] = tap.equation.read(values)
            return [found[0] + more[place]]

        jaxpr = self.closed.jaxpr
        found = _programs.evaluate(jaxpr, self.closed.consts, [*params, *example], run)
        return jax.tree.unflatten(self.structure, found), [beside[tap.place] for tap in self.taps]

    def added(self) -> list[jax.Array]:
        """Return zeros for `added`."""
        outs = (self.closed.jaxpr.eqns[tap.place].outvars[0].aval for tap in self.taps)
        return [jnp.zeros(aval.shape, aval.dtype) for aval in outs]


def traced(loss: Callable[..., Any], params, example, is_tapped: Callable[[Equation], bool]) -> Program:
    """Return the program of `loss(params, example)`, pytrees of arrays or shapes, tapped by `is_tapped`."""
    shaped = functools.partial(
        jax.tree.map, lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf))
    )
    given, structure = jax.tree.flatten((shaped(params), shaped(example)))
    outputs = jax.tree.structure(jax.eval_shape(loss, params, example))

    def flat(*leaves):
        closed = jax.make_jaxpr(lambda *args: loss(*jax.tree.unflatten(structure, args)))(*given)
        return _programs.evaluate(closed.jaxpr, closed.consts, leaves, _inlined)

    closed, number = jax.make_jaxpr(flat)(*given), len(jax.tree.leaves(params))
    users, of_example = _users(closed.jaxpr), _reached(closed.jaxpr, number)
    found = (_tap(closed.jaxpr, leaf, users, of_example) for leaf in range(number))
    taps = tuple(tap for tap in found if tap is not None and is_tapped(tap.equation))
    # Two parameters of one equation: it is a function of both.
    times = collections.Counter(tap.place for tap in taps)
    return Program(closed, number, tuple(tap for tap in taps if times[tap.place] == 1), outputs)


def _users(jaxpr):
    """Variable -> the (equation, argument) pairs that read it; (None, None) where it is returned."""
    users = collections.defaultdict(list)
    for place, eqn in enumerate(jaxpr.eqns):
        for position, var in enumerate(eqn.invars):
            if not hasattr(var, "val"):
                users[var].append((place, position))
    for var in jaxpr.outvars:
        if not hasattr(var, "val"):
            users[var].append((None, None))
    return users


def _reached(jaxpr, number: int) -> set:
    """Variables that depend on the example, the arguments after the first `number`."""
    reached = set(jaxpr.invars[number:])
    for eqn in jaxpr.eqns:
        if any(not hasattr(var, "val") and var in reached for var in eqn.invars):
            reached.update(eqn.outvars)
    return reached


def _tap(jaxpr, leaf: int, users, of_example) -> Tap | None:
    var, back = jaxpr.invars[leaf], []
    while True:
        if len(users[var]) != 1:
            return None
        place, position = users[var][0]
        if place is None:  # it is returned
            return None
        eqn = jaxpr.eqns[place]
        undo = _back(eqn) if len(eqn.invars) == 1 else None
        if undo is None:
            break
        back.insert(0, undo)
        var = eqn.outvars[0]
    find = KNOWN.get(eqn.primitive.name)
    equation = None if find is None else find(eqn, position)
    # A result that is the same for all examples would be stored for each; a lookup has a few integers.
    if equation is None or not (eqn.outvars[0] in of_example or isinstance(equation, Lookup)):
        return None
    return Tap(leaf, place, equation, tuple(back))


def _inlined(place, eqn, values):
    if eqn.primitive.name in _CALLS:
        inner = eqn.params["jaxpr"]
        return _programs.evaluate(inner.jaxpr, inner.consts, values, _inlined)
    return _programs.bind(eqn, values)
