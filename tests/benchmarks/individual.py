"""Figures 3, 4 and 5 of arXiv 2209.15596: Gaussian against Renyi accounting of gradient descent, noise 100.

    python -m tests.benchmarks.individual

Runs of figure 1 and of filters are in the records `mnist_individual`, `individual_tabular` and
`mnist_filters`.
"""

from pathlib import Path

import numpy as np

from jaxacct.individual import compose_gdp, gdp_epsilon, rdp_to_epsilon
from jaxacct.report.figure import blank

PICTURE = Path(__file__).parent / "figures" / "individual-gdp.png"
DELTA = 1e-5
ORDERS = np.concatenate([np.arange(1.1, 11, 0.1), np.arange(11, 64), 2.0 ** np.arange(7, 14)])


def renyi(steps: int, delta: float) -> float:
    """Return the epsilon of so many steps by Renyi divergences."""
    return float(rdp_to_epsilon(ORDERS * steps / (2 * 100**2), ORDERS, delta)[0])


def gaussian(steps: int, delta: float) -> float:
    """Return the epsilon of so many steps by their composed Gaussian."""
    return float(gdp_epsilon(delta, float(compose_gdp(np.full(steps, 0.01)))))


def main() -> None:
    limit = renyi(420, DELTA)
    longest = max(k for k in range(420, 520) if gaussian(k, DELTA) <= limit)
    print(f"Figure 3: Renyi epsilon {limit:.7f} after 420 steps; {longest} Gaussian steps")
    figure = blank(13.5, 4)
    budget, curves, steps = figure.subplots(1, 3)
    deltas = np.geomspace(1e-8, 1e-2, 60)

    def draw(panel, epsilon, k, style, label=None):
        panel.plot([epsilon(k, delta) for delta in deltas], deltas, style, label=label)

    for k, style in ((420, "C0-"), (longest, "C0--")):
        draw(budget, gaussian, k, style, f"GDP, k = {k}")
    draw(budget, renyi, 420, "C1", "RDP, k = 420")
    for number, k in enumerate((50, 200, 420, 1000)):
        draw(curves, gaussian, k, f"C{number}", f"k = {k}")
        draw(curves, renyi, k, f"C{number}--")
    for panel, title in ((budget, "3: one budget"), (curves, "4: GDP (lines), RDP (dashed)")):
        panel.set(yscale="log", xlabel="epsilon", ylabel="delta", title=f"Figure {title}")
    at = np.linspace(0.1, 0.95, 60)
    for name, epsilon in (("GDP", gaussian), ("RDP", renyi)):
        reached = [epsilon(k, DELTA) for k in range(1, 801)]
        steps.plot(at, [np.searchsorted(reached, e, side="right") for e in at], label=name)
    steps.set(xlabel="epsilon at delta = 1e-5", ylabel="most steps", title="Figure 5: steps within a budget")
    for panel in figure.axes:
        panel.legend()
    figure.savefig(PICTURE, dpi=130)


if __name__ == "__main__":
    main()
