"""Pictures of what matters on the page of results, drawn from its records."""

import re
from pathlib import Path

from jaxacct.report.figure import PALETTE, blank_axes, finished, save, style

FIGURES = Path(__file__).parent / "figures"


def first_number(text: str) -> float:
    """Return the first number of a cell, such as 38565 of "38,565 to 40,179"."""
    return float(re.search(r"[0-9][0-9,]*(\.[0-9]+)?", text)[0].replace(",", ""))


def over_epsilon(lines: dict[str, list[tuple]], ticks, levels: dict[str, float] | None = None, **labels):
    """Draw values over epsilon, a line for each name.

    Args:
      lines: of each name (epsilon, value) or (epsilon, value, half the length of its interval).
      ticks: epsilons that are written out.
      levels: values that are the same for all epsilons.
      labels: of the axes, as `Axes.set` takes them.
    """
    figure, axes = blank_axes(6.0, 4.0)
    for index, (name, line) in enumerate(lines.items()):
        x, y, *half = zip(*sorted(line), strict=True)
        marker = dict(marker="osD^vP"[index % 6], markersize=5, capsize=3)
        axes.errorbar(x, y, *half, label=name, **marker, **style(index))
    for name, value in (levels or {}).items():
        axes.axhline(value, color="0.5", linestyle="--", label=name)
    axes.set(xscale="log", xlabel="epsilon", **labels)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    return finished(figure)


def noise_by_sampler(records: dict[str, dict]):
    """Draw the standard deviation of the noise in the running sum over epsilon, a line for each sampler."""
    found: dict[str, dict[float, float]] = {}
    for job, scheme, _, error, _ in records["fixed_counts"]["rows"]:
        if target := re.fullmatch(r"README job, (?:16 amplified .*|independent .*)\((\d+), 1e-5\)", job):
            name = "DP-SGD" if "pld" in scheme else scheme.split(",")[0]
            found.setdefault(name, {}).setdefault(float(target[1]), float(error) ** 0.5)
    last = dict(sorted(found.items(), key=lambda item: -item[1][8.0]))
    lines = {name: sorted(errors.items()) for name, errors in last.items()}
    figure = over_epsilon(lines, [1, 2, 4, 8], yscale="log", ylabel="noise std in the running sum")
    figure.axes[0].set_yticks([4, 8, 16], ["4", "8", "16"])
    figure.axes[0].minorticks_off()
    return figure


def time_beside_peers(records: dict[str, dict]):
    """Draw seconds of a job here and elsewhere, a row for each job."""
    loss, short = records["draws"]["rows"][:2]
    blt, step = records["buffered"]["rows"][-1], records["opacus"]["rows"][1]
    run = records["calibrate"]["rows"][1]
    named = ((f"10,000 losses, n = {row[0]} (jax-privacy)", row[2:4]) for row in (loss, short))
    jobs = [(name, *(1e4 / first_number(rate) for rate in rates)) for name, rates in named]
    jobs.append((f"optimal BLT, n = {blt[0]} (jax-privacy)", float(blt[-2]), float(blt[-1])))
    jobs.append(("private step, CNN (Opacus)", first_number(step[4]) / 1e3, first_number(step[2]) / 1e3))
    jobs.append(("production noise (arXiv 2602.09338)", first_number(run[3]), 300 * 86_400.0))
    figure, axes = blank_axes(7.0, 3.6)
    for place, (_, here, there) in enumerate(jobs):
        axes.plot([here, there], [place, place], color="0.8", linewidth=1, zorder=0)
        shown = dict(textcoords="offset points", fontsize=8)
        axes.annotate(f"{there / here:,.0f} x", (there, place), (6, -3), **shown)
        axes.plot(here, place, "o", color=PALETTE[0], label="jaxacct" if place == 0 else None)
        axes.plot(there, place, "s", color=PALETTE[1], label="the other" if place == 0 else None)
    axes.set_yticks(range(len(jobs)), [name for name, _, _ in jobs], fontsize=8)
    axes.set(xscale="log", xlabel="seconds")
    axes.margins(x=0.3)
    axes.invert_yaxis()
    figure = finished(figure)
    figure.subplots_adjust(left=0.36)  # names of rows
    return figure


DRAWN = {"noise-by-sampler": noise_by_sampler, "time-beside-peers": time_beside_peers}


def write(records: dict[str, dict]) -> None:
    """Write all pictures."""
    for name, draw in DRAWN.items():
        save(draw(records), FIGURES / f"{name}.png")
