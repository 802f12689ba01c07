"""Shared fixtures. Statistical tests fix their keys and derive tolerances from a stated false alarm."""

import jax
import pytest


@pytest.fixture
def x64():
    """Run a test in float64; off again afterwards."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def key():
    """A fixed key; tests alone may fix one."""
    return jax.random.key(20260209)
