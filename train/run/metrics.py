"""Private metrics as event files for TensorBoard: a callback of `TrainOptions(callback=)`."""

import importlib
from collections.abc import Callable
from pathlib import Path

# Modules with a `SummaryWriter(folder)`, in order of preference.
_WRITERS = ("tensorboardX", "torch.utils.tensorboard")


def tensorboard(folder) -> Callable[[int, dict[str, float | None]], None]:
    """Return a callback that writes event files to a folder, made where it is missing, of mode 0700.

    **Private**: no guarantee covers metrics, and the times of events show batch sizes.

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
