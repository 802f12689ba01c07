"""Differentially private training in Flax under a plan: what was certified is what runs.

Installed as `jaxacct.train` (the extra `jaxacct[train]`); in a checkout the folder is the package `train`. It
imports `jaxacct` and never the other way round.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from .batch_clipping import aggregate, clip_by_l2_norm, epoch_batches, outer_update, private_round_update
    from .convex import noisy_cgd, noisy_gd, noisy_sgd, project_box, project_l2_ball
    from .loop import fit
    from .loss import with_params
    from .run_folder import load_model, save_model

__all__ = [
    "aggregate",
    "clip_by_l2_norm",
    "epoch_batches",
    "fit",
    "load_model",
    "noisy_cgd",
    "noisy_gd",
    "noisy_sgd",
    "outer_update",
    "private_round_update",
    "project_box",
    "project_l2_ball",
    "save_model",
    "with_params",
]

# Where they live; the first use of a name loads its module.
_HOMES = {
    "batch_clipping": "aggregate clip_by_l2_norm epoch_batches outer_update private_round_update",
    "convex": "noisy_cgd noisy_gd noisy_sgd project_box project_l2_ball",
    "loop": "fit",
    "loss": "with_params",
    "run_folder": "load_model save_model",
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
