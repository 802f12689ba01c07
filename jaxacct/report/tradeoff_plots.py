"""Pictures of trade-off functions and of epsilon over time; matplotlib is asked for only here."""

from collections.abc import Callable, Mapping

import numpy as np

from jaxacct.report.figure import DASHES, blank, check_plot, save


def tradeoff_figure(curves: Mapping[str, Callable], title: str):
    """Type II against type I error of several curves, the first drawn heavier; perfect privacy dotted."""
    figure = blank(5.2, 5.0)
    axes = figure.add_subplot()
    alphas = np.concatenate([[0.0], np.geomspace(1e-6, 0.01, 60), np.linspace(0.01, 1, 200)])
    axes.plot([0, 1], [1, 0], color="0.6", linestyle=":", label="perfect privacy")
    for index, (name, f) in enumerate(curves.items()):
        style = DASHES[index % len(DASHES)]
        axes.plot(alphas, f(alphas), linestyle=style, linewidth=2.4 if index == 0 else 1.5, label=name)
    axes.set(xlabel="type I error", ylabel="type II error", title=title, xlim=(0, 1), ylim=(0, 1))
    axes.set_aspect("equal")
    axes.legend(fontsize=8, frameon=False)
    return figure


def epsilon_figure(lines: dict[str, tuple], delta: float, xlabel: str, title: str):
    """Epsilon at delta over steps or epochs: `{name: (x, epsilon)}`, both axes logarithmic."""
    figure = blank(6.0, 4.2)
    axes = figure.add_subplot()
    styles = ("-", "--", "-.", ":")
    for index, (name, (x, epsilon)) in enumerate(lines.items()):
        axes.plot(x, epsilon, linestyle=styles[index % 4], linewidth=2.2 if index == 0 else 1.5, label=name)
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=f"epsilon at delta = {delta:g}", title=title)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, frameon=False)
    return figure


__all__ = ["check_plot", "epsilon_figure", "save", "tradeoff_figure"]
