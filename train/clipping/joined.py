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
    shapes: tuple[tuple[int, ...], ...]
    small: tuple[int, ...]

    @classmethod
    def of(cls, tree, apart: Any = ()) -> "Layout":
        """Return the layout of arrays, or shapes, in which those with numbers in `apart` are not joined."""
        leaves, structure = jax.tree.flatten(tree)
        shapes = tuple(np.shape(leaf) for leaf in leaves)
        small = [i for i, shape in enumerate(shapes) if i not in apart and math.prod(shape) <= _MAX_ENTRIES]
        return cls(structure, shapes, tuple(small) if len(small) > 1 else ())

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

    def zeros(self, parts: dict[int, tuple[int, ...]] | None = None) -> list[jax.Array]:
        """Return zeros like a sum over the rows of `join`, float64 where that is enabled.

        Of arrays in `parts`, by number, which are not joined, a device has a part of that shape.
        """
        entries = sum(math.prod(self.shapes[i]) for i in self.small)
        shapes = [(parts or {}).get(i, shape) for i, shape in enumerate(self.shapes)]
        return self.listed(jnp.zeros(entries), [jnp.zeros(shape) for shape in shapes])

    def split(self, values: list, axes: int = 0, begins: list | None = None):
        """Return the pytree whose `join` the values are; by default with no axes of their own.

        `begins`, where each small array is among the joined ones, are those of `self.begins` by default.
        """
        begins, found, others = begins or self.begins, {}, iter(values[bool(self.small) :])
        for i, begin in zip(self.small, begins, strict=True):
            own, size = values[0].shape[:axes], math.prod(self.shapes[i])
            part = jax.lax.dynamic_slice(values[0], (*map(np.uint32, (0,) * axes), begin), (*own, size))
            found[i] = part.reshape(*own, *self.shapes[i])
        leaves = [found[i] if i in found else next(others) for i in range(len(self.shapes))]
        return jax.tree.unflatten(self.structure, leaves)

    @property
    def begins(self) -> list[np.uint32]:
        """Where each small array begins among the joined ones."""
        sizes = [math.prod(self.shapes[i]) for i in self.small]
        return [np.uint32(begin) for begin in [0, *itertools.accumulate(sizes[:-1])][: len(sizes)]]

    def runtime_begins(self, condition) -> list[jax.Array]:
        """Return `begins` by a branch on a () bool, so that they are no constants to a compiler.

        What reads arrays of one shape is one kernel then, rather than one for each place.
        """
        return jax.lax.cond(condition, lambda: self.begins, lambda: self.begins)

    def where(self, condition, function, otherwise, *joined: list, axes: int = 0):
        """Return the pytree whose `join` is a function of several; `otherwise` throughout unless `condition`.

        Of small arrays the values are results of a branch: each reader would compute them again.
        """
        values = [jnp.where(condition, function(*each), otherwise) for each in zip(*joined, strict=True)]
        if not self.small:
            return self.split(values, axes)
        nothing, given = jnp.full_like(values[0], otherwise), [each[0] for each in joined]
        values[0] = jax.lax.cond(condition, function, lambda *_: nothing, *given)
        return self.split(values, axes, self.runtime_begins(condition))
