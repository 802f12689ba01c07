"""An empty matplotlib figure, which is asked for only here, and a figure as part of a page or as a file."""

import io

from jaxacct.common.files import check_target, write_bytes_atomically

# What tells lines and points apart without colour.
DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 2, 1, 2, 1, 2)), (0, (8, 2)))
MARKERS = "osD^vP"
_MARK = b"Software\0jaxacct"


def blank(width: float, height: float):
    """An empty figure, without a window.

    Raises:
      ValueError: where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plot needs matplotlib, which is not installed") from None

    class Shown(Figure):
        """A figure that a notebook shows when a cell ends with it, whether pyplot was imported or not."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=80)
            return file.getvalue()

    figure = Shown(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def svg(figure) -> str:
    """A figure as an `<svg>` element for a page, its words as words."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxacct"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def save(figure, path) -> None:
    """Write a figure as PNG, whole or not at all."""
    metadata = {"Software": "jaxacct"}  # by which `is_ours` knows it again
    write_bytes_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150, metadata=metadata))


def is_ours(path) -> bool:
    """Whether a file is a PNG that `save` wrote."""
    with open(path, "rb") as file:
        head = file.read(4096)
    return head.startswith(b"\x89PNG\r\n\x1a\n") and _MARK in head


def check_plot(path, name: str = "plot") -> None:
    """Refuse, before any work, a target that no picture can be written to; a picture of ours is replaced.

    Raises:
      ValueError: in one line, also where matplotlib is not installed.
    """
    if path is None:
        return
    blank(1, 1)
    check_target(path, is_ours, "a picture by jaxacct", name, may_force=False)


__all__ = ["DASHES", "MARKERS", "blank", "check_plot", "is_ours", "save", "svg"]
