"""The tabular setting of arXiv 2209.15596 (5.3) from a local file: DP-GD with Adam, filters from epoch 50.

    PYTHONPATH=. python tests/benchmarks/individual_tabular.py [--table FILE.npz] [--rows N]

FILE holds `x` (n, features) float, `y` (n, labels) of 0 and 1, `group` (n,) whole numbers and `test` (n,) of
0 and 1. The paper's own table (MIMIC-III, 25 phenotypes) is not public; without a file a made one of five
groups is used. Writes figures/individual-tabular.png and prints the table.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.metrics import roc_auc_score

from jaxacct.individual import gdp_epsilon
from tests.benchmarks.individual import DELTA, FIGURES, pyplot, white_plan
from tests.train.fitting import fit
from train.individual import IndividualAccounting

# Of the authors' code: noise, clip norm, learning rate, weight decay, epochs before filtering, and in all.
SIGMA, CLIP, RATE, DECAY, FIRST, TOTAL = (
    10.614652581338738,
    0.7872438989061009,
    0.009478653844790382,
    9.39e-4,
    50,
    100,
)


def made(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Five groups of one size: the first has no label at all, the others ever noisier ones."""
    rng = np.random.default_rng(seed)
    group = np.arange(rows) % 5
    x = rng.normal(size=(rows, 40)) + 0.5 * rng.normal(size=(5, 40))[group]
    score = x @ rng.normal(size=(40, 8)) / 40**0.5 + np.array([0.0, 0.3, 0.6, 1.0, 1.5])[
        group, None
    ] * rng.normal(size=(rows, 8))
    y = (score > 0.8) & (group > 0)[:, None]
    return {"x": x, "y": y, "group": group, "test": rng.random(rows) < 0.3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--table")
    parser.add_argument("--rows", type=int, default=7000)
    options = parser.parse_args()
    table = made(options.rows) if options.table is None else dict(np.load(options.table))
    missing = {"x", "y", "group", "test"} - set(table)
    if missing:
        raise SystemExit(f"table must hold {', '.join(sorted(missing))}")
    held = np.asarray(table["test"], bool)
    x, y = np.asarray(table["x"], np.float32), np.asarray(table["y"], np.float32)
    train, test = ({"x": x[rows], "y": y[rows]} for rows in (~held, held))
    groups, of_train, of_test = np.unique(table["group"]), table["group"][~held], table["group"][held]
    hidden, rng = (x.shape[1] + y.shape[1]) // 2, np.random.default_rng(0)

    def layer(rows, columns):
        return jnp.asarray(rng.normal(size=(rows, columns)) / rows**0.5, jnp.float32)

    params = {"a": layer(x.shape[1], hidden), "b": jnp.zeros(hidden)}
    params |= {"c": layer(hidden, y.shape[1]), "d": jnp.zeros(y.shape[1])}

    def logits(params, x):
        return jax.nn.relu(x @ params["a"] + params["b"]) @ params["c"] + params["d"]

    def loss(params, example):
        return optax.sigmoid_binary_cross_entropy(logits(params, example["x"]), example["y"]).mean()

    def losses(params, rows):
        return np.asarray(jax.vmap(loss, (None, 0))(params, rows))

    def auc(params):
        kept = [k for k in range(y.shape[1]) if 0 < test["y"][:, k].sum() < held.sum()]
        return roc_auc_score(
            test["y"][:, kept], np.asarray(logits(params, test["x"]))[:, kept], average="macro"
        )

    optimizer = optax.chain(optax.add_decayed_weights(DECAY), optax.adam(RATE))
    plot = pyplot()
    figure, panels = plot.subplots(1, 3, figsize=(13.5, 4))
    epsilon = float(gdp_epsilon(DELTA, FIRST**0.5 / SIGMA * (1 + 1e-5)))
    print(f"epsilon {epsilon:.4f} at delta {DELTA:g}, {len(train['x'])} rows\n")
    print(
        "| clip norm | steps | AUC | "
        + " | ".join(f"group {g}: epsilon, test loss, active" for g in groups)
        + " |"
    )
    print("|---" * (3 + len(groups)) + "|")
    for row, factor in enumerate((1.0, 5.0)):
        for steps in (FIRST, TOTAL):
            end = fit(
                white_plan(steps, len(train["x"]), SIGMA), params, loss, train, optimizer,
                clip_norm=factor * CLIP, verify=False, microbatch_size=512,
                individual=IndividualAccounting(epsilon, DELTA),
                keys=((1, 2, 3, 4), np.arange(8, dtype=np.uint32)),
            )  # fmt: skip
            private = end.private_individual
            assert private is not None
            spent, on_test = private.epsilon(DELTA), losses(end.params, test)
            cells = []
            for g in groups:
                ours, left = spent[of_train == g].mean(), private.active()[of_train == g].mean()
                cells.append(f"{ours:.2f}, {on_test[of_test == g].mean():.3f}, {left:.2f}")
            shown = " | ".join([f"{factor:g} x {CLIP:.3f}", str(steps), f"{auc(end.params):.3f}", *cells])
            print(f"| {shown} |", flush=True)
            label = f"{steps} steps, {factor:g} x C"
            places = np.arange(len(groups)) + 0.2 * (2 * row + (steps == TOTAL)) - 0.3
            panels[0].bar(places, [spent[of_train == g].mean() for g in groups], 0.2, label=label)
            panels[1].bar(places, [on_test[of_test == g].mean() for g in groups], 0.2, label=label)
            if steps == FIRST:
                panels[2].hist(spent, np.linspace(0, epsilon * 1.02, 40), alpha=0.6, label=label)
    panels[0].axhline(epsilon, color="grey", linestyle=":")
    panels[0].set(title="Mean individual epsilon", xlabel="group")
    panels[1].set(title="Mean test loss", xlabel="group")
    panels[2].set(
        title="Before filtering",
        xlabel=f"individual epsilon at delta = {DELTA:g}",
        ylabel="examples",
        yscale="log",
    )
    panels[2].legend(fontsize=8)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncol=4, fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(FIGURES / "individual-tabular.png", dpi=120)


if __name__ == "__main__":
    main()
