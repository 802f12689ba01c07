"""Bad arguments of `fit` are refused in one line that names the argument, before any file is made."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from tests.train.fitting import fit
from tests.train.plans import plan
from tests.train.test_loop import PARAMS, ROWS, data, loss

pytestmark = pytest.mark.usefixtures("default_promotion")

MODEL = "model must be an nnx.Module or a pytree of arrays, got "
LOSS = "loss must take (params, one example without a batch axis): "
FUNCTION = "loss must be a function, loss(model, example) -> number, got "
DATA = "data must be arrays with a row for each example"
PLAN = "plan must be a plan of correlated-noise, general-dpsgd, last-iterate, dice, got "
X = np.zeros((ROWS, 3), np.float32)


def swapped(params, example):
    return loss(params, example)


BAD = {
    "a class": (
        dict(model=nnx.Linear),
        MODEL + "the class Linear: give an instance, Linear(..., rngs=nnx.Rngs(0))",
    ),
    "linen": (dict(model=linen.Dense(1)), MODEL + "a linen module: give its parameters, model.init(key, x)"),
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
    "one argument": (dict(loss=lambda params: 0.0), LOSS + "<lambda>() takes 1 positional"),
    "three arguments": (dict(loss=lambda p, e, key: 0.0), LOSS + "<lambda>() missing 1 required"),
    "another column": (dict(loss=lambda p, e: e["z"]), LOSS + "KeyError: 'z'"),
    "attributes": (
        dict(loss=lambda p, e: p.w.sum()),
        LOSS + "AttributeError: 'dict' object has no attribute 'w'",
    ),
    "a batch": (dict(loss=lambda p, e: e["x"][:, 0].sum()), LOSS + "Too many indices"),
    "NumPy": (dict(loss=lambda p, e: np.asarray(p["w"]).sum()), LOSS + "The numpy.ndarray conversion"),
    "a branch": (
        dict(loss=lambda p, e: p["b"] if p["b"] > 0 else 0.0),
        LOSS + "Attempted boolean conversion",
    ),
    "a division": (dict(loss=lambda p, e: 1 / 0), LOSS + "ZeroDivisionError: division by zero"),
    "nothing returned": (dict(loss=lambda p, e: None), "loss must return one number for one example"),
    "no data": (dict(data=None), DATA + ", have rows by index or be a .parquet file, got None"),
    "a table's name": (
        dict(data="train.csv"),
        DATA + ", have rows by index or be a .parquet file, got 'train.csv'",
    ),
    "a generator": (
        dict(data=(row for row in X)),
        DATA + ", have rows by index or be a .parquet file, got a generator: batches",
    ),
    "numbers": (dict(data=[1, 2, 3]), DATA + ", got a single number in 0"),
    "one number": (dict(data=np.float32(3)), DATA + ", got a single number in data"),
    "other lengths": (dict(data=(X, X[:5])), "data must be arrays with the same number of rows, got [5, 60]"),
    "an optimizer not called": (
        dict(optimizer=optax.sgd),
        "optimizer must be an optax transformation, got function: call it, sgd(",
    ),
    "an optimizer's name": (dict(optimizer="sgd"), "optimizer must be an optax transformation, got str"),
    "a clip norm of text": (dict(clip_norm="1"), "clip_norm must be a finite number above 0, got '1'"),
    "a clip norm of NaN": (
        dict(clip_norm=float("nan")),
        "clip_norm must be a finite number above 0, got nan",
    ),
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
    "groups": (dict(clip_groups=3), "clip_groups must be 'layer' or a list of nnx filters, got 3"),
    "a microbatch of text": (
        dict(microbatch_size="big"),
        "microbatch_size must be an integer of at least 1, got 'big'",
    ),
    "verify": (dict(verify="no"), "verify must be True or False, got 'no'"),
    "normalize": (dict(normalize="yes"), "normalize must be True or False, got 'yes'"),
    "skip_padding": (dict(skip_padding=3), "skip_padding must be True, False or None, got 3"),
    "elastic": (dict(elastic=1), "elastic must be True or False, got 1"),
    "has_aux": (dict(has_aux="loss"), "has_aux must be True or False, got 'loss'"),
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


@pytest.mark.parametrize("name", BAD)
def test_one_line_names_the_argument(name, tmp_path):
    change, message = BAD[name]
    given = dict(plan=plan("poisson", dataset_size=ROWS, iterations=2), model=PARAMS, loss=loss, data=data())
    given |= dict(optimizer=optax.sgd(0.1), out=tmp_path / "run") | change
    with pytest.raises(ValueError, match="^" + re.escape(message)) as refused:
        fit(**given)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.rglob("secret.json"))


@pytest.mark.parametrize("below", ["", "/run"])
def test_a_file_is_no_folder(below, tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    covered = plan("poisson", dataset_size=ROWS, iterations=2)
    with pytest.raises(ValueError, match=f"^out must be the path of a folder, {path} is a file$"):
        fit(covered, PARAMS, loss, data(), optax.sgd(0.1), out=f"{path}{below}")


def test_options_are_a_record():
    import train

    covered = plan("poisson", dataset_size=ROWS, iterations=2)
    with pytest.raises(ValueError, match=r"^options must be a train\.TrainOptions, got {'steps': 2}$"):
        train.fit(covered, PARAMS, loss, data(), optax.sgd(0.1), options={"steps": 2})


def test_the_error_of_a_loss_keeps_its_traceback():
    """The line of the caller's function that failed is in the chain."""
    covered = plan("poisson", dataset_size=ROWS, iterations=2)
    with pytest.raises(ValueError) as refused:
        fit(covered, {"w": jnp.zeros(3)}, lambda p, e: e["z"], data(), optax.sgd(0.1))
    assert isinstance(refused.value.__cause__, KeyError)
