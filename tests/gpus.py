"""Programs for a GPU on a machine without one, as far as they can be made there: to Triton's code."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh

_MESH = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu"))


def lowered(function, *given) -> str:
    """The text of a function's program for an NVIDIA GPU."""
    with jax.sharding.use_abstract_mesh(_MESH):
        return jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
