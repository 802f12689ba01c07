"""What the adversary sees besides the outputs."""

import abc
from typing import Any, ClassVar

import jax


class SideInformation(abc.ABC):
    """Adversary's view besides the outputs, drawn before participations, equally under P and Q."""

    name: ClassVar[str]
    """Name of the argument of `privacy_loss` that holds it."""
    words: ClassVar[int] = 1
    """Version of `draw`: changes whenever the same key draws other values."""

    @abc.abstractmethod
    def tables(self) -> Any:
        """Return the pytree of arrays that `draw` needs."""

    @abc.abstractmethod
    def draw(self, key, num_samples: int, tables) -> jax.Array:
        """Draw (num_samples, iterations) int32; jittable."""

    @abc.abstractmethod
    def error(self) -> tuple[float, float]:
        """Return the errors of the drawn distribution: (relative error of density, total variation)."""
