"""Clipping by group: the gradient of each layer, or of each given part, has a clip norm of its own.

The squares of these norms add up to at most that of the clip norm C, so an example still moves the sum by at
most C: the plan's noise and guarantee stay as they are (proofs/released_numbers.md, section 6).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
from flax import nnx

from jaxacct.common import validate as _validate

from .grid import Grid

LAYER = "layer"


@dataclass(frozen=True)
class ClipGroups:
    """Groups of parameters, for `TrainOptions(clip_groups=)`.

    Attributes:
      filters: "layer" (a group of all parameters with the same parent), or nnx filters, one a group: a
        parameter is in the group of the first that selects it; `...` selects what is left. One that the model
        holds in several places counts where `nnx.state` has it.
      norms: of each filter's group, squares adding up to at most that of `clip_norm`; by default `clip_norm`
        / sqrt(groups) for all. Public, as the filters.
    """

    filters: Any = LAYER
    norms: Sequence[float] | None = None


@dataclass(frozen=True)
class Groups:
    """A partition of the leaves of a pytree of parameters.

    Attributes:
      of: group number of each leaf, in the order of `jax.tree.leaves`.
      shares: of the square of the clip norm, one a group; positive, they add up to at most 1, exactly.
    """

    of: tuple[int, ...]
    shares: tuple[Fraction, ...]

    def __post_init__(self):
        if set(self.of) != set(range(len(self.shares))):
            raise ValueError(
                f"groups must have parameters in each of {len(self.shares)} and in no other, got {self.of}"
            )
        exact = tuple(Fraction(share) for share in self.shares)
        if not all(share > 0 for share in exact) or sum(exact) > 1:
            shown = ", ".join(f"{float(share):g}" for share in exact)
            raise ValueError(f"shares must be positive and add up to at most 1, got {shown}")
        object.__setattr__(self, "shares", exact)

    @classmethod
    def one(cls, leaves: int) -> "Groups":
        """Return one group of all leaves."""
        return cls((0,) * leaves, (Fraction(1),))

    def split(self, leaves: Sequence[Any]) -> list[list[Any]]:
        """Return the leaves by group."""
        if len(leaves) != len(self.of):
            raise ValueError(f"groups must be of {len(leaves)} parameters, got of {len(self.of)}")
        parts: list[list[Any]] = [[] for _ in self.shares]
        for group, leaf in zip(self.of, leaves, strict=True):
            parts[group].append(leaf)
        return parts

    def limits(self, grid: Grid) -> tuple[int, ...]:
        """Return the maximum squared norm of each group in squared grid units; they sum to at most 4^bits."""
        limits = tuple(math.floor(share * 4**grid.bits) for share in self.shares)
        if min(limits) < 1:
            min_norm = grid.unit
            raise ValueError(
                f"clip_groups must leave each group a norm of at least {min_norm:g}, one unit of the grid, "
                f"left {grid.clip_norm * math.sqrt(min(self.shares)):g}"
            )
        return limits


def partition(params, given, clip_norm: float) -> tuple[Groups, list[dict[str, Any]]]:
    """Return the groups of parameters, and {"norm", "parameters": names} of each to store with a run.

    `given` is "layer", a sequence of nnx filters, or a `ClipGroups`.
    """
    asked = given if isinstance(given, ClipGroups) else ClipGroups(given)
    paths = list(_paths(params))
    if asked.filters == LAYER:
        if asked.norms is not None:
            raise ValueError("clip_groups must have filters where it has norms, got 'layer'")
        of = _by_layer(paths)
    else:
        of = _by_filter(paths, _filters(asked.filters))
    if not of:
        raise ValueError("clip_groups must be of some parameters, there are none")
    number = max(of) + 1
    shares = _shares(asked.norms, number, clip_norm)
    names = [".".join(map(str, path)) for path, _ in paths]
    kept = [
        {
            "norm": clip_norm * math.sqrt(share),
            "parameters": [name for name, at in zip(names, of, strict=True) if at == group],
        }
        for group, share in enumerate(shares)
    ]
    return Groups(tuple(of), shares), kept


def _shares(norms, number: int, clip_norm: float) -> tuple[Fraction, ...]:
    if norms is None:
        return (Fraction(1, number),) * number
    if isinstance(norms, str) or not isinstance(norms, Iterable):
        raise ValueError(f"clip_groups norms must be a list of numbers, got {norms!r}")
    squares = [Fraction(_validate.positive_number("clip_groups norm", norm)) ** 2 for norm in norms]
    if len(squares) != number:
        raise ValueError(f"clip_groups must have a norm for each of {number} filters, got {len(squares)}")
    whole, total = Fraction(clip_norm) ** 2, sum(squares)
    if total > whole * Fraction(1 + 1e-9):
        raise ValueError(
            f"clip_groups must have norms whose squares add up to at most {clip_norm:g}^2, the clip norm's, "
            f"got {math.sqrt(total):g}^2"
        )
    # The squares of 0.6 and 0.8 do not add up to 1 exactly as floats.
    return tuple(square / max(whole, total) for square in squares)


def _paths(params) -> Iterator[tuple[tuple, Any]]:
    """Yield (path, variable or array) of each leaf, in the order of `jax.tree.leaves`."""
    found = jax.tree.leaves_with_path(params, is_leaf=lambda node: isinstance(node, nnx.Variable))
    for path, value in found:
        for _ in jax.tree.leaves(value):
            yield tuple(_key(part) for part in path), value


def _key(part):
    for name in ("key", "idx", "name"):
        if hasattr(part, name):
            return getattr(part, name)
    return str(part)


def _by_layer(paths) -> list[int]:
    layers = [path[:-1] for path, _ in paths]
    numbers = {layer: number for number, layer in enumerate(dict.fromkeys(layers))}
    return [numbers[layer] for layer in layers]


def _by_filter(paths, filters) -> list[int]:
    of: list[Any] = [
        next((i for i, selects in enumerate(filters) if selects(path, value)), None) for path, value in paths
    ]
    if None in of:
        raise ValueError(
            f"clip_groups must select every parameter, {_name(paths[of.index(None)][0])} is in no group; "
            "`...` as the last filter selects the rest"
        )
    for i in range(len(filters)):
        if i not in of:
            raise ValueError(
                f"clip_groups must select a trained parameter by each filter, number {i} has none"
            )
    return of


def _filters(given) -> list[Callable[[tuple, Any], bool]]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ValueError(f"clip_groups must be 'layer' or a list of nnx filters, got {given!r}")
    try:
        return [nnx.filterlib.to_predicate(one) for one in given]
    except (TypeError, ValueError):
        raise ValueError(f"clip_groups must be 'layer' or a list of nnx filters, got {given!r}") from None


def _name(path) -> str:
    return ".".join(map(str, path))
