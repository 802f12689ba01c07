"""Taps: the one equation of a loss's program that uses a parameter.

The gradient of a matrix W in `y = x W` is the outer product of x and the cotangent of y. A *tap* is such an
equation: x is read from it, and the cotangent is the gradient with respect to a zero that is added to y. That
is the gradient of W only if nothing else uses W. A parameter has a tap where its only use, after changes of
shape or dtype, is one equation of a known kind; others are differentiated as they are. The equation may be in
`jax.lax.scan` or `jax.checkpoint`, and in several of them: over layers, each with its own matrix, the
gradient has an axis more; a matrix of all passes, as of a recurrent layer, has the sum of their outer
products.
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

from ..procedures.by_device import is_shard, whole
from . import programs as _programs
from .equations import Equation, Lookup, Repeated, Stacked, innermost, is_lookup, known, num_stacked, undone

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
    """The equation that uses a parameter, and where it is: within programs within programs.

    Attributes:
      path: numbers of equations: of the program, of the program that this one runs, ..., of the one it is.
      equation: as a whole, with all passes of the scans that it is in.
      back: inverses of the changes of shape before it, the last first.
      result: of all passes, one axis a scan, the outermost first.
    """

    path: tuple[int, ...]
    equation: Equation
    back: tuple[Callable[[Any], Any], ...]
    result: jax.ShapeDtypeStruct

    def gradient(self, array) -> jax.Array:
        """Return a gradient as `equation` has it, in the shape of the parameter."""
        return undone(self.equation.laid_out(array), self.back)


@dataclass(frozen=True)
class Program:
    """A loss of one example as equations."""

    closed: Any  # the traced program of parameters and example; calls inlined
    taps: dict[int, Tap]  # by the number of the parameter
    of_example: frozenset  # results of equations, also within programs, that depend on the example

    @property
    def computed(self) -> int:
        """Number of entries computed from one example."""
        return _computed(self.closed.jaxpr, self.of_example)

    def kept(self, leaves) -> list:
        """Return the parameters, gathered but for those that are gathered at their taps."""
        passes = {leaf: num_stacked(tap.equation) for leaf, tap in self.taps.items()}
        return [
            each if leaf in passes and is_shard(each) and each.is_whole_along(passes[leaf]) else whole(each)
            for leaf, each in enumerate(leaves)
        ]

    def tapped(self, params, example, added):
        """Return the loss and the other argument of each tap's equation, by parameter.

        `params` and `example` are lists of leaves; `added` has an array a tap, added to the result of its
        equation. Arrays of equations in scans have an axis for the passes.
        """
        paths = {leaf: tap.path for leaf, tap in self.taps.items()}
        (value,), beside = self._run(self.closed, [*params, *example], paths, added)
        return value, beside

    def _run(self, closed, args, paths: dict[int, tuple[int, ...]], added):
        """Return (results of a program, what its taps read, by parameter); `paths` begin in it."""
        beside = {}

        def run(place, eqn, values):
            here = {number: path[1:] for number, path in paths.items() if path[0] == place}
            if not here:
                return _programs.bind(eqn, whole(values))
            if all(here.values()):  # further in
                inner = {number: added[number] for number in here}
                found, read = _programs.again(
                    eqn, values, lambda inside, args, inner: self._run(inside, args, here, inner), inner
                )
                beside.update(read)
                return found
            bound = functools.partial(_programs.bind, eqn)
            if any(map(is_shard, values)):  # gathered here, and again in the backward pass
                bound = jax.checkpoint(lambda values: _programs.bind(eqn, whole(values)))
            found = bound(values)
            (number,) = here  # one alone (`traced`)
            beside[number] = innermost(self.taps[number].equation).read(values)
            return [found[0] + added[number]]

        return _programs.evaluate(closed.jaxpr, closed.consts, args, run), beside

    def added(self) -> dict[int, jax.Array]:
        """Return zeros for `added`."""
        return {leaf: jnp.zeros(tap.result.shape, tap.result.dtype) for leaf, tap in self.taps.items()}


def traced(loss: _programs.Traced, number: int, is_tapped: Callable[[Equation], bool]) -> Program:
    """Return the program of a loss of `number` parameters, tapped by `is_tapped`."""

    def flat(*leaves):
        return _programs.evaluate(loss.closed.jaxpr, loss.closed.consts, leaves, _inlined)

    closed = jax.make_jaxpr(flat)(*[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in loss.closed.in_avals])
    jaxpr, of_example = closed.jaxpr, set()

    def noted(eqn, results):
        of_example.update(var for var, sources in zip(eqn.outvars, results, strict=True) if sources)
        return results

    given = [frozenset({"example"} if at >= number else ()) for at in range(len(jaxpr.invars))]
    _programs.flow(jaxpr, given, noted)
    found = {leaf: _use(jaxpr, jaxpr.invars[leaf], of_example) for leaf in range(number)}
    taps = {leaf: tap for leaf, tap in found.items() if tap is not None and is_tapped(tap.equation)}
    # Two parameters of one equation: it is a function of both.
    times = collections.Counter(tap.path for tap in taps.values())
    taps = {leaf: tap for leaf, tap in taps.items() if times[tap.path] == 1}
    return Program(closed, taps, frozenset(of_example))


def _users(jaxpr, var) -> list[tuple[Any, Any]]:
    """Return the (equation, argument) pairs that read a variable; (None, None) where it is returned."""
    read = ((place, eqn.invars) for place, eqn in enumerate(jaxpr.eqns))
    found = [(place, at) for place, invars in read for at, each in enumerate(invars) if each is var]
    return found + [(None, None) for each in jaxpr.outvars if each is var]


def _computed(jaxpr, of_example) -> int:
    entries = 0
    for eqn in jaxpr.eqns:
        inside = _programs.repeatable(eqn)
        if inside is None:
            entries += sum(math.prod(var.aval.shape) for var in eqn.outvars if var in of_example)
        else:
            entries += eqn.params.get("length", 1) * _computed(inside.jaxpr, of_example)
    return entries


def _use(jaxpr, var, of_example) -> Tap | None:
    back = []
    while True:
        users = _users(jaxpr, var)
        if len(users) != 1:
            return None
        place, position = users[0]
        if place is None:  # it is returned
            return None
        eqn = jaxpr.eqns[place]
        undo = _back(eqn) if len(eqn.invars) == 1 else None
        if undo is None:
            break
        back.insert(0, undo)
        var = eqn.outvars[0]
    if (inside := _programs.repeatable(eqn)) is not None:
        found = _use(inside.jaxpr, inside.jaxpr.invars[position], of_example)
        return None if found is None else _in_program(eqn, place, position, found, tuple(back))
    equation = known(eqn, position)
    # A result that is the same for all examples would be stored for each; a lookup has a few integers.
    if equation is None or not (eqn.outvars[0] in of_example or isinstance(equation, Lookup)):
        return None
    aval = eqn.outvars[0].aval
    result = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return Tap((place,), equation, tuple(back), result)


def _in_program(eqn, place: int, position: int, found: Tap, back) -> Tap | None:
    """Return a use in an equation's program as one by the equation itself; None for what passes hand on."""
    path = place, *found.path
    if eqn.primitive.name != "scan":
        return found._replace(path=path, back=found.back + back)
    (consts, carry), passes = _programs.of_scan(eqn), eqn.params["length"]
    result = jax.ShapeDtypeStruct((passes, *found.result.shape), found.result.dtype)
    found = found._replace(path=path, result=result)
    if position < consts:
        return found._replace(equation=Repeated(found.equation, passes), back=found.back + back)
    if position < consts + carry or is_lookup(found.equation):
        return None
    return found._replace(equation=Stacked(found.equation, found.back, passes), back=back)


def _inlined(place, eqn, values):
    if eqn.primitive.name in _CALLS:
        inner = eqn.params["jaxpr"]
        return _programs.evaluate(inner.jaxpr, inner.consts, values, _inlined)
    if _programs.repeatable(eqn) is not None:
        return _programs.again(
            eqn,
            values,
            lambda inside, args, _: (_programs.evaluate(inside.jaxpr, inside.consts, args, _inlined), {}),
        )[0]
    return _programs.bind(eqn, values)
