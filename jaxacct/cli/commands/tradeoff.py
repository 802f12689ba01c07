"""`jaxacct tradeoff`: evaluate, convert and calibrate trade-off functions, and with --plot draw them."""

import math
from typing import Any, Literal

from jaxacct.accountants.dice_plan import DicePlan
from jaxacct.accountants.tradeoff.curves.curves import Gaussian, TradeOff
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_mu, gdp_to_zcdp
from jaxacct.accountants.tradeoff.curves.parametric import EpsilonDelta, Subsampled
from jaxacct.accountants.tradeoff.generalized_dpsgd.batch_clipping import GeneralDPSGD, generic_group_epsilon
from jaxacct.accountants.tradeoff.last_iterate.calibration import calibrate_noise
from jaxacct.accountants.tradeoff.last_iterate.losses import logistic_conditions
from jaxacct.accountants.tradeoff.last_iterate.noisy_cgd import noisy_cgd_gdp
from jaxacct.accountants.tradeoff.last_iterate.noisy_gd import noisy_gd_gdp
from jaxacct.accountants.tradeoff.last_iterate.noisy_sgd import noisy_sgd_accountant
from jaxacct.accountants.tradeoff.plan import GeneralPlan, LastIteratePlan
from jaxacct.cli.output import show
from jaxacct.cli.usage import Integer, Number, new_app
from jaxacct.common import files, validate
from jaxacct.common.records import exact
from jaxacct.report import figure as plots
from jaxacct.report.run_card import STORED_PLANS

app = new_app("tradeoff", "Trade-off functions: convert, generalised DP-SGD, last iterates.")


@app.command(name="convert")
def convert_command(
    *,
    mu: Number | None = None,
    epsilon: Number | None = None,
    delta: Number | None = None,
    sampling_prob: Number = 1.0,
    compositions: Integer = 1,
    group: Integer = 1,
    alpha: Number | None = None,
    plot: str | None = None,
    json: bool = False,
) -> int:
    """Convert between mu-GDP, (epsilon, delta), RDP and zCDP; subsampled, composed or for a group.

    Args:
      mu: of a Gaussian mechanism; or the largest mu for --epsilon and --delta.
      epsilon: with --mu, delta is evaluated here.
      delta: with --mu, epsilon is evaluated here.
      sampling_prob: share of a fixed-size sample without replacement.
      compositions: how often the mechanism runs.
      group: records that may differ.
      alpha: type I error at which f is evaluated.
      plot: write the trade-off curve with its (epsilon, delta) alternative to this PNG.
      json: print one JSON object.
    """
    plots.check_plot(plot)
    if mu is None:
        if epsilon is None or delta is None:
            raise ValueError("mu, or epsilon and delta, must be given")
        if (sampling_prob, compositions, group) != (1.0, 1, 1):
            raise ValueError("mu must be given with sampling_prob, compositions or group")
        mu = float(gdp_mu(epsilon, delta))
    validate.positive_integer("compositions", compositions)
    validate.positive_integer("group", group)
    one: TradeOff = Gaussian(mu)
    if sampling_prob != 1:
        one = Subsampled(one, sampling_prob)
    curve = one.power(compositions)
    if group > 1:
        curve = curve.group(group)
    found: dict[str, Any] = {"mu": mu, "sampling_prob": sampling_prob, "compositions": compositions}
    if group > 1:
        found["group"] = group
    if isinstance(curve, Gaussian):
        found |= {"composed_mu": float(curve.mu), "zcdp_rho": gdp_to_zcdp(curve.mu)}
    if epsilon is not None:
        found |= {"epsilon": epsilon, "delta_at_epsilon": float(curve.delta(epsilon))}
    if delta is not None:
        found |= {"delta": delta, "epsilon_at_delta": float(curve.epsilon(delta))}
    if alpha is not None:
        found |= {"alpha": alpha, "type_ii_error": float(curve(alpha))}
    found["kind"] = "exact" if isinstance(curve, Gaussian) and one is not None else "certified"
    if plot:
        lines = {"f": curve}
        if delta is not None:
            level = float(curve.epsilon(delta))
            lines[f"(epsilon {level:.3g}, delta {delta:g})"] = EpsilonDelta(level, delta)
        plots.save(plots.tradeoff_figure(lines, "Trade-off function"), plot)
    tell(found, json)
    return 0


@app.command(name="general")
def general_command(
    *,
    dataset_size: Integer,
    num_epochs: Integer,
    delta: Number,
    num_microbatches: Integer = 1,
    microbatch_size: Integer = 1,
    sampling: Literal["shuffling", "subsampling", "poisson"] = "shuffling",
    group_size: Integer = 1,
    sigma: Number | None = None,
    epsilon: Number | None = None,
    plot: str | None = None,
    out: str | None = None,
    json: bool = False,
) -> int:
    """Generalised DP-SGD (arXiv 2212.05796): shuffled or fixed-size batches, individual or batch clipping.

    Args:
      dataset_size: number of records, the same in both data sets.
      num_epochs: passes.
      delta: target or where epsilon is evaluated.
      num_microbatches: separately clipped terms a round; 1 is batch clipping.
      microbatch_size: records a term; 1 is individual clipping.
      sampling: how batches are drawn.
      group_size: records that may be replaced.
      sigma: noise std over 2 x clip norm, to evaluate.
      epsilon: target, to calibrate sigma.
      plot: write the trade-off curves to this PNG.
      out: with epsilon, write the plan here, for `jaxacct train`.
      json: print one JSON object.
    """
    plots.check_plot(plot)
    if (sigma is None) == (epsilon is None):
        raise ValueError("sigma (to evaluate) or epsilon (to calibrate) must be given, and not both")
    _check_out(out, GeneralPlan, "sigma", sigma)
    sizes: dict[str, Any] = dict(
        dataset_size=dataset_size,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        num_epochs=num_epochs,
        sampling=sampling,
        group_size=group_size,
    )
    run = GeneralDPSGD(**sizes)
    if sigma is None:
        assert epsilon is not None
        plan = GeneralPlan.calibrate(epsilon, delta, **sizes)
        sigma = plan.sigma
        if out is not None:
            plan.save(out)
    found_epsilon = float(run.epsilon(delta, sigma))
    one = GeneralDPSGD(dataset_size, num_microbatches, microbatch_size, num_epochs, sampling, 1)
    per_record = math.sqrt(one.most()) / sigma
    found = {
        "epsilon": found_epsilon,
        "delta": delta,
        "sigma": sigma,
        "noise_multiplier": 2 * sigma,
        "noise_of_the_mean_term": run.relative_noise(sigma),
        "clip": run.clip,
        "mean_squared_sensitivity": run.pmf().mean,
        "max_mu": float(run.worst_case(sigma).mu),
        "epsilon_of_largest_mu": float(run.worst_case(sigma).epsilon(delta)),
        "epsilon_by_generic_group_rule": generic_group_epsilon(delta, per_record, group_size),
        **run.terms().to_json(),
        "warnings": run.warnings(found_epsilon, delta),
    }
    if plot:
        lines = {
            "participations, sampling revealed": run.curve(sigma),
            "largest number of participations": run.worst_case(sigma),
            f"(epsilon {found_epsilon:.3g}, delta {delta:g})": EpsilonDelta(found_epsilon, delta),
        }
        if group_size > 1:
            lines["generic group rule"] = Gaussian(per_record * group_size)
        plots.save(plots.tradeoff_figure(lines, f"{run.clip} clipping, {sampling}"), plot)
    tell(found, json)
    return 0


@app.command(name="last-iterate")
def last_iterate_command(
    method: Literal["gd", "cgd", "sgd"],
    /,
    *,
    num_examples: Integer,
    stepsize: Number,
    delta: Number,
    grad_sensitivity: Number | None = None,
    smoothness: Number | None = None,
    num_classes: Integer | None = None,
    feature_norm: Number | None = None,
    clip_norm: Number | None = None,
    steps: Integer | None = None,
    epochs: Integer | None = None,
    batch_size: Integer | None = None,
    strong_convexity: Number = 0.0,
    diameter: Number | None = None,
    noise_std: Number | None = None,
    epsilon: Number | None = None,
    plot: str | None = None,
    out: str | None = None,
    json: bool = False,
) -> int:
    """Noisy gradient descent on convex losses, last iterate only (arXiv 2403.00278): gd, cgd or sgd.

    Args:
      method: full batches, a fixed cycle of batches, or batches drawn without replacement.
      num_examples: number of examples, the same in both data sets.
      stepsize: of every step.
      delta: target or where epsilon is evaluated.
      grad_sensitivity: largest distance of two per-example gradients at one point; twice the clip norm.
      smoothness: of every example's loss.
      num_classes: in place of these two, those of logistic regression on so many classes.
      feature_norm: with num_classes, the norm that features are cut to.
      clip_norm: with two classes, the norm that gradients are clipped to.
      steps: for gd and sgd.
      epochs: for cgd.
      batch_size: for cgd and sgd.
      strong_convexity: of every example's loss.
      diameter: of the constraint set.
      noise_std: on the mean gradient of a batch, to evaluate.
      epsilon: target, to calibrate noise_std.
      plot: write the trade-off curves to this PNG.
      out: with epsilon, write the plan here, for `jaxacct train`.
      json: print one JSON object.
    """
    plots.check_plot(plot)
    if (noise_std is None) == (epsilon is None):
        raise ValueError("noise_std (to evaluate) or epsilon (to calibrate) must be given, and not both")
    _check_out(out, LastIteratePlan, "noise_std", noise_std)
    conditions = _conditions(
        grad_sensitivity, smoothness, strong_convexity, num_classes, feature_norm, clip_norm
    )
    run: dict[str, Any] = dict(stepsize=stepsize, diameter=diameter, num_examples=num_examples, **conditions)
    if (steps is None) != (method == "cgd") or (epochs is None) != (method != "cgd"):
        raise ValueError("steps must be given for gd and sgd, epochs for cgd")
    if (batch_size is None) != (method == "gd"):
        raise ValueError("batch_size must be given for cgd and sgd, and not for gd")
    if method == "cgd":
        size = validate.positive_integer("batch_size", batch_size)
        if num_examples % size:
            raise ValueError(f"batch_size must divide num_examples {num_examples}, got {size}")
        run |= dict(epochs=epochs, batch_size=size, batches_per_epoch=num_examples // size)
    else:
        run |= dict(steps=steps) | (dict(batch_size=batch_size) if method == "sgd" else {})
    if noise_std is None:
        assert epsilon is not None
        noise_std = calibrate_noise(epsilon, delta, method=method, **run)
        if out is not None:
            b = num_examples if batch_size is None else batch_size
            total = steps if epochs is None else epochs * (num_examples // b)
            fields: dict[str, Any] = dict(steps=total, batch_size=b, num_examples=num_examples)
            fields |= dict(method=method, stepsize=stepsize, diameter=diameter, noise_std=noise_std)
            LastIteratePlan(epsilon=epsilon, delta=delta, **fields | conditions).save(out)
    found: dict[str, Any] = {"method": method, "noise_std": noise_std, "delta": delta}
    if method == "sgd":
        bounds = noisy_sgd_accountant(noise_std=noise_std, **run)
        best = bounds.best(delta)
        found |= {"epsilon": best.epsilon(delta), "theorem": best.theorem, "window": best.window}
        found |= {"epsilon_by_bound": bounds.epsilons(delta), "note": bounds.note, **bounds.terms.to_json()}
        lines: dict[str, Any] = {bound.theorem: bound.tradeoff for bound in bounds.bounds}
    else:
        bound = (noisy_cgd_gdp if method == "cgd" else noisy_gd_gdp)(noise_std=noise_std, **run)
        by_bound = {name: float(Gaussian(mu).epsilon(delta)) for name, mu in bound.compared.items()}
        found |= {"epsilon": float(bound.epsilon(delta)), "mu": bound.mu, "theorem": bound.theorem}
        found |= {"window": bound.window, "epsilon_by_bound": by_bound}
        found |= {"epsilon_by_renyi": bound.rdp_epsilon(delta), "note": bound.note, **bound.terms.to_json()}
        lines = {bound.theorem: bound.curve}
        lines |= {name: Gaussian(mu) for name, mu in bound.compared.items() if name != bound.theorem}
    if plot:
        plots.save(plots.tradeoff_figure(lines, f"noisy {method}, last iterate"), plot)
    tell(found, json)
    return 0


def _check_out(out: str | None, plan, name: str, noise: float | None) -> None:
    """Refuse a plan of noise that was not calibrated, and files that are no such plan."""
    if out is not None and noise is not None:
        raise ValueError(f"out must not be given with {name}: a plan is calibrated, with epsilon")
    files.check_target(out, lambda path: files.holds_schema(path, plan.schema), "a plan of this kind")


def _conditions(
    grad_sensitivity, smoothness, strong_convexity, num_classes, feature_norm, clip_norm
) -> dict[str, Any]:
    """As they were given, or those of logistic regression."""
    numbers, loss = (grad_sensitivity, smoothness), (num_classes, feature_norm)
    if None not in numbers and loss == (None, None) and clip_norm is None:
        found = dict(grad_sensitivity=grad_sensitivity, smoothness=smoothness)
        return found | dict(strong_convexity=strong_convexity)
    if numbers == (None, None) and None not in loss:
        return logistic_conditions(num_classes, feature_norm, strong_convexity, clip_norm)
    raise ValueError("grad_sensitivity and smoothness, or num_classes and feature_norm, must be given")


@app.command(name="show")
def show_command(plan: str, /, *, json: bool = False) -> int:
    """Print what a plan of `general`, `last-iterate` or DiceSGD guarantees, and its adversary, recomputed.

    Args:
      plan: the file that --out wrote.
      json: print one JSON object.
    """
    data = files.read_json(plan, "plan")
    kind = STORED_PLANS.get(str(data.get("schema")))
    if kind is None:
        raise ValueError(f"plan must be of {', '.join(STORED_PLANS)}, was another file: {plan!r}")
    read = kind.from_json(data)
    terms = {} if isinstance(read, DicePlan) else read.terms.to_json()
    tell({"statement": read.statement(), **terms, "steps": read.iterations}, json)
    return 0


def tell(found: dict, as_json: bool) -> None:
    """Print what was found: a line a name, or one JSON object.

    Raises:
      ValueError: a value is not a number; nothing is printed.
    """
    for name, value in found.items():
        numbers = value.values() if isinstance(value, dict) else [value]
        if any(isinstance(number, float) and math.isnan(number) for number in numbers):
            raise ValueError(
                f"{name} must be a number, got NaN: the arguments are beyond what float64 resolves"
            )
    if as_json:
        infinite = {name for name, value in found.items() if isinstance(value, float) and math.isinf(value)}
        show(found | dict.fromkeys(infinite), True)
        return
    for name, value in found.items():
        if value is None or value in ("", []):
            continue
        for row in value if isinstance(value, list) else [value]:
            shown = exact(row) if isinstance(row, float) else row
            if isinstance(row, dict):
                shown = ", ".join(f"{key} {exact(part)}" for key, part in row.items())
            print(f"{name.replace('_', ' '):<32}{shown}")
