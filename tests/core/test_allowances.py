"""Allowances that proposals make themselves, recomputed: tables, factors of weights, lines of two
distributions.

As in tests/core/test_budget_lines.py no test depends on measured errors, which are far below what is allowed
for.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxacct import BandedToeplitz, BMinSep, Mechanism, Toeplitz
from jaxacct.proposals import base
from jaxacct.proposals.base import Draws, plain
from jaxacct.proposals.families import overlaps, pair_weights
from jaxacct.proposals.threshold import Resolved, threshold
from jaxacct.statistics.composed import Composed, TabulatedProfile
from jaxacct.statistics.hockey_stick import NonFiniteLossError, hockey_stick
from jaxacct.statistics.lines import KINDS, BudgetLine, Item, total
from jaxacct.strategies.stationary import circulant_length
from tests.core.test_guards import of

DELTA_V, U = 1e-5, 2.0**-24
COLUMNS = Mechanism(BMinSep(40, 4, 0.05), BandedToeplitz.square_root(4), 1.5)

# --- Sums of items and what they are taken off ---


@pytest.mark.parametrize("kind", KINDS)
def test_items_of_one_kind_are_added_and_relative_ones_multiplied(kind):
    """Rounded up, by little; other kinds have no part in it."""
    amounts = (0.3, 0.02, 0.5)
    lines = [BudgetLine(Item.NORMALS, kind, amount, "") for amount in amounts]
    others = [BudgetLine(Item.SCORES, other, 7.0, "") for other in KINDS if other != kind]
    exact = math.prod(1 + a for a in amounts) - 1 if kind == "relative" else math.fsum(amounts)
    assert exact < total([*others, *lines], kind) <= exact * (1 + 1e-12)
    assert total(others, kind) == total([], kind) == 0


def test_a_threshold_pays_for_every_item():
    """`(delta_v - delta items) / (M prod(1 + relative)) - total variation`, by hand."""
    items = [BudgetLine(item, kind, amount, "") for item in (Item.NORMALS, Item.SCORES) for kind, amount in
             (("delta", 1e-6), ("relative", 0.1), ("total variation", 1e-7))]  # fmt: skip
    proposal = dataclasses.replace(plain(COLUMNS, "remove"), log_scale=math.log(0.25), relative_error=0.2,
                                   total_variation=3e-7, left_out=4e-7,
                                   rounding_lines=lambda delta_v: tuple(items))  # fmt: skip
    exact = (DELTA_V - 2.4e-6) / (0.25 * 1.1**2 * 1.2) - 5e-7
    assert threshold(proposal, DELTA_V) == pytest.approx(exact, rel=1e-12)
    assert threshold(proposal, DELTA_V) <= exact
    assert threshold(proposal, 2.4e-6) == 0
    with pytest.raises(ValueError, match="scale must be a number"):
        threshold(dataclasses.replace(proposal, log_scale=math.nan), DELTA_V)


def gaussian_profile() -> TabulatedProfile:
    """Falls to a floor of 1e-9 within the table."""
    logs = np.linspace(-6.0, 6.0, 241)
    return TabulatedProfile(logs, np.minimum.accumulate(stats.norm.cdf(-logs - 1 - logs**2 / 20) + 1e-9))


# --- Factors of weights ---


def test_factors_of_pairs_allow_for_every_rounding():
    """`(2 slots + 2 m + 20) u` of the largest sums and `(m + 40) u` of all sizes, up or down."""
    m, number, slots = 6, 2, 100_000  # so many that the test's own float32 error is negligible
    rng = np.random.default_rng(5)
    shared = rng.uniform(0, 0.1, (m, m, 3))
    shared = np.triu(np.ones((m, m)), 1)[:, :, None] * (shared + shared.swapaxes(0, 1))
    shared = shared + shared.swapaxes(0, 1)
    meet, own = (np.asarray(part, float) for part in pair_weights.rounds(m, number))
    aligned, apart = (np.einsum("lij,ijs->ls", part, shared) for part in (meet, own))
    aligned = aligned * (m - 1)
    whole = aligned.sum(axis=0) / (m - 1)
    relative = (2 * slots + 2 * m + 20) * U
    allowed = relative * (whole + aligned.max(axis=0) + apart.max(axis=0))
    allowed += (m + 40) * U * (1 + whole + aligned.max(axis=0) + apart.max(axis=0))
    factor = whole - np.log(np.exp(aligned).mean(axis=0)) + np.log(np.exp(-apart).mean(axis=0))
    factor_of = jax.jit(pair_weights.log_factor, static_argnums=(1, 2, 3))
    for side in (1, -1):
        found = np.asarray(factor_of(jnp.asarray(shared, jnp.float32), number, slots, side), float)
        np.testing.assert_allclose(found, np.minimum(factor + side * allowed, 0.0), rtol=0, atol=2e-6)
    assert (factor + allowed < 0).any() and allowed.min() > 1e-3


def test_factors_of_overlapping_columns_allow_for_both_transforms():
    """What all share is raised, what one shares with itself is lowered, each by section 3b's bound."""
    n, b, c = 64, 2, np.array([0.7, 0.5, 0.4, 0.3])
    strategy, scheme = Toeplitz(tuple(c)), BMinSep(n, b, 0.5)
    c = strategy.array
    rng = np.random.default_rng(1)
    alone = np.zeros(n)
    alone[::2] = 1
    together = alone + (rng.random(n) < 0.5) * (np.arange(n) % 2)
    lags = np.correlate(c, c, "full")[c.size - 1 :]

    def far(x):
        return sum(lags[d] * (x[d:] @ x[: n - d]) for d in range(b, c.size))

    length = circulant_length(n, n)
    around = np.zeros(length)
    for d in range(b, c.size):
        around[d] = around[-d] = lags[d]
    largest = np.abs(np.fft.fft(around)).max()
    tau = U * (4 * math.log2(length) + 6)

    def allowed(x):
        return largest / 2 * (2 * tau + (math.log2(length) + 10) * U) * (x @ x)

    lift = far(together) - far(alone) + 3.0
    arrays = {"lift": jnp.float32(1.0), "precision": jnp.float32(1.0)}
    rows = [jnp.asarray(part[None], jnp.float32) for part in (together, alone)]
    factor_of = jax.jit(overlaps.log_factor_of_overlaps, static_argnums=(0, 1))
    found = float(factor_of(scheme, strategy, arrays, *rows, jnp.asarray([lift], jnp.float32))[0])
    raised = found - (far(together) - far(alone) - lift)
    wanted = allowed(together) + allowed(alone)
    slack = 40 * U * lift  # of sums in float32, and what is taken off `lift`
    assert wanted - slack <= raised <= 2.2 * wanted + slack
    assert min(allowed(alone), allowed(together)) > 3 * slack


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_no_infinite_loss_is_averaged(loss, monkeypatch):
    """In a mean test of either direction."""

    def draws(proposal, stream, first, number, dtype=None):
        losses = np.linspace(-1.0, -0.2, 128)
        losses[5] = loss
        yield Draws(losses, np.zeros_like(losses))

    monkeypatch.setattr(base, "draw_in_batches", draws)
    for direction in ("remove", "add"):
        with pytest.raises(NonFiniteLossError, match="1 of 128 privacy losses are not finite"):
            of(plain(COLUMNS, direction)).count(None, 0, 1, 0.0)


# --- The other mechanism of a composition ---


def test_scales_of_a_composed_profile_are_raised_by_an_allowance():
    """By 1e-9 of themselves and of 1, and so is what is left out."""
    profile = gaussian_profile()
    composed = Composed(profile, 1e-4)
    floor = profile.values[profile.values <= 1e-3 * composed.delta][0]
    assert floor < composed.left_out <= floor * (1 + 2e-9)
    dense = np.linspace(-6, composed.end, 200_001)
    with np.errstate(divide="ignore"):
        product = 1.5 * dense + np.log(composed.above_floor(dense))
    assert composed.log_max(1.5) >= product.max() + 2e-9


def test_terms_of_a_scale_beyond_float64_are_rounded_up():
    """1 / M exceeds float64; terms are 0 where they are, 1 elsewhere."""
    mechanism = Mechanism(BMinSep(2, 1, 0.3), BandedToeplitz.identity(), 2.0)
    proposal = dataclasses.replace(plain(mechanism, "remove"), log_scale=-800.0)
    resolved = Resolved(proposal, 1.0, hockey_stick, (), 2.0)
    draws = Draws(np.array([0.5, 3.0]), np.array([0.0, -700.0]))
    assert resolved.terms(draws, 0.0).tolist() == [0.0, 1.0]
