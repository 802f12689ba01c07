"""Whether a program hands values on as they are: read from its traced form, nothing is run."""

from collections.abc import Callable

import jax
from jax.extend import core

# Programs within programs, whose arguments are the equation's in the same order.
_CALLS = {"jit", "pjit", "checkpoint", "remat2", "closed_call", "core_call", "custom_jvp_call"}


def pairs(function: Callable[..., tuple[list, list]], *args) -> list[bool]:
    """For each pair of values in the two lists that `function(*args)` returns: are both one argument?

    Only what can be seen is True: a value that was computed is another one, even if it comes out equal.

    Args:
      args: pytrees of arrays or `jax.ShapeDtypeStruct`.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    sources = [_source(jaxpr, var) for var in jaxpr.outvars]
    half = len(sources) // 2
    return [a is not None and a == b for a, b in zip(sources[:half], sources[half:], strict=True)]


def _source(jaxpr, var) -> int | None:
    """The number of the argument that a value is; None where it is none."""
    while not isinstance(var, core.Literal) and var not in jaxpr.invars:
        made = next((eqn for eqn in jaxpr.eqns if var in eqn.outvars), None)
        place = None if made is None else _argument(made, made.outvars.index(var))
        if made is None or place is None:
            return None
        var = made.invars[place]
    return None if isinstance(var, core.Literal) else jaxpr.invars.index(var)


def _argument(eqn, output: int) -> int | None:
    """The number of the argument of an equation that one of its outputs is."""
    name, params = eqn.primitive.name, eqn.params
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if inner is None or name not in _CALLS | {"scan"}:
        return None
    inner = getattr(inner, "jaxpr", inner)
    place = _source(inner, inner.outvars[output])
    if name != "scan" or place is None:
        return place
    consts, carry = params["num_consts"], params["num_carry"]
    if output < carry:
        return place if place == consts + output else None
    # Row after row of what is scanned over, or of what is the same for all rows and then another array.
    return place if place >= consts + carry else None
