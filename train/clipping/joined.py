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

    def join(self, arrays: list) -> list:
        """Return (rows, entries) of the small arrays, (rows, ...) each, and the others as they are."""
        rows = [arrays[i].reshape(len(arrays[i]), -1) for i in self.small]
        return self.listed(jnp.concatenate(rows, 1) if rows else None, arrays)

    def zeros(self) -> list[jax.Array]:
        """Return zeros like a sum over the rows of `join`, float64 where that is enabled."""
        entries = sum(math.prod(self.shapes[i]) for i in self.small)
        return self.listed(jnp.zeros(entries), [jnp.zeros(shape) for shape in self.shapes])

    def split(self, sums: list):
        """Return the pytree of a sum over the rows of `join`."""
        ends = list(itertools.accumulate(math.prod(self.shapes[i]) for i in self.small))
        parts = jnp.split(sums[0], ends[:-1]) if self.small else []
        found = {i: part.reshape(self.shapes[i]) for i, part in zip(self.small, parts, strict=True)}
        others = iter(sums[bool(self.small) :])
        leaves = [found[i] if i in found else next(others) for i in range(len(self.shapes))]
        return jax.tree.unflatten(self.structure, leaves)
