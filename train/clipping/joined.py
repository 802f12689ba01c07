"""Small arrays side by side in one: a compiler makes kernels of it, rather than of each of their shapes.

Programs that clip have a dozen kernels for each shape of a gradient, and each takes 20 ms to compile.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MAX_ENTRIES = 2**14  # of a small array: larger ones would be in memory twice


@dataclass(frozen=True)
class Layout:
    """Which arrays of a pytree are side by side. Lists below have the joined array first, then the others.

    Attributes:
      structure: of the pytree.
      shapes: of its arrays.
      small: numbers of the arrays that are joined; none, or at least two.
    """

    structure: Any
    shapes: list[tuple[int, ...]]
    small: list[int]

    @classmethod
    def of(cls, tree, apart: Any = ()) -> "Layout":
        """Return the layout of arrays, or shapes, in which those with numbers in `apart` are not joined."""
        leaves, structure = jax.tree.flatten(tree)
        shapes = [np.shape(leaf) for leaf in leaves]
        small = [i for i, shape in enumerate(shapes) if i not in apart and math.prod(shape) <= _MAX_ENTRIES]
        return cls(structure, shapes, small if len(small) > 1 else [])

    def listed(self, joined, values: list) -> list:
        """Return `joined` in place of the values of all small arrays, and the values of the others."""
        others = [value for i, value in enumerate(values) if i not in self.small]
        return [joined, *others] if self.small else others

    def join(self, arrays: list, axes: int = 1) -> list:
        """Return (.., entries) of the small arrays, (.., ...) each, and the others as they are.

        Args:
          arrays: like those of the layout, with axes of their own before those.
          axes: how many of their own.
        """
        own = [arrays[i].reshape(*arrays[i].shape[:axes], math.prod(self.shapes[i])) for i in self.small]
        return self.listed(jnp.concatenate(own, axes) if own else None, arrays)

    def zeros(self) -> list[jax.Array]:
        """Return zeros like a sum over the rows of `join`, float64 where that is enabled."""
        entries = sum(math.prod(self.shapes[i]) for i in self.small)
        return self.listed(jnp.zeros(entries), [jnp.zeros(shape) for shape in self.shapes])

    def split(self, values: list, axes: int = 0):
        """Return the pytree whose `join` the values are; by default with no axes of their own."""
        ends = list(itertools.accumulate(math.prod(self.shapes[i]) for i in self.small))
        parts = jnp.split(values[0], ends[:-1], axes) if self.small else []
        found = {
            i: part.reshape(*part.shape[:axes], *self.shapes[i])
            for i, part in zip(self.small, parts, strict=True)
        }
        others = iter(values[bool(self.small) :])
        leaves = [found[i] if i in found else next(others) for i in range(len(self.shapes))]
        return jax.tree.unflatten(self.structure, leaves)


def map_where(condition, function, tree, *others):
    """Return `jax.tree.map` of a function of each number alone; NaN unless `condition`, () bool.

    Values of small arrays are computed at once and stored, as a branch of the program.
    """
    layout = Layout.of(tree)
    arrays = list(zip(*(layout.join(jax.tree.leaves(each), 0) for each in (tree, *others)), strict=True))
    values = [jnp.where(condition, function(*each), jnp.nan) for each in arrays]
    if layout.small:
        kind = values[0]
        values[0] = jax.lax.cond(condition, function, lambda *_: jnp.full_like(kind, jnp.nan), *arrays[0])
    return layout.split(values)
