"""A run goes on with the constants that its loss began with, however JAX keeps them."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.batches import fingerprints

# Constants of more than a few numbers are arguments of the lowered program then, and not in its text.
APART = {"JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": "1"}
# In JAX 0.8 nothing can be lowered in this way.
needs_apart = pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="JAX lowers no constants apart")

RESUMED = """
import sys
import numpy as np
from tests.train.test_loop import run

def loss(by):
    constant = by + np.arange(300, dtype=np.float32)
    return lambda params, example: params["b"] * (constant * example["y"]).sum() + params["w"].sum()

run(out=sys.argv[1], loss=loss(1), steps=2, verify=False)
run(out=sys.argv[1], loss=loss(1), steps=2, verify=False)
try:
    run(out=sys.argv[1], loss=loss(2), steps=2, verify=False)
except ValueError as error:
    print(error)
"""


@needs_apart
@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_constant(tmp_path):
    """In CI `test_every_constant_is_in_the_digest`, of which a run is held to be another one."""
    command = [sys.executable, "-c", RESUMED, str(tmp_path / "run")]
    done = subprocess.run(
        command, env=os.environ | APART, cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert "holds a run with another loss" in done.stdout, done.stderr[-2000:]


def programs(by):
    constant = by + jnp.arange(300.0)

    def of_loop(x):
        return jax.lax.scan(lambda y, _: (y + (constant * x).sum(), None), 0.0, None, length=2)[0]

    def of_branch(x):
        return jax.lax.cond(x > 0, lambda: constant.sum(), lambda: 0.0)

    plain, inner = (lambda x: constant * x), jax.jit(lambda x: constant * x)
    kept = (lambda x: constant), (lambda x: jax.random.bits(jax.random.key(0)).astype(jnp.float32) * by * x)
    return [plain, of_loop, of_branch, lambda x: inner(x).sum(), *kept]


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=needs_apart)])
def test_every_constant_is_in_the_digest(apart):
    before = jax.config.values.get("jax_use_simplified_jaxpr_constants", False)
    try:
        if apart:
            jax.config.update("jax_use_simplified_jaxpr_constants", True)
        digests = [
            [fingerprints.of_trace(jax.jit(function).trace(2.0).jaxpr) for function in programs(by)]
            for by in (1, 1, 2)
        ]
    finally:
        if apart:
            jax.config.update("jax_use_simplified_jaxpr_constants", before)
    assert digests[0] == digests[1]
    assert not set(digests[0]) & set(digests[2])


def test_a_constant_key_is_in_the_digest():
    keys = [jax.random.key(seed) for seed in (0, 0, 1)]
    digests = [
        fingerprints.of_trace(jax.make_jaxpr(lambda x, key=key: jax.random.normal(key) + x)(np.float32(1)))
        for key in keys
    ]
    assert digests[0] == digests[1] != digests[2]


def test_sets_are_in_the_digest_in_one_order():
    """The order of their text differs from process to process."""
    orders = [("data", "model", "other"), ("other", "model", "data")]
    assert len({tuple(fingerprints._parameter(frozenset(names))) for names in orders}) == 1
    assert tuple(fingerprints._parameter(frozenset(("data",)))) != tuple(fingerprints._parameter(frozenset()))
