"""Bad arguments of `fit` are refused in one line that names the argument, before any file is made."""

import re
import warnings

import datasets
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
import pyarrow
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import train
from tests.refusals import refused
from tests.train.runs import PARAMS, ROWS, data, fit, loss, plan, plan_of, squared

pytestmark = pytest.mark.usefixtures("default_promotion")

SGD = optax.sgd(0.1)
GIVEN = dict(plan=plan("poisson", dataset_size=ROWS, iterations=2), model=PARAMS, loss=loss)
GIVEN |= dict(data=data(), optimizer=SGD)
MODEL = "model must be an nnx.Module or a pytree of arrays, got "
RAISED = ", raised by loss(model or params, one example without a batch axis"
FUNCTION = "loss must be a function, loss(model, example) -> number, got "
DATA = "data must be arrays with a row for each example"
PLAN = "plan must be a plan of correlated-noise, general-dpsgd, last-iterate, dice, got "
X = np.zeros((ROWS, 3), np.float32)
ROW_BY_ROW = [{"x": x, "y": y} for x, y in zip(data()["x"], data()["y"], strict=True)]
COLUMNS = datasets.Dataset.from_dict(data())
GRAIN = grain.MapDataset.source(ROW_BY_ROW)
ALONE = "model must be parameters alone, got "
AT_RANDOM = "batches are drawn at random, so give "
DROPOUT = "model.eval() or deterministic=True drops nothing; for dropout give TrainOptions(loss_key=0)"


class Loader:
    """As PyTorch's: batches in order, of a data set."""

    dataset = ROW_BY_ROW

    def __iter__(self):
        return iter(self.dataset)

    def __len__(self):
        return 6


def of_library(name):
    """An object of another library's class, as the first part of its module says."""
    return type("Model", (), {"__module__": f"{name}.src.models"})()


class Calls(nnx.Module):
    """A layer on the inputs, or on them as a sequence; the sum of what it returns."""

    def __init__(self, make, sequence=False):
        self.layer, self.sequence = make(nnx.Rngs(0)), sequence

    def __call__(self, x):
        return jnp.sum(self.layer(x[:, None] * jnp.ones(4) if self.sequence else x))


class Raw(nnx.Module):
    """A weight that is an array rather than a variable."""

    def __init__(self, bias=False):
        self.w = jnp.zeros(3)
        if bias:
            self.b = nnx.Param(jnp.zeros(()))

    def __call__(self, x):
        return x @ self.w + (self.b[...] if hasattr(self, "b") else 0)


def rescaled(norm):
    return Calls(lambda rngs: norm(nnx.Linear(3, 4, rngs=rngs), rngs=rngs))


def of_float8(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float8_e4m3fn), tree)


def dropped(params, example):
    return linen.Dropout(0.5, deterministic=False).apply({}, example["x"] * params["w"]).sum()


WROTE, CLONED = "loss must not write to the model, wrote to layer.", "nnx.clone(model) in the loss"


def swapped(params, example):
    return loss(params, example)


def restless(update, state, params=None):
    turned = {jnp.dtype("float32"): jnp.float16, jnp.dtype("float16"): jnp.float32}
    return update, state.astype(turned[state.dtype])


schedule_free = optax.contrib.schedule_free_eval_params
# Argument -> values that it is refused for: what each line begins with, and what helps, further on in it.
BAD = {
    "model": [
        (nnx.Linear, MODEL + "the class Linear: give an instance, Linear(..., rngs=nnx.Rngs(0))"),
        (linen.Dense(1), MODEL + "a linen module: give its parameters, model.init(key, x)['params']"),
        (None, MODEL + "None, which has none"),
        ({}, MODEL + "{}, which has none"),
        ("linear", MODEL + "'linear'"),
        (swapped, MODEL + "the function swapped"),
        ({"w": X[0], "kind": "x"}, MODEL + "'x' at kind"),
        ({"w": np.zeros(3, int)}, "params must be arrays of real floating-point numbers, got int"),
        (of_float8(PARAMS), "model must have floats of 16 bits or more, got float8_e4m3fn at b"),
        (TrainState.create(apply_fn=loss, params=PARAMS, tx=SGD), ALONE + "a TrainState: give its .params"),
        ({"params": PARAMS, "batch_stats": {"mean": X[0]}},
         ALONE + "the collections batch_stats as well: give init(..)['params'], and bind the others"),
        ((Raw(True), nnx.BatchNorm(3, rngs=nnx.Rngs(0))),
         "model must be one nnx.Module, got a tuple that holds Raw: make its modules attributes of one"),
        (of_library("equinox"), MODEL, "eqx.partition(model, eqx.is_inexact_array)"),
        (of_library("haiku"), MODEL, "transformed.init(key, x)"),
        (of_library("keras"), MODEL, "model.stateless_call(params, fixed, x)"),
        (of_library("transformers"), MODEL, "give model.params"),
        (of_library("torch"), MODEL, "load_weights"),
    ],
    "module": [  # with a loss that calls it
        (Raw(), "wrt must select parameters of the model, <class 'flax.nnx.variablelib.Param'> selects none, "
                "and has the array w outside of variables: make it an nnx.Param to train it"),
        (Calls(lambda rngs: nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.Dropout(0.5))),
         "ValueError: `deterministic` is False, but no `rngs` argument was provided to Dropout" + RAISED,
         DROPOUT),
        (Calls(lambda rngs: nnx.MultiHeadAttention(1, 4, dropout_rate=0.1, decode=False, rngs=rngs), True),
         "ValueError: No `deterministic` argument was provided to MultiHeadAttention" + RAISED, DROPOUT),
        (Calls(lambda rngs: nnx.RNN(nnx.SimpleCell(4, 2, rngs=rngs)), True), WROTE,
         "give loss_key to draw from it, model.eval() or deterministic=True to draw nothing, and nnx.RNN"),
        (rescaled(nnx.SpectralNorm), WROTE, CLONED),
        (rescaled(nnx.WeightNorm), WROTE, CLONED),
    ],
    "loss": [
        (None, FUNCTION + "None"),
        ("mse", FUNCTION + "'mse'"),
        (lambda p, e, key: 0.0,
         "TypeError: <lambda>() missing 1 required positional argument: 'key'" + RAISED + ")"),
        (lambda p, e: e["z"], "KeyError: 'z'" + RAISED + ")"),
        (lambda p, e: e["x"][:, 0].sum(), "IndexError: Too many indices"),
        (lambda p, e: p["b"] if p["b"] > 0 else 0.0,
         "TracerBoolConversionError: Attempted boolean conversion"),
        (lambda p, e: 1 / 0, "ZeroDivisionError: division by zero" + RAISED),
        (lambda p, e: None, "loss must return one number for one example"),
        (lambda p, e: e["x"], "loss must return one number for one example"),
        (dropped, "InvalidRngError: None needs PRNG", DROPOUT),
    ],
    "data": [
        (of_float8(data()), "TypePromotionError: Input dtypes", "x.astype('float32')" + RAISED),
        (ROW_BY_ROW, DATA + ", or have rows by index, got a list: stack its rows, {name: np.stack("),
        ([(x, 1.0) for x in X], DATA, "tuple(np.stack(column) for column in zip(*data))"),
        (pandas.DataFrame({"y": data()["y"]}), DATA,
         "{name: data[name].to_numpy() for name in data.columns}"),
        (pyarrow.table({"y": data()["y"]}), DATA),
        (Loader(), DATA,
         AT_RANDOM + "its data set, .dataset; a plan of --scheme fixed-order takes a loader as batches="),
        (COLUMNS.to_iterable_dataset(), DATA, AT_RANDOM + "a data set that is loaded without streaming=True"),
        (datasets.DatasetDict({"train": COLUMNS}), DATA,
         "a DatasetDict: give one of its parts, data['train']"),
        (GRAIN.to_iter_dataset(), DATA, AT_RANDOM + "the MapDataset before to_iter_dataset()"),
        (iter(GRAIN.to_iter_dataset()), DATA, AT_RANDOM + "the MapDataset before to_iter_dataset()"),
        (None, DATA + ", or have rows by index, got None"),
        ("train.csv", DATA + ", or have rows by index, got 'train.csv'"),
        ((row for row in X), DATA + ", or have rows by index, got a generator: batches"),
        ([1, 2, 3], DATA + ", got a single number in 0"),
        ((X, X[:5]), "data must be arrays with the same number of rows, got [5, 60]"),
        (data(59), "data must have the plan's dataset_size 60 rows, got 59"),
        (data(61), "data must have the plan's dataset_size 60 rows, got 61"),
        (data() | {"y": np.full(60, np.nan)}, "data must be finite, got NaN or infinity"),
        (data() | {"y": np.array(["a"] * 60)}, "data must be numbers, got <U1 in y: turn text"),
        (data() | {"y": np.array([None] * 60)}, "data must be numbers, got object in y"),
    ],
    "optimizer": [
        (optax.sgd, "optimizer must be an optax transformation, got function: call it, sgd("),
        ("sgd", "optimizer must be an optax transformation, got str"),
        (nnx.Optimizer(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), SGD, wrt=nnx.Param),
         "optimizer must be an optax transformation, got Optimizer: give the transformation"),
        (optax.GradientTransformation(lambda params: jnp.zeros(()), restless),
         "optimizer must keep the dtypes of its state"),
        (None, "optimizer must be given"),
    ],
    "plan": [
        (None, PLAN + "NoneType"),
        ({}, PLAN + "dict"),
        ("no/such/plan.json", "plan no/such/plan.json"),
        (plan(dataset_size=ROWS, epsilon=0.01), "plan must be certified"),
        (plan_of(plan(dataset_size=ROWS).mechanism, None), "plan must state the dataset_size"),
    ],
    "clip_norm": [
        ("1", "clip_norm must be a finite number above 0, got '1'"),
        (1e300, "clip_norm must be in [1e-30, 1e30], got 1e+300"),
    ],
    "out": [(3, "out must be the path of a folder, got 3"), ("", "out must be the path of a folder, got ''")],
    "mesh": [
        (3, "mesh must be a jax.sharding.Mesh, got 3"),
        (jax.devices, "mesh must be a jax.sharding.Mesh, got <function devices"),
    ],
    "loss_key": [
        (1, "TypeError: loss() takes 2 positional arguments but 3 were given" + RAISED + ", key)"),
        ("a", "loss_key must be an integer from 0 to 2^32 - 1 or one jax.random.key"),
        (True, "loss_key must be an integer"),
        (jax.random.split(jax.random.key(0)), "loss_key must be an integer"),
    ],
    "evaluate": [(3, "evaluate must be a function, evaluate(params) -> {name: number}")],
    "steps": [
        ("a", "steps must be an integer of at least 1, got 'a'"),
        (3, "steps must be at most the plan's 2, got 3"),
    ],
    "average": [(value, "average must be in (0, 1), got") for value in (0.0, 1.0, -0.5, schedule_free)],
    "wrt": [(nnx.Param, "wrt must not be given for a pytree")],
    "keys": [(3, "keys must be (sampler key, noise key), got int")],
    "callback": [(3, "callback must be a function, got 3")],
    "progress": [(3, "progress must be a function, got 3")],
    "microbatch_size": [
        ("big", "microbatch_size must be an integer of at least 1, got 'big'"),
        (-1, "microbatch_size must be an integer of at least 1, got -1"),
    ],
    "verify": [("no", "verify must be True or False, got 'no'")],
    "normalize": [("yes", "normalize must be True or False, got 'yes'")],
    "skip_padding": [(3, "skip_padding must be True, False or None, got 3")],
    "elastic": [(1, "elastic must be True or False, got 1")],
    "clipping": [("fast", "clipping must be one of auto, per_example, ghost, got 'fast'")],
    "individual": [(True, "individual must be a train.individual.IndividualAccounting, got True")],
    "checkpoint_every": [(0.5, "checkpoint_every must be an integer of at least 1, got 0.5")],
}  # fmt: skip


def test_one_line_names_the_argument(tmp_path):
    for name, cases in BAD.items():
        for value, message, *helps in cases:
            change = dict(model=value, loss=squared) if name == "module" else {name: value}
            given = GIVEN | dict(out=tmp_path / "run") | change
            said = refused("^" + re.escape(message), fit, **given)
            assert all(words in said for words in helps)
            assert not list(tmp_path.rglob("secret.json"))


def test_files_and_records_are_refused(tmp_path):
    """A file for a folder, an archive for data, and a dictionary for options."""
    path = tmp_path / "file"
    path.write_text("x")
    for below in ("", "/run"):
        refused(f"^out must be the path of a folder, {path} is a file$", fit, **GIVEN, out=f"{path}{below}")
    message = r"^options must be a train\.TrainOptions, got {'steps': 2}$"
    refused(message, train.fit, **GIVEN, options={"steps": 2})
    np.savez(tmp_path / "rows.npz", **data())
    message = r"an archive of np\.load; give its arrays, {name: data.name. for name in"
    refused(message, fit, **GIVEN | {"data": np.load(tmp_path / "rows.npz")})


def test_the_error_of_a_loss_keeps_its_traceback():
    """The line of the caller's function that failed is in the chain."""
    with pytest.raises(ValueError) as caught:
        fit(**GIVEN | {"loss": lambda p, e: e["z"]})
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_array_beside_parameters_is_warned_of():
    """It is not trained, unless the caller says that this is meant."""
    given = GIVEN | dict(model=Raw(True), loss=squared)
    message = "trained in part, and has the array w outside of variables: make it an"
    with pytest.warns(UserWarning, match=message):
        fit(**given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(**given, wrt=nnx.Param)


@pytest.mark.parametrize("norm", [nnx.SpectralNorm, nnx.WeightNorm])
def test_what_the_hint_for_rescaled_layers_says_trains(norm):
    found = fit(**GIVEN | dict(model=rescaled(norm), loss=lambda m, e: squared(nnx.clone(m), e)))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(found.params))
