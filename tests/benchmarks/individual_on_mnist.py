"""Individual accounting of arXiv 2209.15596 on MNIST: figure 1, and the odometer in training.

    python -m tests.benchmarks.individual_on_mnist PART --data-folder DIR

Parts: `figure-1` (each example's own epsilon, by privacy loss distribution and by Renyi orders) and
`odometer` (filters one after the other, so that the budget need not be fixed before training). Each stores a
record. Individual values are private; those here are of a public data set.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.accountants.tradeoff import gdp_epsilon, gdp_mu
from jaxacct.individual import (
    ApproximateBlackwell,
    PLDIndividualAccountant,
    PrivacyOdometer,
    RDPIndividualAccountant,
    SigmaGrid,
    gdp_delta,
)
from jaxacct.report.figure import blank, save
from tests.benchmarks import lean
from tests.benchmarks.clipping_on_mnist import DELTA, FILTERED, SEEDS, full_batches
from tests.benchmarks.real_data import splits
from tests.benchmarks.real_data_record import extend
from tests.benchmarks.results import record
from tests.benchmarks.seeds_on_mnist import shown, whole
from train import command as _command

FIGURES = Path(__file__).parent / "figures"
# Of arXiv 2209.15596: 50 epochs of mean batch 300 of 60,000, noise 2, clip norm 5, delta 1e-6.
SIZE, BATCH, STEPS, SIGMA, CLIP, SMALL_DELTA = 60_000, 300, 10_000, 2.0, 5.0, 1e-6
FOLLOWED, RATE = 300, 0.05


@functools.partial(jax.jit, static_argnames=("model", "accountant"))
def _followed(model, accountant, params, x, y, batches, mask, key, rate, picked):
    """Return (parameters, counts of norms of the picked examples) after DP-SGD."""
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    steps = len(batches)

    def step(carry, given):
        flat, state = carry
        rows, real, key, done = given
        params = unravel(flat)
        norms = jnp.minimum(lean.gradient_norms(model, params, x[picked], y[picked]), CLIP)
        state = accountant.update(state, norms)
        total = lean.clipped_sum(model, params, x[rows], y[rows], real, CLIP)
        noise = SIGMA * CLIP * jax.random.normal(key, flat.shape)
        gradient = (jax.flatten_util.ravel_pytree(total)[0] + noise) / BATCH
        return (flat - rate * (1 - done / steps) * gradient, state), None

    given = batches, mask, jax.random.split(key, steps), jnp.arange(steps, dtype=jnp.float32)
    (flat, state), _ = jax.lax.scan(step, (flat, accountant.init(len(picked))), given)
    return unravel(flat), state


def figure_1(folder: str) -> None:
    """One example's curve beside a fitted mu, and the epsilons of random examples."""
    train, test = whole(folder)
    rng, model, p = np.random.default_rng(0), lean.Perceptron, BATCH / SIZE
    most = int(BATCH + 5 * BATCH**0.5)
    sizes = np.minimum(rng.binomial(SIZE, p, STEPS), most)
    batches = np.array([rng.choice(SIZE, most, replace=False) for _ in range(STEPS)], np.int32)
    mask = (np.arange(most) < sizes[:, None]).astype(np.float32)
    picked = rng.choice(SIZE, FOLLOWED, replace=False)
    grid = SigmaGrid(SIGMA, 64.0, 40)
    fourier = PLDIndividualAccountant(p, SIGMA, CLIP, grid, 10.0, 2**18)
    params, state = _followed(
        model, fourier, model.init(0), *train, batches, mask, jax.random.key(0), RATE, picked
    )
    right = lean.accuracy(model, params, test)
    print(f"trained: {right:.4f}", file=sys.stderr, flush=True)
    own = fourier.epsilon(state, SMALL_DELTA)
    renyi = RDPIndividualAccountant(p, SIGMA, CLIP, grid).epsilon(state, SMALL_DELTA)
    worst = fourier.epsilon(fourier.from_norms(np.full((STEPS, 1), CLIP, np.float32)), SMALL_DELTA)[0]
    middle = int(np.argsort(own)[FOLLOWED // 2])
    counts = np.asarray(state.counts)[middle][None]
    composed = fourier.fourier()
    span = 0.01, max(0.05, float(own[middle]))
    mu = float(ApproximateBlackwell(composed, span, points=12).mu(counts)[0])
    figure = blank(10.0, 4.0)
    left, middle_axes = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    at = np.linspace(*span, 25)
    left.semilogy(at, [float(composed.delta(float(e), counts)[0]) for e in at], label="Fourier accountant")
    left.semilogy(at, gdp_delta(at, mu), "--", label=f"fitted mu = {mu:.3f} (approximate)")
    left.set(xlabel="epsilon", ylabel="delta", title="The median example")
    edges = np.linspace(0, max(float(worst), renyi.max()) * 1.02, 40)
    middle_axes.hist(own, edges, alpha=0.6, label="Fourier accountant")
    middle_axes.hist(renyi, edges, alpha=0.6, label="Renyi orders")
    middle_axes.axvline(worst, color="0.4", linestyle=":", label="every example")
    middle_axes.set(
        xlabel="individual epsilon at delta = 1e-6", ylabel=f"examples of {FOLLOWED}", title="MNIST"
    )
    for axes in (left, middle_axes):
        axes.legend(fontsize=8, frameon=False)
    save(figure, FIGURES / "individual-mnist.png")

    def spread(values) -> list[str]:
        return [f"{np.quantile(values, share):.3f}" for share in (0.05, 0.25, 0.5, 0.75, 0.95)] + [
            f"{values.max():.3f}"
        ]

    record(
        "mnist_individual",
        question="Individual epsilons on MNIST (arXiv 2209.15596, figure 1 and its setting)",
        order=77,
        columns=["accountant", "5 %", "25 %", "median", "75 %", "95 %", "largest", "every example"],
        rows=[["Fourier", *spread(own), f"{worst:.3f}"], ["Renyi orders", *spread(renyi), ""]],
        note=f"{STEPS:,} steps of mean batch {BATCH} of {SIZE:,}, noise {SIGMA:g}, clip norm {CLIP:g}, delta "
        f"1e-6, as in the paper, which prints curves and histograms; {FOLLOWED} random examples of a "
        f"perceptron of 50,890 parameters (learning rate {RATE:g}, falling, not tuned), test accuracy "
        f"{100 * right:.2f} %. Epsilons are upper bounds. Median example: mu {mu:.3f} (approximate) fits its "
        "curve.",
    )
    extend("mnist_individual", picture="figures/individual-mnist.png")


def odometer(folder: str) -> None:
    """Accuracy and spent budget after each piece; the last one has the budget of the record of filters."""
    (private, test), _ = splits(folder)
    private = private[0][:FILTERED], private[1][:FILTERED]
    mu, clip, rate, num_pieces, model = float(gdp_mu(1.0, DELTA)), 0.5, 10.0, 4, lean.Linear
    piece, steps = mu / num_pieces**0.5, 38
    sigma = 50**0.5 / mu  # as in the record of filters: 50 steps without a filter spend mu
    right, active = np.zeros((num_pieces, len(SEEDS))), np.zeros((num_pieces, len(SEEDS)))
    for column, seed in enumerate(SEEDS):
        params = model.init(0)
        for row in range(num_pieces):
            key = jax.random.fold_in(jax.random.key(seed), row)
            params, kept = full_batches(
                model,
                params,
                *private,
                key,
                sigma,
                clip,
                rate / clip,
                budget=piece,
                steps=steps,
                filtered=True,
            )
            right[row, column] = lean.accuracy(model, params, test)
            active[row, column] = np.asarray(kept).mean()
    spent, rows = PrivacyOdometer([piece] * num_pieces), []
    for row in range(num_pieces):
        spent.charge(piece)
        mu = spent.spent_mu()
        line = [row + 1, steps * (row + 1), f"{mu:.3f}", f"{gdp_epsilon(DELTA, mu):.2f}"]
        rows.append([*line, shown(right[row]), f"{100 * active[row].mean():.0f}"])
    record(
        "mnist_odometer",
        question="An odometer in training on MNIST (arXiv 2209.15596, section 3.3)",
        order=78,
        columns=[
            "pieces",
            "steps",
            "mu",
            "epsilon at 1e-5",
            "test accuracy",
            "active at the end of the piece, %",
        ],
        rows=rows,
        note=f"Full batches of {FILTERED:,}, softmax regression, clip norm {clip}, noise {sigma:.1f}; "
        f"{steps} steps under an individual filter of mu {piece:.3f}, then under a new one: training may end "
        "after any of them, at what the odometer says. The steps of a piece are fixed beforehand, as the "
        f"share of active examples is private. {len(SEEDS)} runs, 95 % t intervals, per cent.",
    )


PARTS = {"figure-1": figure_1, "odometer": odometer}


def command(part: str, data_folder: str) -> int:
    """Individual accounting on MNIST, each part a record.

    Args:
      part: "figure-1" or "odometer".
      data_folder: folder with the four idx files.
    """
    if part not in PARTS:
        raise ValueError(f"part must be among {', '.join(PARTS)}, got {part!r}")
    PARTS[part](data_folder)
    return 0


if __name__ == "__main__":
    _command.run(
        command, "individual_on_mnist", prog="python -m tests.benchmarks.individual_on_mnist", argv=None
    )
