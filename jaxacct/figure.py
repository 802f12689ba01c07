"""An empty matplotlib figure, which is asked for only here, and a figure as part of a page."""

import io


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
    figure = Figure(figsize=(width, height), layout="constrained")
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


__all__ = ["blank", "svg"]
