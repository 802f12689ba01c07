"""Individual accounting drawn: the paper's figures 1 and 3 to 5, groups and filters.

    PYTHONPATH=. python tests/benchmarks/individual.py [curves] [histogram] [groups]

All parts by default. Pictures go to tests/benchmarks/figures. Individual values are private; those
here are of public data sets.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets

from jaxacct import BandedToeplitz, CalibrationOptions, Plan, Poisson, calibrate
from jaxacct.individual import (
    ApproximateBlackwell,
    FourierAccountant,
    compose_gdp,
    gdp_delta,
    gdp_epsilon,
    rdp_to_epsilon,
)
from jaxacct.report.figure import blank
from tests.train.fitting import fit
from train.individual import IndividualAccounting

FIGURES = Path(__file__).parent / "figures"
DELTA = 1e-5


def white_plan(steps: int, size: int, sigma: float, probability=1.0, accountant="unamplified") -> Plan:
    """A plan of full or Poisson batches at this noise: of a large epsilon where filters are to decide."""
    epsilon = min(90.0, 1.001 * float(gdp_epsilon(DELTA, steps**0.5 / sigma)))
    given = dict(epsilon=epsilon, delta=DELTA, dataset_size=size, noise_multiplier=sigma)
    given |= dict(options=CalibrationOptions(accountant=accountant))
    return calibrate(Poisson(steps, probability), BandedToeplitz.identity(), **given)


def network(features: int, classes: int, hidden: int = 32):
    """(parameters, loss, logits) of a perceptron with one hidden layer."""
    rng = np.random.default_rng(0)

    def layer(rows, columns):
        return jnp.asarray(rng.normal(size=(rows, columns)) / rows**0.5, jnp.float32)

    params = dict(a=layer(features, hidden), b=jnp.zeros(hidden))
    params |= dict(c=layer(hidden, classes), d=jnp.zeros(classes))

    def logits(params, x):
        return jnp.tanh(x @ params["a"] + params["b"]) @ params["c"] + params["d"]

    def loss(params, example):
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, example["x"]), example["y"])

    return params, loss, logits


def imbalanced(name: str, rare: dict[int, float], seed: int = 0):
    """(train, test) of a data set that scikit-learn ships, standardised by public constants of its own.

    Args:
      rare: the share of its examples that a class keeps in training.
    """
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    x = (x - x.mean(axis=0)) / np.maximum(x.std(axis=0), 1e-6)
    order = np.random.default_rng(seed).permutation(len(x))
    cut = len(x) * 3 // 4
    train, test = order[:cut], order[cut:]
    kept = [
        train[y[train] == c][: int(np.ceil(rare.get(c, 1.0) * (y[train] == c).sum()))] for c in np.unique(y)
    ]
    train = np.sort(np.concatenate(kept))
    return tuple({"x": x[i].astype(np.float32), "y": y[i].astype(np.int32)} for i in (train, test))


def panels_of(width: float, height: float, rows: int, columns: int):
    """(a figure, its panels)."""
    figure = blank(width, height)
    return figure, figure.subplots(rows, columns)


def saved(figure, name: str) -> None:
    for panel in figure.axes:
        panel.legend()
    figure.savefig(FIGURES / f"individual-{name}.png", dpi=130)


def curves() -> None:
    """Figures 3, 4 and 5: Gaussian against Renyi accounting of private gradient descent, noise 100."""
    orders = np.concatenate([np.arange(1.1, 11, 0.1), np.arange(11, 64), 2.0 ** np.arange(7, 14)])

    def renyi(k, delta):
        return float(rdp_to_epsilon(orders * k / (2 * 100**2), orders, delta)[0])

    def gaussian(k, delta):
        return float(gdp_epsilon(delta, float(compose_gdp(np.full(k, 0.01)))))

    limit = renyi(420, DELTA)
    longest = max(k for k in range(420, 520) if gaussian(k, DELTA) <= limit)
    print(
        f"Figure 3: Renyi epsilon {limit:.7f} after 420 steps; Gaussian {gaussian(420, DELTA):.7f}, "
        f"{longest} steps"
    )
    figure, panels = panels_of(13.5, 4, 1, 3)
    deltas = np.geomspace(1e-8, 1e-2, 60)
    for k, style in ((420, "-"), (longest, "--")):
        panels[0].plot([gaussian(k, d) for d in deltas], deltas, "C0" + style, label=f"GDP, k = {k}")
    panels[0].plot([renyi(420, d) for d in deltas], deltas, "C1", label="RDP, k = 420")
    for number, k in enumerate((50, 200, 420, 1000)):
        panels[1].plot([gaussian(k, d) for d in deltas], deltas, f"C{number}", label=f"k = {k}")
        panels[1].plot([renyi(k, d) for d in deltas], deltas, f"C{number}--")
    for panel, title in zip(panels, ("3: one budget", "4: GDP (lines), RDP (dashed)"), strict=False):
        panel.set(yscale="log", xlabel="epsilon", ylabel="delta", title=f"Figure {title}")
    budgets = [renyi(k, DELTA) for k in range(1, 601)]
    mus = [gaussian(k, DELTA) for k in range(1, 801)]
    at = np.linspace(0.1, 0.95, 60)
    panels[2].plot(at, [np.searchsorted(mus, e, side="right") for e in at], label="GDP")
    panels[2].plot(at, [np.searchsorted(budgets, e, side="right") for e in at], label="RDP")
    panels[2].set(
        xlabel="epsilon at delta = 1e-5", ylabel="most steps", title="Figure 5: steps within a budget"
    )
    saved(figure, "gdp")


def histogram() -> None:
    """Figure 1 on digits: an example's curve beside the fitted mu, and everybody's epsilon."""
    train, _ = imbalanced("digits", {})
    params, loss, _ = network(64, 10)
    covered = white_plan(1000, len(train["y"]), 2.0, 0.05, "pld")
    result = fit(
        covered, params, loss, train, optax.sgd(0.5), clip_norm=5.0, verify=False, microbatch_size=256,
        individual=IndividualAccounting(),
    )  # fmt: skip
    private = result.private_individual
    assert private is not None
    picked = np.random.default_rng(0).choice(len(train["y"]), 300, replace=False)
    some = type(private)(
        private.steps, private.tracker, jax.tree.map(lambda a: a[picked], private.records), ""
    )
    by_fourier, by_renyi = some.epsilon(DELTA), some.renyi_epsilon(DELTA)
    middle = int(np.argsort(by_fourier)[len(picked) // 2])
    counts = some.records.counts[middle][None]
    given = private.tracker.accountant
    sigmas = tuple(map(float, given.charged_sigmas))
    accountant = FourierAccountant(given.sampling_probability, sigmas, 10.0, 2**16)
    span = (0.01, max(0.05, float(by_fourier[middle])))
    mu = float(ApproximateBlackwell(accountant, span, points=12).mu(counts)[0])
    figure, panels = panels_of(10, 4, 1, 2)
    at = np.linspace(*span, 25)
    panels[0].semilogy(
        at, [float(accountant.delta(float(e), counts)[0]) for e in at], label="Fourier accountant"
    )
    panels[0].semilogy(at, gdp_delta(at, mu), "--", label=f"fitted mu = {mu:.3f} (approximate)")
    panels[0].set(xlabel="epsilon", ylabel="delta", title="One example")
    edges = np.linspace(0, max(by_renyi.max(), by_fourier.max()) * 1.02, 40)
    panels[1].hist(by_fourier, edges, alpha=0.6, label="Fourier accountant")
    panels[1].hist(by_renyi, edges, alpha=0.6, label="Renyi, integer orders")
    panels[1].set(
        xlabel="individual epsilon at delta = 1e-5", ylabel="examples of 300", title="Digits, 1000 steps"
    )
    saved(figure, "histogram")
    quantiles = [f"{np.quantile(by_fourier, q):.2f}" for q in (0.05, 0.5, 0.95)]
    print(
        f"Figure 1: epsilon of 300 examples, 5/50/95 %: {quantiles}; "
        f"largest {by_fourier.max():.3f}, Renyi {by_renyi.max():.3f}; mu {mu:.4f}"
    )


SETTINGS = {
    # name: (kept shares of rare classes, noise, steps without a filter, steps with one, clip norm, rate)
    "digits": ({8: 0.3, 9: 0.3}, 10.0, 80, 200, 1.0, 0.02),
    "breast_cancer": ({0: 0.2}, 10.0, 80, 200, 1.0, 0.02),
}


def groups(seeds: int = 4) -> None:
    """Individual epsilons by group, and accuracy by group with and without a filter, at one guarantee."""
    figure, panels = panels_of(11, 8, 2, 2)
    print("| data | epsilon | group (train examples) | individual epsilon, median at the start of filtering |"
          " accuracy without | accuracy with filter | still active |\n" + "|---" * 7 + "|")  # fmt: skip
    for row, (name, (rare, sigma, first, total, clip_norm, rate)) in enumerate(SETTINGS.items()):
        train, test = imbalanced(name, rare)
        classes = np.unique(train["y"])
        params, loss, logits = network(train["x"].shape[1], len(classes))
        epsilon = float(gdp_epsilon(DELTA, first**0.5 / sigma * (1 + 1e-5)))
        without, filtered, active = [], [], []
        for seed in range(seeds):
            keys = ((seed, 2, 3, 4), np.arange(8, dtype=np.uint32) + seed)
            options = dict(clip_norm=clip_norm, keys=keys, verify=False, microbatch_size=256)
            accounting = {first: IndividualAccounting(), total: IndividualAccounting(epsilon, DELTA)}
            plans = (white_plan(number, len(train["y"]), sigma) for number in accounting)
            ends = [
                fit(covered, params, loss, train, optax.adam(rate), individual=individual, **options)
                for covered, individual in zip(plans, accounting.values(), strict=True)
            ]
            for found, end in zip((without, filtered), ends, strict=True):
                right = np.argmax(logits(end.params, test["x"]), axis=1) == test["y"]
                found.append([right[test["y"] == c].mean() for c in classes] + [right.mean()])
            last = ends[1].private_individual
            assert last is not None and (last.epsilon(DELTA) <= epsilon).all()
            active.append([last.active()[train["y"] == c].mean() for c in classes] + [last.active().mean()])
            if seed == 0:
                tracked = ends[0].private_individual
                assert tracked is not None
                epsilons = tracked.epsilon(DELTA)
        names = [f"{c}" for c in classes]
        panels[row, 0].boxplot([epsilons[train["y"] == c] for c in classes], showfliers=False)
        panels[row, 0].axhline(epsilon, color="grey", linestyle=":", label="budget")
        sizes = [int((train["y"] == c).sum()) for c in classes]
        panels[row, 0].set_xticks(
            range(1, len(classes) + 1), [f"{c}\n{n}" for c, n in zip(names, sizes, strict=True)]
        )
        panels[row, 0].set(
            title=f"{name}: individual epsilon after {first} steps",
            xlabel="class, and its training examples",
            ylabel=f"epsilon at delta = {DELTA:g}",
        )
        places = np.arange(len(classes) + 1)
        for shift, label, found in (
            (-0.2, f"{first} steps, no filter", without),
            (0.2, f"{total} steps, filtered", filtered),
        ):
            mean, spread = np.mean(found, axis=0), 2 * np.std(found, axis=0, ddof=1) / seeds**0.5
            panels[row, 1].bar(places + shift, mean, 0.4, yerr=spread, capsize=2, label=label)
        panels[row, 1].set_xticks(places, [*names, "all"])
        panels[row, 1].set(
            title=f"{name}: test accuracy, epsilon {epsilon:.2f} for everyone", xlabel="class", ylim=(0, 1.05)
        )
        for i, label in enumerate([*names, "all"]):
            size = sizes[i] if i < len(classes) else len(train["y"])
            median = np.median(epsilons[train["y"] == classes[i]] if i < len(classes) else epsilons)
            print(
                f"| {name} | {epsilon:.2f} | {label} ({size}) | {median:.2f} | "
                f"{np.mean(without, axis=0)[i]:.3f} | "
                f"{np.mean(filtered, axis=0)[i]:.3f} | {np.mean(active, axis=0)[i]:.2f} |",
                flush=True,
            )
    saved(figure, "groups")


PARTS = {part.__name__: part for part in (curves, histogram, groups)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all by default")
    for name in parser.parse_args().parts or PARTS:
        since = time.perf_counter()
        PARTS[name]()
        print(f"({name}: {time.perf_counter() - since:.0f} s)\n", flush=True)


if __name__ == "__main__":
    main()
