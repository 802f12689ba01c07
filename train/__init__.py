"""Differentially private training in Flax under a plan: it runs the certified mechanism.

Installed as `jaxacct.train` (the extra `jaxacct[train]`); in a checkout the folder is the package `train`. It
imports `jaxacct` and never the other way round.
"""

# ruff: noqa: F401
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from .models.loss import with_params
    from .models.saving import load_model, load_weights, save_model
    from .procedures.batch_clipping import (
        aggregate,
        clip_by_l2_norm,
        epoch_batches,
        outer_update,
        private_round_update,
    )
    from .procedures.convex import noisy_cgd, noisy_gd, noisy_sgd, project_box, project_l2_ball
    from .training import TrainOptions, fit

# Module -> its public names; the first use of a name loads the module.
_NAMES = {
    "procedures.batch_clipping": "aggregate clip_by_l2_norm epoch_batches outer_update private_round_update",
    "procedures.convex": "noisy_cgd noisy_gd noisy_sgd project_box project_l2_ball",
    "training": "TrainOptions fit",
    "models.loss": "with_params",
    "models.saving": "load_model load_weights save_model",
}

__all__ = sorted(name for names in _NAMES.values() for name in names.split())


def __getattr__(name: str):
    for module, names in _NAMES.items():
        if name in names.split():
            value = globals()[name] = getattr(importlib.import_module(f".{module}", __name__), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
