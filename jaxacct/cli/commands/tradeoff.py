"""`jaxacct tradeoff`: evaluate and calibrate runs that trade-off functions account for."""

import functools
import math
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from jaxacct.accountants.tradeoff.generalized_dpsgd.batch_clipping import GeneralDPSGD
from jaxacct.accountants.tradeoff.last_iterate.losses import logistic_conditions
from jaxacct.accountants.tradeoff.plan import GeneralPlan, LastIteratePlan
from jaxacct.cli.output import show
from jaxacct.cli.usage import Flat, Integer, Number, new_app, options_of
from jaxacct.common import files
from jaxacct.common.records import exact

app = new_app("tradeoff", "Plans of generalised DP-SGD and of last iterates.")


General: Any = options_of(GeneralDPSGD, num_microbatches=1, microbatch_size=1, sampling="shuffling")


@app.command(name="general")
def general_command(
    *,
    delta: Number,
    run: Annotated[General, Flat],
    sigma: Number | None = None,
    epsilon: Number | None = None,
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
      out: with epsilon, write the plan here, for `jaxacct train`.
      json: print one JSON object.
    """
    _check(out, GeneralPlan, "sigma", sigma, epsilon)
    mechanism = GeneralDPSGD(**vars(run))
    if epsilon is not None:
        plan = GeneralPlan.calibrate(epsilon, delta, **vars(mechanism))
        sigma = plan.sigma
        if out is not None:
            plan.save(out)
    assert sigma is not None
    found_epsilon = float(mechanism.epsilon(delta, sigma))
    values = {
        "epsilon": found_epsilon,
        "delta": delta,
        "sigma": sigma,
        "noise_multiplier": 2 * sigma,
        "noise_of_the_mean_term": mechanism.relative_noise(sigma),
        "clip": mechanism.clip,
        **mechanism.terms().to_json(),
        "warnings": mechanism.warnings(found_epsilon, delta),
    }
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
      out: with epsilon, write the plan here, for `jaxacct.train.fit`.
      json: print one JSON object.
    """
    _check(out, LastIteratePlan, "noise_std", noise_std, epsilon)
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
    tell(values | {"note": bound.note, **bound.terms.to_json()}, json)
    return 0


def _check(out: str | None, plan, name: str, noise: float | None, epsilon: float | None) -> None:
    """Refuse noise beside epsilon, plans of given noise, and files that are no such plan."""
    if (noise is None) == (epsilon is None):
        raise ValueError(f"{name} (to evaluate) or epsilon (to calibrate) must be given, and not both")
    if out is not None and noise is not None:
        raise ValueError(f"out must not be given with {name}: a plan is calibrated, with epsilon")
    is_ours = functools.partial(files.holds_schema, schema=plan.schema)
    files.check_target(out, is_ours, "a plan of this kind", may_force=False)


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
