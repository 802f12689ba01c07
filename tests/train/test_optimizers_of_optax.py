"""Every transformation of optax takes two steps, or is refused in one line that says why."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from tests.train.runs import plan
from train.optimizers import privatize
from train.procedures.step import make_step

pytestmark = pytest.mark.usefixtures("default_promotion")

SGD = optax.sgd(0.1)
# Values of required arguments, by name.
VALUES = dict.fromkeys(("learning_rate", "clipping", "eta"), 0.1)
VALUES |= dict.fromkeys(("max_delta", "threshold", "max_norm", "l2_norm_clip", "noise_multiplier"), 1.0)
VALUES |= dict.fromkeys(("inner", "tx", "optimizer", "base_optimizer", "fast_optimizer"), SGD)
VALUES |= dict.fromkeys(("max_consecutive_errors", "max_backtracking_steps", "max_linesearch_steps"), 3)
VALUES |= dict.fromkeys(("mask", "freeze_mask"), lambda w: jax.tree.map(lambda leaf: leaf.ndim > 1, w))
VALUES |= dict(gamma=0.5, decay=0.9, sync_period=2, slow_step_size=0.5, step_size=-0.1, seed=0)
VALUES |= dict(
    adv_optimizer=optax.sgd(0.01),
    should_transform_fn=lambda step: step > 0,
    param_labels=lambda params: jax.tree.map(lambda leaf: "a" if leaf.ndim > 1 else "b", params),
    transforms={"a": SGD, "b": optax.adam(0.1)},
    step_size_fn=lambda step: -0.1,
    measure_name="size",
    measure=lambda updates, *_: updates,
)
OTHERS = {
    "chain": lambda f: f(optax.clip(1.0), SGD),
    "named_chain": lambda f: f(("clip", optax.clip(1.0)), ("sgd", SGD)),
    "inject_hyperparams": lambda f: f(optax.adam)(learning_rate=jnp.float32(0.1)),
    "inject_stateful_hyperparams": lambda f: f(optax.adam)(learning_rate=jnp.float32(0.1)),
    "stateless": lambda f: f(lambda updates, params: updates),
    "stateless_with_tree_map": lambda f: f(lambda update, param: update),
    "noisy_sgd": lambda f: f(0.1, key=0),
    "lookahead": lambda f: f(SGD, 2, 0.5),
}
# What needs more than the noisy gradient -> words of the refusal.
LOSS = "no guarantee covers the loss or its gradient without noise"
NOISE = "must not clip or add noise for privacy"
FAILS = "with the model's parameters; it raised|a gradient like the parameters alone: .*; it raised"
OF_LOSS = "lbfgs polyak_sgd scale_by_polyak scale_by_backtracking_linesearch scale_by_zoom_linesearch momo"
REFUSED = dict.fromkeys([*OF_LOSS.split(), "momo_adam", "reduce_on_plateau", "sophia"], LOSS) | {
    "lookahead": FAILS,  # wants pairs of parameters
    "scale_by_muon": FAILS,  # of matrices alone; `muon` takes all parameters
}
REFUSED |= dict.fromkeys(("dpsgd", "differentially_private_aggregate"), NOISE)


def transformations() -> dict:
    """Functions of both modules that return a transformation, by name."""
    found = {}
    for module in (optax, optax.contrib):
        for name, function in vars(module).items():
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            if "GradientTransformation" in str(inspect.signature(function).return_annotation):
                found[f"{module.__name__}.{name}"] = function
    return found


VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def made(name: str, function):
    """The transformation that a function makes of `VALUES`."""
    short = name.rpartition(".")[2]
    if short in OTHERS:
        return OTHERS[short](function)
    parameters = inspect.signature(function).parameters.values()
    required = [each for each in parameters if each.default is each.empty and each.kind not in VARIADIC]
    return function(**{each.name: VALUES[each.name] for each in required})


PARAMS = {"w": jnp.full((3, 2), 0.1), "b": jnp.zeros(2)}
ROWS = {"x": np.ones((4, 3), np.float32), "y": np.ones((4, 2), np.float32)}


def loss(params, example):
    return jnp.sum((example["x"] @ params["w"] + params["b"] - example["y"]) ** 2)


def check(name: str, function) -> None:
    mechanism = plan("poisson", dataset_size=60).mechanism
    private = privatize(mechanism, clip_norm=1.0, expected_batch_size=4.0)
    transformation = made(name, function)
    step = make_step(loss, private, transformation, clipping="per_example")
    if name.rpartition(".")[2] in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name.rpartition(".")[2]]) as refused:
            step.init(PARAMS)
        assert "\n" not in str(refused.value)
        return
    state = step.init(PARAMS)
    for _ in range(2):
        state, _ = step(state, ROWS, np.ones(4, bool))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(PARAMS))


def test_the_list_is_of_all():
    """Those that are refused exist; a release of optax with others runs them as well."""
    found = transformations()
    assert len(found) >= 119
    assert REFUSED.keys() <= {name.rpartition(".")[2] for name in found}


# Those that died of donated state, or are refused: a fast sibling of all of them.
SOME = ["contrib.prodigy", "contrib.sam", "contrib.dpsgd", "contrib.momo", "lbfgs", "inject_hyperparams"]


@pytest.mark.parametrize("name", [f"optax.{each}" for each in SOME])
def test_some_transformations(name):
    check(name, transformations()[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", transformations())
def test_all_transformations(name):
    check(name, transformations()[name])
