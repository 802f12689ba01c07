"""Pictures of the sweeps, as the paper draws them."""

from jaxacct.report.figure import DASHES, MARKERS, blank
from tests.benchmarks.paper.statements import Compared


def ratios(points: list[Compared], method: str, title: str):
    """Ratio of errors against epsilon, a line an epoch length."""
    figure = blank(6.0, 4.0)
    axes = figure.add_subplot()
    for index, epoch in enumerate(sorted({point.epoch for point in points})):
        line = sorted((p.epsilon, p.ratio(method)) for p in points if p.epoch == epoch)
        x, y = zip(*line, strict=True)
        axes.plot(x, y, label=f"|D| / B = {epoch}", **_style(index))
    axes.axhline(1, color="0.5", linewidth=1)
    axes.set(title=title, ylabel=f"prefix-sum error, b-min-sep over {method}")
    return _finished(figure, axes, points)


def errors(points: list[Compared], title: str):
    """Prefix-sum error against epsilon, a line a method."""
    figure = blank(6.0, 4.0)
    axes = figure.add_subplot()
    ordered = sorted(points, key=lambda point: point.epsilon)
    x = [point.epsilon for point in ordered]
    axes.plot(x, [point.error for point in ordered], label="b-min-sep", **_style(0))
    for index, method in enumerate(ordered[0].others, 1):
        axes.plot(x, [point.others[method] for point in ordered], label=method, **_style(index))
    axes.set(title=title, ylabel="prefix-sum error", yscale="log")
    return _finished(figure, axes, points)


def _style(index: int) -> dict:
    shown = {"linestyle": DASHES[index % len(DASHES)], "marker": MARKERS[index % len(MARKERS)]}
    return {"color": f"C{index}", "markersize": 5} | shown


def _finished(figure, axes, points: list[Compared]):
    ticks = sorted({point.epsilon for point in points})
    axes.set(xscale="log", xlabel="epsilon")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    return figure
