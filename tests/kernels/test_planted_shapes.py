"""Planted mistakes of shape and dtype, which would broadcast or widen, are refused by kernels."""

import jax
import jax.numpy as jnp
import pytest

from jaxacct import BandedToeplitz, Poisson
from jaxacct.kernels.likelihoods import interacting_recurrence
from jaxacct.likelihood.loss import loss_of_scores

ARRAY = jnp.ones((4, 3))
OPTIONS = dict(log_p=-1.0, log_q=-0.5, block=2)


def test_overlaps_have_an_axis_for_every_step_apart():
    with pytest.raises(AssertionError, match="assert_axis_dimension"):
        interacting_recurrence.interacting_log_recurrence(ARRAY, jnp.ones((4, 1)), processes=2, **OPTIONS)


def test_scores_of_another_horizon():
    with pytest.raises(AssertionError, match="assert_shape"):
        loss_of_scores(Poisson(4, 0.5), BandedToeplitz.identity(), ARRAY.T[:, :1], 1.0)


@pytest.mark.parametrize("other", [jnp.ones(3, jnp.int32), jnp.ones((2, 3))])
def test_nothing_is_promoted_implicitly(other):
    """`STRICT` of `conftest.py` holds."""
    with pytest.raises((ValueError, TypeError), match=r"promotion"):
        jax.jit(jnp.add)(jnp.ones(3), other)
