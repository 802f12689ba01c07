"""Traced programs: evaluation equation by equation, whether they return arguments unchanged, convolutions.

The gradient of a grouped convolution's kernel groups the batch, and `jax.vmap` adds the rows to these groups.
XLA may compute it as one convolution of all groups with zeros in between: zero times a value of one row that
is not finite is NaN in all of them. As groups of features the rows stay apart.

XLA's pass for the fast layout (images batch, places, channels; kernels window, inputs, outputs) visits only
the outermost program: convolutions of a backward pass in a loop over microbatches take ten times as long
without this.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from .rows_apart import programs_in

# Programs within programs, whose arguments are the equation's in the same order.
_CALLS = {"jit", "pjit", "checkpoint", "remat2", "closed_call", "core_call", "custom_jvp_call"}


def evaluate(jaxpr, consts, args, run):
    """Return the results of a program, each equation by `run(place, equation, values)`, a list."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(var):
        return var.val if hasattr(var, "val") else env[var]

    for place, eqn in enumerate(jaxpr.eqns):
        env.update(zip(eqn.outvars, run(place, eqn, [read(var) for var in eqn.invars]), strict=True))
    return [read(var) for var in jaxpr.outvars]


def flow(jaxpr, given: list[frozenset], rule: Callable[[Any, list[frozenset]], list[frozenset]]) -> list:
    """Return what each result of a program depends on, of the same of its arguments: sets of sources.

    `rule` is (equation, what its arguments together depend on, for each result) -> the same for its results.
    Equations that run programs are followed into them, loops for two passes.
    """

    def run(_, eqn, values):
        values = [each if isinstance(each, frozenset) else frozenset() for each in values]  # else literals
        inside = programs_in(eqn.params)
        if eqn.primitive.name == "cond":
            values = values[1:]
        found = [_of_inner(eqn, getattr(each, "jaxpr", each), values, rule) for each in inside]
        if not inside or any(len(results) != len(eqn.outvars) for results in found):
            found = [[frozenset().union(*values, *itertools.chain(*found))] * len(eqn.outvars)]
        return rule(eqn, [frozenset().union(*several) for several in zip(*found, strict=True)])

    nothing = frozenset()
    results = evaluate(jaxpr, [nothing] * len(jaxpr.constvars), given, run)
    return [each if isinstance(each, frozenset) else nothing for each in results]


def _of_inner(eqn, jaxpr, values: list[frozenset], rule) -> list[frozenset]:
    """Return `flow` of a program that an equation runs; of all arguments where their order is another."""
    if len(jaxpr.invars) != len(values):
        values = [frozenset().union(*values)] * len(jaxpr.invars)
    results = flow(jaxpr, values, rule)
    if eqn.primitive.name == "scan":  # what the first pass carries to the next
        first, carry = of_scan(eqn)
        carried = [a | b for a, b in zip(values[first : first + carry], results, strict=False)]
        results = flow(jaxpr, [*values[:first], *carried, *values[first + carry :]], rule)
    return results


def shapes(tree, axes: int = 0, dtype=None) -> Any:
    """Return the shapes and dtypes of arrays, without their first `axes`; with `dtype` all of that dtype."""

    def shape(leaf) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(leaf)[axes:], dtype or jnp.result_type(leaf))

    return jax.tree.map(shape, tree)


def bind(eqn, values):
    """Return the results of one equation."""
    with eqn.ctx.manager:
        given = eqn.primitive.get_bind_params(eqn.params)
        # Functions and parameters apart in JAX before 0.9.
        functions, params = given if isinstance(given, tuple) else ((), given)
        found = eqn.primitive.bind(*functions, *values, **params)
    return found if eqn.primitive.multiple_results else [found]


@dataclass(frozen=True, eq=False)
class Traced:
    """A function of pytrees as it was traced: what is checked is what is computed, and traced once.

    Attributes:
      closed: its program, of the leaves of all.
      structure: of what it returns.
      alone: of a loss that `check_loss` let through, whether examples are computed one at a time; else None.
    """

    closed: core.ClosedJaxpr
    structure: Any
    alone: bool | None = None

    @classmethod
    def of(cls, function, *args) -> tuple["Traced", Any]:
        """Return a traced function of arrays or shapes, and the shapes of what it returns."""
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        return cls(closed, jax.tree.structure(shape)), shape

    def __call__(self, *args):
        return self.by(lambda _, *each: bind(*each), *args)

    def by(self, run, *args):
        """Return what it returns, each equation by `run(place, equation, values)`, as `evaluate`."""
        found = evaluate(self.closed.jaxpr, self.closed.consts, jax.tree.leaves(args), run)
        return jax.tree.unflatten(self.structure, found)


_REMAT = "checkpoint", "remat", "remat2"


def repeatable(eqn) -> core.ClosedJaxpr | None:
    """Return the program that a `scan` or a `jax.checkpoint` runs, None for other equations."""
    if eqn.primitive.name == "scan":
        return eqn.params["jaxpr"]
    if eqn.primitive.name in _REMAT:
        inside = eqn.params["jaxpr"]
        return inside if isinstance(inside, core.ClosedJaxpr) else core.ClosedJaxpr(inside, ())
    return None


def of_scan(eqn) -> tuple[int, int]:
    """Return how many arguments of a `scan` are the same in every pass, and how many after them are carried.

    By their axes, as the parameters of the equation differ between versions of JAX: what is scanned over, and
    what is stacked, has one more than in a pass.
    """
    inside = eqn.params["jaxpr"].jaxpr

    def by_pass(outside, inside) -> int:
        pairs = zip(outside, inside, strict=True)
        return sum(len(a.aval.shape) > len(b.aval.shape) for a, b in pairs)

    carry = len(eqn.outvars) - by_pass(eqn.outvars, inside.outvars)
    return len(eqn.invars) - by_pass(eqn.invars, inside.invars) - carry, carry


def again(eqn, values, run: Callable[..., tuple[list, Any]], more=None) -> tuple[list, Any]:
    """Return results of a `scan` or a `jax.checkpoint`, and what is read in it.

    Results that are arguments, as transformations of Flax return the state of a module, are these arguments.

    Args:
      eqn: the equation.
      values: its arguments.
      run: (program, its arguments, `more` of the pass) -> (its results, arrays to return as well).
      more: pytree of arrays; of a scan with an axis for the passes, which also the arrays returned have.
    """
    inside, spread = repeatable(eqn), []
    consts, carry = of_scan(eqn) if eqn.primitive.name == "scan" else (0, 0)
    handed = {at: _argument(eqn, at) for at in range(carry, len(eqn.outvars))}

    def noted(found, read):
        unique, rebuild = _alone(read)
        spread[:] = [rebuild]
        return [each if handed.get(at) is None else None for at, each in enumerate(found)], unique

    def whole(found):
        places = (handed.get(at) for at in range(len(found)))
        return [each if at is None else values[at] for at, each in zip(places, found, strict=True)]

    if eqn.primitive.name != "scan":
        cse = eqn.params["prevent_cse"]
        cse = any(cse) if isinstance(cse, tuple) else cse
        once = jax.checkpoint(
            lambda args, more: noted(*run(inside, args, more)), prevent_cse=cse, policy=eqn.params["policy"]
        )
        found, read = once(values, more)
        return whole(found), spread[0](read)

    def one(carried, each):
        found, read = noted(*run(inside, [*values[:consts], *carried, *each[0]], each[1]))
        return found[:carry], (found[carry:], read)

    first, scanned = values[consts : consts + carry], values[consts + carry :]
    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carried, (stacked, read) = jax.lax.scan(one, first, (scanned, more), **options)
    return whole([*carried, *stacked]), spread[0](read)


def _alone(tree) -> tuple[list, Callable[[list], Any]]:
    """Return (the arrays of a pytree, each once, (arrays like these) -> the pytree of them)."""
    leaves, structure = jax.tree.flatten(tree)
    unique = {id(leaf): leaf for leaf in leaves}
    places = [list(unique).index(id(leaf)) for leaf in leaves]
    return list(unique.values()), lambda found: jax.tree.unflatten(structure, [found[at] for at in places])


def pairs(function: Callable[..., tuple[list, list]], *args) -> list[bool]:
    """Return for each pair of values in the two lists of `function(*args)` whether both are one argument.

    A computed value is another one, even if it is equal. `args`: pytrees of arrays or `jax.ShapeDtypeStruct`.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    sources = [_source(jaxpr, var) for var in jaxpr.outvars]
    half = len(sources) // 2
    return [a is not None and a == b for a, b in zip(sources[:half], sources[half:], strict=True)]


def _source(jaxpr, var) -> int | None:
    """Return the number of the argument that a value is, or None."""
    while not isinstance(var, core.Literal) and var not in jaxpr.invars:
        made = next((eqn for eqn in jaxpr.eqns if var in eqn.outvars), None)
        place = None if made is None else _argument(made, made.outvars.index(var))
        if made is None or place is None:
            return None
        var = made.invars[place]
    return None if isinstance(var, core.Literal) else jaxpr.invars.index(var)


def _argument(eqn, output: int) -> int | None:
    """Return the number of the argument that an output of an equation is, or None."""
    name, params = eqn.primitive.name, eqn.params
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if inner is None or name not in _CALLS | {"scan"}:
        return None
    inner = getattr(inner, "jaxpr", inner)
    place = _source(inner, inner.outvars[output])
    if name != "scan" or place is None:
        return place
    consts, carry = of_scan(eqn)
    if output < carry:
        return place if place == consts + output else None
    # Rows of an array that is scanned over; a constant of all rows becomes another array.
    return place if place >= consts + carry else None


# Programs within programs, whose arguments are the equation's in the same order.
_INLINED = frozenset("jit pjit closed_call custom_jvp_call custom_vjp_call".split())


def in_fast_layout(function):
    """Return `function` of arrays with its convolutions in the fast layout."""
    return _rewritten(function, _turned)


def without_batch_groups(function):
    """Return `function` of one example with groups of features in place of groups of the batch."""
    return _rewritten(function, _ungrouped)


def _rewritten(function, rewrite):
    """Return `function`, each equation of its program by `rewrite(equation, values)`."""

    def each(_, eqn, values):
        inside = programs_in(eqn.params)
        if eqn.primitive.name not in _INLINED or len(inside) != 1:
            return rewrite(eqn, values)
        return evaluate(inside[0].jaxpr, inside[0].consts, values, each)

    return lambda *args: Traced.of(function, *args)[0].by(each, *args)


def _turned(eqn, values):
    if eqn.primitive.name != "conv_general_dilated":
        return bind(eqn, values)
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


def _ungrouped(eqn, values):
    inside = [inner for inner in programs_in(eqn.params) if _has_batch_groups(inner)]
    if inside and (again := repeatable(eqn)) is not None and eqn.primitive.name != "scan":
        return jax.checkpoint(without_batch_groups(core.jaxpr_as_fun(again)))(*values)
    if inside:
        raise ValueError(
            f"loss must not have a grouped convolution within {eqn.primitive.name}, where its gradient mixes "
            "rows"
        )
    groups = eqn.params.get("batch_group_count", 1)
    if groups == 1:
        return bind(eqn, values)
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
