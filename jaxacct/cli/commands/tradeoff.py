"""`jaxacct tradeoff`: evaluate, convert and calibrate trade-off functions, and with --plot draw them."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from jaxacct.accountants.tradeoff.curves.curves import Gaussian, TradeOff
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_mu, gdp_to_zcdp
from jaxacct.accountants.tradeoff.curves.parametric import EpsilonDelta, Subsampled
from jaxacct.accountants.tradeoff.generalized_dpsgd.batch_clipping import GeneralDPSGD, generic_group_epsilon
from jaxacct.accountants.tradeoff.last_iterate.losses import logistic_conditions
from jaxacct.accountants.tradeoff.plan import GeneralPlan, LastIteratePlan
from jaxacct.cli.output import show
from jaxacct.cli.usage import Flat, Integer, Number, new_app, options_of
from jaxacct.common import files, validate
from jaxacct.common.records import exact
from jaxacct.report import figure as plots

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

    For example:

        jaxacct tradeoff convert --mu 1 --delta 1e-5
        jaxacct tradeoff convert --epsilon 2 --delta 1e-5

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
    values: dict[str, Any] = {"mu": mu, "sampling_prob": sampling_prob, "compositions": compositions}
    if group > 1:
        values["group"] = group
    if isinstance(curve, Gaussian):
        values |= {"composed_mu": float(curve.mu), "zcdp_rho": gdp_to_zcdp(curve.mu)}
    if epsilon is not None:
        values |= {"epsilon": epsilon, "delta_at_epsilon": float(curve.delta(epsilon))}
    if delta is not None:
        values |= {"delta": delta, "epsilon_at_delta": float(curve.epsilon(delta))}
    if alpha is not None:
        values |= {"alpha": alpha, "type_ii_error": float(curve(alpha))}
    values["kind"] = "exact" if isinstance(curve, Gaussian) else "certified"
    if plot:
        lines = {"f": curve}
        if delta is not None:
            level = float(curve.epsilon(delta))
            lines[f"(epsilon {level:.3g}, delta {delta:g})"] = EpsilonDelta(level, delta)
        plots.save(plots.tradeoff_figure(lines, "Trade-off function"), plot)
    tell(values, json)
    return 0


General: Any = options_of(GeneralDPSGD, num_microbatches=1, microbatch_size=1, sampling="shuffling")


@app.command(name="general")
def general_command(
    *,
    delta: Number,
    run: Annotated[General, Flat],
    sigma: Number | None = None,
    epsilon: Number | None = None,
    plot: str | None = None,
    out: str | None = None,
    json: bool = False,
) -> int:
    r"""Generalised DP-SGD (arXiv 2212.05796): shuffled or fixed-size batches, individual or batch clipping.

    For example:

        jaxacct tradeoff general --dataset-size 50k --num-epochs 10 \
            --num-microbatches 250 --epsilon 3 --delta 1e-5

    Args:
      delta: target or where epsilon is evaluated.
      sigma: noise std over 2 x clip norm, to evaluate.
      epsilon: target, to calibrate sigma.
      plot: write the trade-off curves to this PNG.
      out: with epsilon, write the plan here, for `jaxacct train`.
      json: print one JSON object.
    """
    _check(plot, out, GeneralPlan, "sigma", sigma, epsilon)
    mechanism = GeneralDPSGD(**vars(run))
    if epsilon is not None:
        plan = GeneralPlan.calibrate(epsilon, delta, **vars(mechanism))
        sigma = plan.sigma
        if out is not None:
            plan.save(out)
    assert sigma is not None
    found_epsilon = float(mechanism.epsilon(delta, sigma))
    per_record = math.sqrt(dataclasses.replace(mechanism, group_size=1).most()) / sigma
    worst = mechanism.worst_case(sigma)
    values = {
        "epsilon": found_epsilon,
        "delta": delta,
        "sigma": sigma,
        "noise_multiplier": 2 * sigma,
        "noise_of_the_mean_term": mechanism.relative_noise(sigma),
        "clip": mechanism.clip,
        "mean_squared_sensitivity": mechanism.pmf().mean,
        "max_mu": float(worst.mu),
        "epsilon_of_largest_mu": float(worst.epsilon(delta)),
        "epsilon_by_generic_group_rule": generic_group_epsilon(delta, per_record, mechanism.group_size),
        **mechanism.terms().to_json(),
        "warnings": mechanism.warnings(found_epsilon, delta),
    }
    if plot:
        lines = {
            "participations, sampling revealed": mechanism.curve(sigma),
            "largest number of participations": worst,
            f"(epsilon {found_epsilon:.3g}, delta {delta:g})": EpsilonDelta(found_epsilon, delta),
        }
        if mechanism.group_size > 1:
            lines["generic group rule"] = Gaussian(per_record * mechanism.group_size)
        plots.save(plots.tradeoff_figure(lines, f"{mechanism.clip} clipping, {mechanism.sampling}"), plot)
    tell(values, json)
    return 0


_DECIDED = ("method", "noise_std", "epsilon", "delta")
_OPEN = dict.fromkeys(("batch_size", "grad_sensitivity", "smoothness", "diameter"))
Descent: Any = options_of(LastIteratePlan, _DECIDED, strong_convexity=0.0, **_OPEN)


@app.command(name="last-iterate")
def last_iterate_command(
    method: Literal["gd", "cgd", "sgd"],
    /,
    *,
    delta: Number,
    run: Annotated[Descent, Flat],
    num_classes: Integer | None = None,
    feature_norm: Number | None = None,
    clip_norm: Number | None = None,
    noise_std: Number | None = None,
    epsilon: Number | None = None,
    plot: str | None = None,
    out: str | None = None,
    json: bool = False,
) -> int:
    r"""Noisy gradient descent on convex losses, last iterate only (arXiv 2403.00278): gd, cgd or sgd.

    For example:

        jaxacct tradeoff last-iterate gd --num-examples 5000 --steps 200 \
            --stepsize 0.1 --num-classes 10 --feature-norm 2 \
            --strong-convexity 0.01 --delta 1e-5 --epsilon 3

    Args:
      method: full batches, a fixed cycle of batches, or batches drawn without replacement.
      delta: target or where epsilon is evaluated.
      num_classes: in place of grad_sensitivity and smoothness, those of logistic regression on so many
        classes.
      feature_norm: with num_classes, the norm that features are clipped to.
      clip_norm: with two classes, the norm that gradients are clipped to.
      noise_std: on the mean gradient of a batch, to evaluate.
      epsilon: target, to calibrate noise_std.
      plot: write the trade-off curves to this PNG.
      out: with epsilon, write the plan here, for `jaxacct.train.fit`.
      json: print one JSON object.
    """
    _check(plot, out, LastIteratePlan, "noise_std", noise_std, epsilon)
    given = vars(run) | dict(batch_size=run.num_examples if method == "gd" else run.batch_size)
    if (run.batch_size is None) != (method == "gd"):
        raise ValueError("batch_size must be given for cgd and sgd, and not for gd")
    constants = [given.pop(name) for name in ("grad_sensitivity", "smoothness", "strong_convexity")]
    loss: Any = _loss(constants, num_classes, feature_norm, clip_norm)
    given |= dict(method=method, loss=loss)
    if epsilon is not None:
        plan = LastIteratePlan.calibrate(epsilon, delta, **given)
        if out is not None:
            plan.save(out)
        bound, noise_std = plan.bound(), plan.noise_std
    else:
        assert noise_std is not None
        bound = LastIteratePlan.bound_at(noise_std, delta, **given)
    best = bound.best(delta) if method == "sgd" else bound
    values = {"method": method, "noise_std": noise_std, "delta": delta}
    values |= {"epsilon": float(best.epsilon(delta)), "theorem": best.theorem, "window": best.window}
    if method == "sgd":
        values |= {"epsilon_by_bound": bound.epsilons(delta)}
        lines: dict[str, Any] = {one.theorem: one.tradeoff for one in bound.bounds}
    else:
        by_bound = {name: float(Gaussian(mu).epsilon(delta)) for name, mu in bound.compared.items()}
        values |= {"mu": bound.mu, "epsilon_by_bound": by_bound, "epsilon_by_renyi": bound.rdp_epsilon(delta)}
        lines = {name: Gaussian(mu) for name, mu in bound.compared.items()}
    if plot:
        plots.save(plots.tradeoff_figure(lines, f"noisy {method}, last iterate"), plot)
    tell(values | {"note": bound.note, **bound.terms.to_json()}, json)
    return 0


def _check(plot, out: str | None, plan, name: str, noise: float | None, epsilon: float | None) -> None:
    """Refuse noise beside epsilon, plans of given noise, and files that are no such plan."""
    plots.check_plot(plot)
    if (noise is None) == (epsilon is None):
        raise ValueError(f"{name} (to evaluate) or epsilon (to calibrate) must be given, and not both")
    if out is not None and noise is not None:
        raise ValueError(f"out must not be given with {name}: a plan is calibrated, with epsilon")
    files.check_target(out, lambda path: files.holds_schema(path, plan.schema), "a plan of this kind")


def _loss(constants, num_classes, feature_norm, clip_norm):
    """Return the constants of a loss as they were given, or those of logistic regression."""
    grad_sensitivity, smoothness, strong_convexity = constants
    numbers, loss = (grad_sensitivity, smoothness), (num_classes, feature_norm)
    if None not in numbers and loss == (None, None) and clip_norm is None:
        constants = dict(grad_sensitivity=grad_sensitivity, smoothness=smoothness)
        return SimpleNamespace(**constants, strong_convexity=strong_convexity)
    if numbers == (None, None) and None not in loss:
        return SimpleNamespace(**logistic_conditions(num_classes, feature_norm, strong_convexity, clip_norm))
    raise ValueError("grad_sensitivity and smoothness, or num_classes and feature_norm, must be given")


def tell(values: dict, as_json: bool) -> None:
    """Print what was found: a line a name, or one JSON object.

    Raises:
      ValueError: a value is not a number; nothing is printed.
    """
    for name, value in values.items():
        numbers = value.values() if isinstance(value, dict) else [value]
        if any(isinstance(number, float) and math.isnan(number) for number in numbers):
            raise ValueError(
                f"{name} must be a number, got NaN: the arguments are beyond what float64 resolves"
            )
    if as_json:
        show(values, True)
        return
    for name, value in values.items():
        if value is None or value in ("", []):
            continue
        for row in value if isinstance(value, list) else [value]:
            shown = exact(row) if isinstance(row, float) else row
            if isinstance(row, dict):
                shown = ", ".join(f"{key} {exact(part)}" for key, part in row.items())
            print(f"{name.replace('_', ' '):<32}{shown}")
