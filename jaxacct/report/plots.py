"""Pictures of plans and mechanisms as matplotlib figures.

Lines differ in dash, marker and weight and not in colour alone, for grey prints and
colour-blind readers. A notebook shows a figure that a cell ends with; `save` writes one as PNG.
"""

import math
from typing import Any

import jax
import numpy as np

from jaxacct.accountants.tradeoff.curves.parametric import EpsilonDelta
from jaxacct.common import validate as _validate
from jaxacct.core.check import Verdict
from jaxacct.core.evidence import Mean, Sampled
from jaxacct.core.plan import Plan
from jaxacct.estimates.profile import Profile
from jaxacct.kernels import randomness
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.report import risk
from jaxacct.report.figure import DARK, LIGHT, MARKERS, PALETTE, PANEL, blank_axes, finished, style
from jaxacct.report.figure import blank as blank
from jaxacct.report.figure import save as save
from jaxacct.report.figure import svg as svg
from jaxacct.statistics import bounds
from jaxacct.statistics.hockey_stick import LOSS_BIN_WIDTH, NUM_LOSS_BINS
from jaxacct.strategies import Strategy

_OF_DIRECTIONS = PALETTE[2], PALETTE[4]  # colours of both directions; certified is LIGHT, sampled DARK
_ORDERS = 5  # of the samples, in `verification`
_NUM_TRACE_POINTS = 60


def profile(plan: Plan, bands: Profile | None = None):
    """Return delta over epsilon: the certified point, what it implies, and `bands` of `privacy_profile`."""
    figure, axes = blank_axes(*PANEL)
    epsilons = np.linspace(0, 2 * plan.epsilon or 3.0, 201)
    implied = EpsilonDelta(plan.epsilon, plan.delta).delta(epsilons)
    axes.plot(epsilons, implied, color=LIGHT, linestyle="--", label="implied by the certified point alone")
    min_delta = plan.delta / 10
    if bands is not None:
        low, label = np.maximum(bands.lower, 1e-300), f"bands, {bands.confidence:.4g} confidence in all"
        high = np.minimum(bands.upper, EpsilonDelta(plan.epsilon, plan.delta).delta(bands.epsilons))
        low = np.minimum(low, high)
        middle = np.clip(bands.estimate, low, high)
        sides = middle - low, high - middle
        axes.errorbar(
            bands.epsilons, middle, sides, fmt="o", color=DARK, capsize=4, markersize=4, label=label
        )
        min_delta = min(min_delta, high.min() / 10)
    axes.plot(plan.epsilon, plan.delta, "*", color=LIGHT, markersize=15, label="certified")
    axes.set(xlabel="epsilon", ylabel="delta", yscale="log", ylim=(min_delta, 1.5), title="privacy profile")
    return finished(figure)


def tradeoff(plan: Plan, bands: Profile | None = None):
    """Return true against false positive rates of the best membership test, both axes logarithmic.

    With `bands` of `privacy_profile` also the bound that they give at their confidence.
    """
    figure, axes = blank_axes(*PANEL)
    rates = np.geomspace(1e-5, 1, 300)
    axes.plot(rates, rates, color="0.6", linestyle=":", label="guessing")
    bound = risk.true_positive_rate(plan.epsilon, plan.delta, rates)
    axes.plot(
        rates, bound, color=LIGHT, linestyle="--", linewidth=2, label="certified: no test is above this"
    )
    if bands is not None:
        upper = np.minimum(bound, risk.true_positive_rate(bands.epsilons, bands.upper, rates))
        axes.plot(
            rates, upper, color=DARK, linewidth=2, label=f"the same with confidence {bands.confidence:.4g}"
        )
    axes.set(xscale="log", yscale="log", xlim=(1e-5, 1), ylim=(1e-5, 1.3), title="membership inference")
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    return finished(figure)


def losses(plan: Plan):
    """Return histograms of the privacy losses in the evidence; None where it has no samples.

    Losses of the direction: ln P/Q for "remove", ln Q/P for "add", so that delta covers samples beyond
    epsilon in both. Samples of a proposal show the proposal distribution, which has more of them.
    """
    heights = {}
    for each in plan.verdict.directions:
        if isinstance(each.side, Mean):
            bins, counts = np.array(each.side.loss_counts).T
            edges = LOSS_BIN_WIDTH * (np.arange(bins[0], bins[-1] + 2) - NUM_LOSS_BINS // 2)
            order = slice(None, None, each.direction.sign)  # from the smallest loss of the direction
            fractions = np.bincount(bins - bins[0], counts) / counts.sum()
            heights[each.direction] = fractions[order], each.direction.sign * edges[order]
    return _outlines(heights, plan.epsilon, "samples", _OF_DIRECTIONS) if heights else None


def histogram(samples, epsilon: float | None = None):
    """Return histograms of privacy losses by name, such as of `sample_privacy_loss`.

    Args:
      samples: {name: (draws,) losses, natural log}; each name has one outline, all over the same bins.
      epsilon: marked where given: delta covers samples beyond it.

    Raises:
      ValueError: where there is nothing to draw, or a loss is not finite.
    """
    samples = {name: np.asarray(drawn, np.float64).ravel() for name, drawn in samples.items()}
    if not samples or not all(drawn.size and np.isfinite(drawn).all() for drawn in samples.values()):
        raise ValueError("samples must be a dictionary of non-empty lists of finite losses")
    edges = np.histogram_bin_edges(np.concatenate(list(samples.values())), bins=60)
    heights = {name: (np.histogram(drawn, edges)[0] / drawn.size, edges) for name, drawn in samples.items()}
    return _outlines(heights, epsilon, "privacy losses")


def _outlines(heights, epsilon: float | None, title: str, colours=PALETTE):
    """Return the outlines of {name: (fractions of samples, edges)}."""
    figure, axes = blank_axes(*PANEL)
    for index, (name, (fractions, edges)) in enumerate(heights.items()):
        look = style(index, colours)
        line = dict(linestyle=look["linestyle"], edgecolor=look["color"])
        axes.stairs(fractions, edges, linewidth=1.8, label=name, **line)
    if epsilon is not None:
        axes.axvline(epsilon, color="0.35", linestyle=":", label="epsilon")
    axes.set(xlabel="privacy loss of a sample, natural log", ylabel="fraction of samples", title=title)
    return finished(figure)


def verification(verdict: Verdict):
    """Return how the bet against "too little noise" grows with the samples; None where there are none.

    Args:
      verdict: `plan.verdict`, or what `plan.verify()` returned.

    The samples are independent and stored as a histogram, so all their orders are equally likely: a few of
    them are shown, drawn with a fixed seed.
    """
    shown = [each for each in verdict.directions if isinstance(each.side, Mean) and each.side.bets]
    if not shown or not isinstance(verdict.evidence, Sampled):
        return None
    figure, axes = blank_axes(*PANEL)
    random = np.random.default_rng(0)
    for direction, dash, colour in zip(shown, ("-", "--"), _OF_DIRECTIONS, strict=False):
        for order in range(_ORDERS):
            drawn, wealth = _bet(direction, random)
            label = f"{direction.direction}, in {_ORDERS} orders" if order == 0 else None
            axes.plot(drawn, wealth, color=colour, linestyle=dash, linewidth=1, alpha=0.8, label=label)
    needed = -math.log(verdict.evidence.share * verdict.claim.target.budget.failure_probability)
    label = f"accepted: wealth {math.exp(needed):.3g}, one over the failure probability"
    axes.axhline(needed, color="0.35", linestyle=":", label=label)
    axes.set(
        xlabel="samples", ylabel="wealth, natural log", title="verification: a bet against the plan's noise"
    )
    return finished(figure)


def _bet(direction, random) -> tuple[np.ndarray, np.ndarray]:
    """Return (numbers of samples, log of the wealth) in one random order of a direction's samples."""
    side = direction.side
    places, counts = np.array(side.term_counts, np.int64).T
    looks = np.unique(np.linspace(0, direction.num_samples, _NUM_TRACE_POINTS + 1).astype(np.int64))
    left, seen = counts.copy(), np.zeros(len(bounds.TERM_EDGES), np.int64)
    wealth = [0.0]
    for more in np.diff(looks):
        drawn = random.multivariate_hypergeometric(left, more, method="marginals")
        left -= drawn
        seen[places] += drawn
        wealth.append(bounds.log_wealth(seen, direction.threshold, side.bets, side.bet_weights))
    return looks, np.array(wealth)


def participation(mechanism: Mechanism, examples: int = 40, key=None):
    """Return which steps synthetic examples participate in, drawn by the scheme with a fresh key."""
    scheme = mechanism.scheme
    figure, axes = blank_axes(7.0, 3.2)
    key = randomness.checked_key(key)
    shown = min(scheme.iterations, 200)
    drawn = np.asarray(jax.jit(scheme.draw_participation, static_argnums=1)(key, examples))[:, :shown]
    axes.imshow(drawn > 0, aspect="auto", cmap="Greys", interpolation="nearest")
    axes.set(xlabel="step", ylabel=scheme.unit, title=f"{scheme.name}: participation")
    return figure


def matrices(mechanism: Mechanism, steps: int = 64):
    """Return C, its inverse, and the noise in the running sum with and without correlation."""
    return strategy_matrices(mechanism.strategy, mechanism.scheme.iterations, steps)


def strategy_matrices(strategy: Strategy, iterations: int, steps: int = 64):
    """Return the same of a strategy by itself."""
    n = min(steps, iterations)
    matrix, inverse = _inverse(strategy, iterations, n)
    figure = blank(10.0, 3.2)
    left, middle, right = figure.subplots(1, 3)
    for axes, shown, title in ((left, matrix, "C"), (middle, inverse, "C inverse")):
        size = np.abs(shown).max()
        picture = axes.imshow(shown, cmap="RdBu", vmin=-size, vmax=size, interpolation="nearest")
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


def running_sums(mechanism: Mechanism, steps: int = 200, paths: int = 3, key=None):
    """Return sums of all noise so far: paths of independent and of correlated noise, with their spread.

    Left cumulative sums of unit normals, one a step; right the same ones through the inverse of C. Both are
    times the noise multiplier: the error of the parameters, in units of clip norm x learning rate.

    Args:
      mechanism: the mechanism.
      steps: shown, from the first.
      paths: drawn, at least 1.
      key: JAX key; from the operating system by default. No noise of a training run is drawn by it.
    """
    paths = _validate.positive_integer("paths", paths)
    steps = min(_validate.positive_integer("steps", steps), mechanism.scheme.iterations)
    inverse = _inverse(mechanism.strategy, mechanism.scheme.iterations, steps)[1]
    seed = randomness.key_words(randomness.checked_key(key))
    normals = np.random.default_rng(seed).standard_normal((steps, paths))
    figure = blank(9.0, 3.4)
    done, sigma = np.arange(1, steps + 1), mechanism.noise_multiplier
    names = "independent noise (DP-SGD)", f"correlated noise ({mechanism.strategy.describe()})"
    for axes, matrix, name in zip(
        figure.subplots(1, 2, sharey=True), (np.eye(steps), inverse), names, strict=True
    ):
        sums = np.cumsum(matrix, axis=0)
        spread = 2 * sigma * np.sqrt(np.square(sums).sum(axis=1))
        axes.fill_between(done, -spread, spread, color="0.87", label="two standard deviations")
        for index, path in enumerate((sigma * sums @ normals).T):
            axes.plot(done, path, linewidth=1.2, **style(index))
        axes.set(xlabel="step", title=name)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("sum of the noise so far")
    figure.axes[0].legend(fontsize=8, frameon=False, loc="upper left")
    return figure


def recommendation(result: Any):
    """Plot the ranking error against copies of the parameters for the noise; `result`: a `Recommendation`."""
    figure, axes = blank_axes(*PANEL)
    names = list(dict.fromkeys(candidate.scheme.name for candidate in result.candidates))
    for index, name in enumerate(names):
        of_it = [candidate for candidate in result.candidates if candidate.scheme.name == name]
        points = [candidate.memory_copies for candidate in of_it], [c.error for c in of_it]
        marker, colour = MARKERS[index % len(MARKERS)], PALETTE[index % len(PALETTE)]
        axes.plot(*points, marker, color=colour, label=name, markersize=6)
    chosen = result.chosen
    point = chosen.memory_copies, chosen.error
    axes.plot(*point, "o", color="black", fillstyle="none", markersize=16, label="chosen")
    copies = sorted({candidate.memory_copies for candidate in result.candidates})
    axes.set_xscale("symlog", linthresh=1)  # there may be none
    axes.set(yscale="log", xlabel="copies of the parameters kept for the noise (bands)")
    axes.set(ylabel=f"{result.what_error}, an estimate", title="more bands, less error")
    axes.set_xticks(copies, map(str, copies))
    axes.tick_params(axis="x", which="minor", bottom=False)
    return finished(figure)


def _inverse(strategy: Strategy, whole: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first n rows and columns of C, of `whole` steps, and of its inverse, float64."""
    # The first rows of a Toeplitz matrix are the same for any n.
    matrix = strategy.columns(n if strategy.is_toeplitz else whole, np.arange(n))[:n]
    return matrix, np.linalg.inv(matrix)
