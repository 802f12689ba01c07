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
from tests.train.fitting import fit
from tests.train.plans import plan
from tests.train.test_loop import PARAMS, ROWS, data, loss

pytestmark = pytest.mark.usefixtures("default_promotion")

COVERED = plan("poisson", dataset_size=ROWS, iterations=2)
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


def of_call(model, example):
    return (model(example["x"]) - example["y"]) ** 2


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


def of_nnx(make, sequence=False):
    return dict(model=Calls(make, sequence), loss=of_call)


def dropped(params, example):
    return linen.Dropout(0.5, deterministic=False).apply({}, example["x"] * params["w"]).sum()


WROTE = "loss must not write to the model, wrote to layer."


def swapped(params, example):
    return loss(params, example)


BAD = {
    "a class": (
        dict(model=nnx.Linear),
        MODEL + "the class Linear: give an instance, Linear(..., rngs=nnx.Rngs(0))",
    ),
    "linen": (
        dict(model=linen.Dense(1)),
        MODEL + "a linen module: give its parameters, model.init(key, x)['params']",
    ),
    "no model": (dict(model=None), MODEL + "None, which has none"),
    "no parameters": (dict(model={}), MODEL + "{}, which has none"),
    "a name": (dict(model="linear"), MODEL + "'linear'"),
    "a function": (dict(model=swapped), MODEL + "the function swapped"),
    "a name among arrays": (dict(model={"w": X[0], "kind": "x"}), MODEL + "'x' at kind"),
    "integers": (
        dict(model={"w": np.zeros(3, int)}),
        "params must be arrays of real floating-point numbers, got int",
    ),
    "no loss": (dict(loss=None), FUNCTION + "None"),
    "a loss's name": (dict(loss="mse"), FUNCTION + "'mse'"),
    "three arguments": (
        dict(loss=lambda p, e, key: 0.0),
        "TypeError: <lambda>() missing 1 required positional argument: 'key'" + RAISED + ")",
    ),
    "another column": (dict(loss=lambda p, e: e["z"]), "KeyError: 'z'" + RAISED + ")"),
    "a batch": (dict(loss=lambda p, e: e["x"][:, 0].sum()), "IndexError: Too many indices"),
    "a branch": (
        dict(loss=lambda p, e: p["b"] if p["b"] > 0 else 0.0),
        "TracerBoolConversionError: Attempted boolean conversion",
    ),
    "a division": (dict(loss=lambda p, e: 1 / 0), "ZeroDivisionError: division by zero" + RAISED),
    "nothing returned": (dict(loss=lambda p, e: None), "loss must return one number for one example"),
    "no key argument": (
        dict(loss_key=1),
        "TypeError: loss() takes 2 positional arguments but 3 were given" + RAISED + ", key)",
    ),
    "no dropout key": (dict(loss=dropped), "InvalidRngError: None needs PRNG"),
    "nnx.Dropout without a key": (
        of_nnx(lambda rngs: nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.Dropout(0.5))),
        "ValueError: `deterministic` is False, but no `rngs` argument was provided to Dropout" + RAISED,
    ),
    "attention without deterministic": (
        of_nnx(lambda rngs: nnx.MultiHeadAttention(1, 4, dropout_rate=0.1, decode=False, rngs=rngs), True),
        "ValueError: No `deterministic` argument was provided to MultiHeadAttention" + RAISED,
    ),
    "nnx.RNN": (of_nnx(lambda rngs: nnx.RNN(nnx.SimpleCell(4, 2, rngs=rngs)), True), WROTE),
    "nnx.SpectralNorm": (
        of_nnx(lambda rngs: nnx.SpectralNorm(nnx.Linear(3, 4, rngs=rngs), rngs=rngs)),
        WROTE,
    ),
    "nnx.WeightNorm": (of_nnx(lambda rngs: nnx.WeightNorm(nnx.Linear(3, 4, rngs=rngs), rngs=rngs)), WROTE),
    "a train state": (
        dict(model=TrainState.create(apply_fn=loss, params=PARAMS, tx=optax.sgd(0.1))),
        ALONE + "a TrainState: give its .params",
    ),
    "collections": (
        dict(model={"params": PARAMS, "batch_stats": {"mean": X[0]}}),
        ALONE + "the collections batch_stats as well: give init(..)['params'], and bind the others",
    ),
    "modules in a tuple": (
        dict(model=(Raw(True), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))),
        "model must be one nnx.Module, got a tuple that holds Raw: make its modules attributes of one",
    ),
    "raw arrays": (
        dict(model=Raw(), loss=of_call),
        "wrt must select parameters of the model, <class 'flax.nnx.variablelib.Param'> selects none, and has "
        "the array w outside of variables: make it an nnx.Param to train it",
    ),
    "float8": (
        dict(model=jax.tree.map(lambda leaf: leaf.astype(jnp.float8_e4m3fn), PARAMS)),
        "model must have floats of 16 bits or more, got float8_e4m3fn at b",
    ),
    "float8 data": (
        dict(data=jax.tree.map(lambda leaf: leaf.astype(jnp.float8_e4m3fn), data())),
        "TypePromotionError: Input dtypes",
    ),
    "Equinox": (dict(model=of_library("equinox")), MODEL),
    "Haiku": (dict(model=of_library("haiku")), MODEL),
    "Keras": (dict(model=of_library("keras")), MODEL),
    "Hugging Face's models": (dict(model=of_library("transformers")), MODEL),
    "PyTorch": (dict(model=of_library("torch")), MODEL),
    "rows in a list": (
        dict(data=ROW_BY_ROW),
        DATA + ", or have rows by index, got a list: stack its rows, {name: np.stack(",
    ),
    "pairs in a list": (dict(data=[(x, 1.0) for x in X]), DATA),
    "pandas": (dict(data=pandas.DataFrame({"y": data()["y"]})), DATA),
    "PyArrow": (dict(data=pyarrow.table({"y": data()["y"]})), DATA),
    "a loader": (dict(data=Loader()), DATA),
    "streaming": (dict(data=COLUMNS.to_iterable_dataset()), DATA),
    "a DatasetDict": (dict(data=datasets.DatasetDict({"train": COLUMNS})), DATA),
    "a data set of Grain": (dict(data=GRAIN.to_iter_dataset()), DATA),
    "an iterator of Grain": (dict(data=iter(GRAIN.to_iter_dataset())), DATA),
    "no data": (dict(data=None), DATA + ", or have rows by index, got None"),
    "a table's name": (dict(data="train.csv"), DATA + ", or have rows by index, got 'train.csv'"),
    "a generator": (
        dict(data=(row for row in X)),
        DATA + ", or have rows by index, got a generator: batches",
    ),
    "numbers": (dict(data=[1, 2, 3]), DATA + ", got a single number in 0"),
    "other lengths": (dict(data=(X, X[:5])), "data must be arrays with the same number of rows, got [5, 60]"),
    "an optimizer not called": (
        dict(optimizer=optax.sgd),
        "optimizer must be an optax transformation, got function: call it, sgd(",
    ),
    "an optimizer's name": (dict(optimizer="sgd"), "optimizer must be an optax transformation, got str"),
    "a clip norm of text": (dict(clip_norm="1"), "clip_norm must be a finite number above 0, got '1'"),
    "a huge clip norm": (dict(clip_norm=1e300), "clip_norm must be in [1e-30, 1e30], got 1e+300"),
    "a number for a folder": (dict(out=3), "out must be the path of a folder, got 3"),
    "the empty path": (dict(out=""), "out must be the path of a folder, got ''"),
    "a number to evaluate": (
        dict(evaluate=3),
        "evaluate must be a function, evaluate(params) -> {name: number}",
    ),
    "no plan": (dict(plan=None), PLAN + "NoneType"),
    "a record": (dict(plan={}), PLAN + "dict"),
    "steps of text": (dict(steps="a"), "steps must be an integer of at least 1, got 'a'"),
    "a number of devices": (dict(mesh=3), "mesh must be a jax.sharding.Mesh, got 3"),
    "a list of devices": (dict(mesh=jax.devices), "mesh must be a jax.sharding.Mesh, got <function devices"),
    "one key": (dict(keys=3), "keys must be (sampler key, noise key), got int"),
    "no callback": (dict(callback=3), "callback must be a function, got 3"),
    "no progress": (dict(progress=3), "progress must be a function, got 3"),
    "a microbatch of text": (
        dict(microbatch_size="big"),
        "microbatch_size must be an integer of at least 1, got 'big'",
    ),
    "verify": (dict(verify="no"), "verify must be True or False, got 'no'"),
    "normalize": (dict(normalize="yes"), "normalize must be True or False, got 'yes'"),
    "skip_padding": (dict(skip_padding=3), "skip_padding must be True, False or None, got 3"),
    "elastic": (dict(elastic=1), "elastic must be True or False, got 1"),
    "clipping": (dict(clipping="fast"), "clipping must be one of auto, per_example, ghost, got 'fast'"),
    "individual": (
        dict(individual=True),
        "individual must be a train.individual.IndividualAccounting, got True",
    ),
    "a key of text": (
        dict(loss_key="a"),
        "loss_key must be an integer from 0 to 2^32 - 1 or one jax.random.key",
    ),
    "half a checkpoint": (
        dict(checkpoint_every=0.5),
        "checkpoint_every must be an integer of at least 1, got 0.5",
    ),
}


# Case of `BAD` -> what helps, further on in its line.
HELPS = {
    "no dropout key": DROPOUT,
    "nnx.Dropout without a key": DROPOUT,
    "attention without deterministic": DROPOUT,
    "nnx.RNN": "give loss_key to draw from it, and nnx.RNN its initial_carry=",
    "nnx.SpectralNorm": "nnx.clone(model) in the loss",
    "nnx.WeightNorm": "nnx.clone(model) in the loss",
    "float8 data": "x.astype('float32')" + RAISED,
    "Equinox": "eqx.partition(model, eqx.is_inexact_array)",
    "Haiku": "transformed.init(key, x)",
    "Keras": "model.stateless_call(params, fixed, x)",
    "Hugging Face's models": "give model.params",
    "PyTorch": "load_weights",
    "pairs in a list": "tuple(np.stack(column) for column in zip(*data))",
    "pandas": "{name: data[name].to_numpy() for name in data.columns}",
    "a loader": AT_RANDOM
    + "its data set, .dataset; a plan of --scheme fixed-order takes a loader as batches=",
    "streaming": AT_RANDOM + "a data set that is loaded without streaming=True",
    "a DatasetDict": "a DatasetDict: give one of its parts, data['train']",
    "a data set of Grain": AT_RANDOM + "the MapDataset before to_iter_dataset()",
    "an iterator of Grain": AT_RANDOM + "the MapDataset before to_iter_dataset()",
}


def test_one_line_names_the_argument(tmp_path):
    for name, (change, message) in BAD.items():
        given = dict(plan=COVERED, model=PARAMS, loss=loss, data=data())
        given |= dict(optimizer=optax.sgd(0.1), out=tmp_path / "run") | change
        assert HELPS.get(name, "") in refused("^" + re.escape(message), fit, **given)
        assert not list(tmp_path.rglob("secret.json"))


def test_files_and_records_are_refused(tmp_path):
    """A file for a folder, an archive for data, and a dictionary for options."""
    given = dict(plan=COVERED, model=PARAMS, loss=loss, data=data(), optimizer=optax.sgd(0.1))
    path = tmp_path / "file"
    path.write_text("x")
    for below in ("", "/run"):
        refused(f"^out must be the path of a folder, {path} is a file$", fit, **given, out=f"{path}{below}")
    message = r"^options must be a train\.TrainOptions, got {'steps': 2}$"
    refused(message, train.fit, **given, options={"steps": 2})
    np.savez(tmp_path / "rows.npz", **data())
    message = r"an archive of np\.load; give its arrays, {name: data.name. for name in"
    refused(message, fit, **given | {"data": np.load(tmp_path / "rows.npz")})


def test_the_error_of_a_loss_keeps_its_traceback():
    """The line of the caller's function that failed is in the chain."""
    with pytest.raises(ValueError) as caught:
        fit(COVERED, {"w": jnp.zeros(3)}, lambda p, e: e["z"], data(), optax.sgd(0.1))
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_array_beside_parameters_is_warned_of():
    """It is not trained, unless the caller says that this is meant."""
    with pytest.warns(
        UserWarning, match="trained in part, and has the array w outside of variables: make it an"
    ):
        fit(COVERED, Raw(True), of_call, data(), optax.sgd(0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(COVERED, Raw(True), of_call, data(), optax.sgd(0.1), wrt=nnx.Param)


@pytest.mark.parametrize("norm", [nnx.SpectralNorm, nnx.WeightNorm])
def test_what_the_hint_for_rescaled_layers_says_trains(norm):
    model = Calls(lambda rngs: norm(nnx.Linear(3, 4, rngs=rngs), rngs=rngs))
    found = fit(COVERED, model, lambda m, e: of_call(nnx.clone(m), e), data(), optax.sgd(0.1))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(found.params))
