"""Plans, models and runs for tests of the trainer.

Plans are of a huge epsilon, so that an analytic bound certifies any noise.
"""

import contextlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import train.training
from jaxacct import BandedToeplitz, CustomScheme, Mechanism, Plan
from jaxacct.core.claim import Claim, ClaimedTarget
from jaxacct.core.evidence import Bound
from jaxacct.schemes import BalancedMinSep, BMinSep, CyclicPoisson, EpochwiseAllocation, Poisson
from tests.stored_plans import with_derived
from train.batches.sampler import Sampler
from train.training import TrainOptions

SCHEMES = {
    "poisson": lambda n, p, b: Poisson(n, p),
    "cyclic-poisson": lambda n, p, b: CyclicPoisson(n, b, min(1.0, p * b)),
    "b-min-sep": lambda n, p, b: BMinSep(n, b, p),
    "balanced-min-sep": lambda n, p, b: BalancedMinSep(n, b, n * p),
    "epochwise-allocation": lambda n, p, b: EpochwiseAllocation(n, round(1 / p), b),
    "custom": lambda n, p, b: CustomScheme([min(1.0, p * (i + 1)) for i in range(n)], b),
}


def plan(
    kind="b-min-sep",
    *,
    dataset_size,
    iterations=12,
    rate=0.1,
    separation=4,
    bands=3,
    sigma=1.0,
    epsilon=1e9,
    strategy=None,
    **derived,
):
    """A plan by an analytic bound; at an epsilon of about 1 it is not certified. Sizes may be forged."""
    bands = 1 if kind == "poisson" else bands
    scheme = SCHEMES[kind](iterations, rate, separation)
    mechanism = Mechanism(scheme, strategy or BandedToeplitz.square_root(bands), sigma)
    made = plan_of(mechanism, dataset_size, epsilon)
    return with_derived(made, **derived) if derived else made


def plan_of(mechanism: Mechanism, dataset_size: int, epsilon: float = 1e4, delta: float = 1e-5) -> Plan:
    """The plan of a mechanism by an analytic bound."""
    claim = Claim(mechanism, ClaimedTarget.at(epsilon, delta), dataset_size, None)
    target = ClaimedTarget.at(epsilon, delta, reserved=claim.reserved)
    return Plan(Claim(mechanism, target, dataset_size, None), Bound("unamplified"))


_ARGUMENTS = set(inspect.signature(train.training.fit).parameters)


def fit(*args, **given):
    """`train.fit` with options as keywords: whatever is no argument of it."""
    options = {name: given.pop(name) for name in set(given) - _ARGUMENTS}
    return train.training.fit(*args, **given, options=TrainOptions(**options))


KEYS = ((1, 2, 3, 4), np.arange(8, dtype=np.uint32))
ROWS = 60


def data(rows=ROWS):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 3)).astype(np.float32)
    return {"x": x, "y": (x @ np.array([1.0, -2.0, 0.5], np.float32))}


def loss(params, example):
    return (example["x"] @ params["w"] + params["b"] - example["y"]) ** 2


PARAMS = {"w": jnp.zeros(3), "b": jnp.zeros(())}


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def run(**options):
    given = dict(plan=plan(dataset_size=ROWS), model=PARAMS, loss=loss, data=data(), keys=KEYS)
    return fit(**given | {"optimizer": optax.sgd(0.05)} | options)


class Crash(Exception):
    pass


@contextlib.contextmanager
def crash_at(target, name: str, call: int):
    """`target.name` raises at its `call`-th call, counted from 1."""
    real, calls = getattr(target, name), []

    def broken(self, *args, **options):
        calls.append(1)
        if len(calls) == call:
            raise Crash
        return real(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, broken)
        yield


def crashed(call: int, of=run, **options) -> None:
    """A run that ends when it draws its `call`-th batch, counted from 1."""
    with crash_at(Sampler, "next", call), pytest.raises(Crash):
        of(**options)


def squared(model, example):
    """The squared error of a module that returns one number."""
    return (model(example["x"]) - example["y"]) ** 2


def made(make):
    """The module that `make()` makes, with parameters drawn by NumPy: initializers compile every shape anew.

    Normal numbers over the root of the inputs that are added up; keys and counts of generators are 0.
    """
    generator = np.random.default_rng(0)

    def drawn(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.device_put(np.zeros(leaf.shape, leaf.dtype))
        scale = np.sqrt(max(1, np.prod(leaf.shape[:-1])))
        # Of an array of NumPy `jnp.asarray` makes a program for every shape, and this none.
        return jax.device_put(np.asarray(generator.normal(size=leaf.shape) / scale, leaf.dtype))

    definition, state = nnx.split(nnx.eval_shape(make))
    return nnx.merge(definition, jax.tree.map(drawn, state))
