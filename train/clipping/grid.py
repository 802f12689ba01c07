"""The public grid on which gradients are summed as integers (proofs/released_numbers.md)."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.mechanisms.mechanism import Mechanism

from ..noise import recursion as noise
from ..procedures.by_device import Across
from .joined import Layout

_FINEST = 23  # bits; float32 gradients have no more
_LEVELS = 2.0**20  # of noise: fine beside the noise, coarse beside its float64 arithmetic
_MIN_LEVELS = 2.0**8
_MAX_SUM = 2.0**47
MAX_BATCH = 2 ** (47 - _FINEST)  # 16.8 million examples: no sum is larger


@dataclass(frozen=True)
class Grid:
    """Multiples of `clip_norm` 2^-`bits`.

    Attributes:
      clip_norm: C, the most that the norm of one example's gradient may be.
      bits: 0 to 23; the clip norm is 2^bits grid units.
    """

    clip_norm: float
    bits: int

    def __post_init__(self):
        object.__setattr__(self, "clip_norm", _validate.positive_number("clip_norm", self.clip_norm))
        if _validate.positive_integer("bits", self.bits, minimum=0) > _FINEST:
            raise ValueError(f"bits must be at most {_FINEST}, got {self.bits}")
        if not 0 < self.unit * 2.0**-100:
            raise ValueError(f"clip_norm must be above 1e-270, got {self.clip_norm}")

    @classmethod
    def of(cls, mechanism: Mechanism, clip_norm: float) -> "Grid":
        """Return the grid on which noise spans 2^19 to 2^20 units, or less where gradients span 2^23."""
        sigma = mechanism.noise_multiplier
        most = min(_LEVELS, noise.max_levels(mechanism.strategy, mechanism.scheme.iterations))
        # None where the inverse of C grows beyond all floats.
        bits = min(_FINEST, math.floor(math.log2(most / sigma))) if most >= sigma else -1
        if bits < 0 or sigma * 2.0**bits < _MIN_LEVELS:
            raise ValueError(
                f"noise_multiplier must be between {_MIN_LEVELS / 2**_FINEST:.2g} and {most:.3g} to train "
                f"with this strategy, got {sigma:g}"
            )
        return cls(clip_norm, bits)

    @property
    def unit(self) -> float:
        """Distance of neighbouring grid points."""
        return math.ldexp(self.clip_norm, -self.bits)

    def device_unit(self, batch: int) -> float:
        """Return what sums of devices are rounded to, in grid units: 53 bits hold a sum of `batch` rows."""
        return 2.0 ** (self.bits + (batch - 1).bit_length() - 53)


def all_of(conditions: Sequence[jax.Array]) -> jax.Array:
    """Return where all of some conditions hold, bool arrays of one shape, one or more for each parameter.

    XLA would compute a chain of `and` again in each operation that needs it, one or more for each parameter:
    programs of the square of their number. It keeps the place of the first that does not hold.
    """
    ended = [*conditions, jnp.zeros_like(conditions[0])]
    return jax.lax.argmin(jnp.stack(ended), 0, jnp.int32) == len(conditions)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "is_finite"], meta_fields=["grid", "layout"]
)
@dataclass(frozen=True)
class GridSum:
    """A sum of clipped gradients in whole grid units, exact; private until noise is added.

    Attributes:
      values: pytree like the parameters, or with a layout its `join`, float64: whole numbers of at most 2^47
        in absolute value, exact; all of them NaN where there is no such sum.
      is_finite: () bool: False where there is no such sum; nothing may be released then.
      grid: what one unit is, and the clip norm that held.
      layout: which arrays are side by side.
    """

    values: Any
    is_finite: Any
    grid: Grid
    layout: Layout | None = None

    @property
    def whole(self) -> Any:
        """`values` as a pytree like the parameters."""
        return self.values if self.layout is None else self.layout.split(self.values)

    @classmethod
    def of(cls, totals, grid: Grid, over: Across | None = None, layout: Layout | None = None) -> "GridSum":
        """Return the nearest integers to a pytree of numbers; NaN throughout where any is NaN or beyond 2^47.

        With a layout they are its `join`. Over a mesh they are a device's parts of sums over all devices.

        Zero in place of one total would move the sum by what all examples together contribute to it.
        """
        with jax.enable_x64(True):
            nearest = jax.tree.map(lambda leaf: jnp.round(leaf.astype(jnp.float64)), totals)
            fits = all_of([(jnp.abs(leaf) <= _MAX_SUM).all() for leaf in jax.tree.leaves(nearest)])
            fits = fits if over is None else over.all(fits)
            values = jax.tree.map(lambda leaf: jnp.where(fits, leaf, jnp.nan), nearest)
            return cls(values, fits, grid, layout)

    def joined(self) -> tuple[Layout, list]:
        """Return a layout in which all small arrays are joined, and the sum as its `join`."""
        tree = self.values
        if self.layout is not None:
            tree = self.layout.split(tree, begins=self.layout.runtime_begins(self.is_finite))
        layout = Layout.of(tree)
        return layout, layout.join(jax.tree.leaves(tree), 0)

    def units(self):
        """Return the sum as it is, a pytree of NumPy's int64."""
        return jax.tree.map(np.int64, self.whole)

    def scaled(self, factor: float, added=None, covered=True):
        """Return `(sum + added) unit factor`, float32, rounded once; `added` is a pytree of integers.

        NaN unless `covered`, () bool.
        """
        # JAX makes float32 of NumPy's arrays: neighbouring sums may then differ by more than the clip norm.
        for leaf in jax.tree.leaves(self.values):
            if leaf.dtype != np.float64:
                raise ValueError(f"updates must be a sum in float64, as it was made, got {leaf.dtype}")

        def value(total, more):
            # Below 2^53, so exact.
            return ((total + more.astype(jnp.float64)) * (self.grid.unit * factor)).astype(jnp.float32)

        with jax.enable_x64(True):
            added = jax.tree.map(jnp.zeros_like, self.whole) if added is None else added
            chex.assert_trees_all_equal_shapes(self.whole, added)
            layout, values = self.joined()
            return layout.where(covered, value, jnp.nan, values, layout.join(jax.tree.leaves(added), 0))
