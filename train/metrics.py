"""Where private metrics may go beside `private/metrics.jsonl`: callbacks of `fit(callback=)`.

No guarantee covers them: they are for the eyes of whoever may see the data.
"""

import importlib
from collections.abc import Callable
from pathlib import Path

# Modules with a `SummaryWriter(folder)`, in the order in which they are looked for.
_WRITERS = ("tensorboardX", "torch.utils.tensorboard")


def tensorboard(folder) -> Callable[[int, dict[str, float | None]], None]:
    """A callback that writes event files for TensorBoard to a folder that is open to its owner only.

    **Private**, and more so than `private/metrics.jsonl`: events have times, and how long steps take tells
    how many examples were in their batches.

    Args:
      folder: made where it is missing.

    Raises:
      ValueError: where neither tensorboardX nor torch with tensorboard is installed.
    """
    make = _summary_writer()
    path = Path(folder)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    writer = make(str(path))

    def callback(step: int, metrics: dict[str, float | None]) -> None:
        for name, value in metrics.items():
            if value is not None:
                writer.add_scalar(name, value, step)
        writer.flush()

    return callback


def _summary_writer():
    for name in _WRITERS:
        try:
            return importlib.import_module(name).SummaryWriter
        except ImportError:
            continue
    raise ValueError(f"tensorboard needs {' or '.join(_WRITERS)}, neither is installed")


def several(*callbacks: Callable[[int, dict[str, float | None]], object]):
    """One callback that calls each of these."""

    def callback(step: int, metrics: dict[str, float | None]) -> None:
        for each in callbacks:
            each(step, dict(metrics))

    return callback


__all__ = ["several", "tensorboard"]
