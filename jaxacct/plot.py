"""Pictures of plans and mechanisms as matplotlib figures.

Lines differ in dash and weight and not in colour alone, so that they can be told apart in grey.
"""

import numpy as np

from jaxacct import risk
from jaxacct.estimates.profile import Profile
from jaxacct.figure import blank, svg
from jaxacct.kernels import randomness
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.plan import Plan
from jaxacct.statistics.direction import DIRECTIONS
from jaxacct.statistics.hockey_stick import LOSS_BIN_WIDTH, loss_bounds

DARK, LIGHT = "#1f4e79", "#c55a11"


def profile(plan: Plan, bands: Profile | None = None):
    """delta over epsilon: the certified point, what it says alone, and `bands` of `privacy_profile`."""
    figure = blank(5.6, 4.0)
    axes = figure.add_subplot()
    epsilons = np.linspace(0, 2 * plan.epsilon, 201)
    implied = _delta_from_point(plan.epsilon, plan.delta, epsilons)
    axes.plot(epsilons, implied, color="0.35", linestyle="--", label="what the certified point alone says")
    least = plan.delta / 10
    if bands is not None:
        low, label = np.maximum(bands.lower, 1e-300), f"bands, {bands.confidence:.4g} confidence in all"
        middle = np.clip(bands.estimate, low, bands.upper)
        sides = middle - low, bands.upper - middle
        axes.errorbar(
            bands.epsilons, middle, sides, fmt="o", color=DARK, capsize=4, markersize=4, label=label
        )
        least = min(least, bands.upper.min() / 10)
    axes.plot(plan.epsilon, plan.delta, "*", color=LIGHT, markersize=15, label="certified")
    axes.set(xlabel="epsilon", ylabel="delta", yscale="log", ylim=(least, 1.5), title="privacy profile")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    return figure


def tradeoff(plan: Plan, bands: Profile | None = None):
    """True against false positive rate of the best test for membership, both axes logarithmic.

    With `bands` of `privacy_profile` also the bound that they give at their confidence.
    """
    figure = blank(5.6, 4.0)
    axes = figure.add_subplot()
    rates = np.geomspace(1e-5, 1, 300)
    axes.plot(rates, rates, color="0.6", linestyle=":", label="guessing")
    bound = risk.true_positive_rate(plan.epsilon, plan.delta, rates)
    axes.plot(
        rates, bound, color=LIGHT, linestyle="--", linewidth=2, label="certified: no test is above this"
    )
    if bands is not None:
        most = np.minimum(bound, risk.true_positive_rate(bands.epsilons, bands.upper, rates))
        axes.plot(
            rates, most, color=DARK, linewidth=2, label=f"the same with confidence {bands.confidence:.4g}"
        )
    axes.set(xscale="log", yscale="log", xlim=(1e-5, 1), ylim=(1e-5, 1.3), title="membership inference")
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    return figure


def losses(plan: Plan):
    """Histograms of the privacy losses that the evidence holds; None where none were drawn."""
    drawn = {}
    for direction in DIRECTIONS if plan.evidence is not None else ():
        counts = dict(getattr(getattr(plan.evidence, direction), "loss_counts", ()) or ())
        if counts:
            drawn[direction] = counts
    if not drawn:
        return None
    figure = blank(5.6, 3.2)
    axes = figure.add_subplot()
    for (direction, counts), style, colour in zip(drawn.items(), ("-", "--"), (DARK, LIGHT), strict=False):
        low, high = min(counts), max(counts)
        heights = np.array([counts.get(index, 0) for index in range(low, high + 1)], float)
        edges = np.nan_to_num(loss_bounds(direction)[low : high + 1] - LOSS_BIN_WIDTH / 2)
        axes.step(edges, heights / heights.sum(), where="mid", linestyle=style, color=colour, label=direction)
    axes.axvline(plan.epsilon, color="0.35", linestyle=":", label="epsilon")
    axes.set(xlabel="privacy loss of a draw, natural log", ylabel="share of draws", title="what was drawn")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    return figure


def participation(mechanism: Mechanism, examples: int = 40, key=None):
    """Who is in which batch: the steps of made examples, drawn by the scheme with a fresh key."""
    scheme = mechanism.scheme
    figure = blank(7.0, 3.2)
    axes = figure.add_subplot()
    key = randomness.checked_key(key)
    shown = min(scheme.iterations, 200)
    drawn = np.asarray(scheme.draw_participation(key, examples))[:, :shown]
    axes.imshow(drawn > 0, aspect="auto", cmap="Greys", interpolation="nearest")
    axes.set(xlabel="step", ylabel=scheme.unit, title=f"{scheme.name}: who takes part when")
    return figure


def matrices(mechanism: Mechanism, steps: int = 64):
    """C, what it is inverted to, and how noise adds up over the steps with it and without."""
    strategy, whole = mechanism.strategy, mechanism.scheme.iterations
    n = min(steps, whole)
    # The scores of a unit output are a row of C; the first rows of a Toeplitz matrix are the same for any n.
    rows = np.asarray(strategy.output_scores(np.eye(n if strategy.is_toeplitz else whole, dtype=np.float32)))
    matrix = np.tril(rows.astype(np.float64)[:n, :n])
    inverse = np.linalg.inv(matrix)
    figure = blank(10.0, 3.2)
    left, middle, right = figure.subplots(1, 3)
    for axes, shown, title in ((left, matrix, "C"), (middle, inverse, "C inverse")):
        size = np.abs(shown).max()
        picture = axes.imshow(shown, cmap="PuOr", vmin=-size, vmax=size, interpolation="nearest")
        axes.set(title=title, xlabel="step", ylabel="step")
        figure.colorbar(picture, ax=axes, shrink=0.8)
    steps_done = np.arange(1, n + 1)
    sums = np.sqrt(np.square(np.cumsum(inverse, axis=0)).sum(axis=1))
    right.plot(steps_done, np.sqrt(steps_done), color=LIGHT, linestyle="--", label="independent noise")
    right.plot(steps_done, sums, color=DARK, linewidth=2, label="correlated noise")
    right.set(xlabel="step", ylabel="standard deviation / sigma", title="noise in the running sum")
    right.legend(fontsize=8, frameon=False)
    right.grid(alpha=0.3)
    return figure


def _delta_from_point(epsilon: float, delta: float, others: np.ndarray) -> np.ndarray:
    """The bound on delta at `others` that (epsilon, delta) alone gives: the worst pair of laws has it."""
    # Its losses are epsilon and -epsilon but for delta (Kairouz, Oh and Viswanath, ICML 2015).
    odds = (1 - delta) / (1 + np.exp(epsilon))
    gain = np.maximum(0.0, np.exp(epsilon) - np.exp(others)) * odds
    return delta + gain


__all__ = ["blank", "losses", "matrices", "participation", "profile", "svg", "tradeoff"]
