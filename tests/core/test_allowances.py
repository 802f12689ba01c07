"""Allowances that proposals make themselves, recomputed: tables, factors of weights, two distributions.

As in tests/core/test_budget_lines.py no test depends on measured errors, which are far below allowances.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxacct import BandedToeplitz, BMinSep, Mechanism, Poisson, Toeplitz, TruncatedBMinSep
from jaxacct.common.files import Checkpoint
from jaxacct.core import verify as verifying
from jaxacct.core.verify import Run, Stop
from jaxacct.proposals import base
from jaxacct.proposals.base import Draws, Setting, plain
from jaxacct.proposals.families import overlaps, pair_weights, replicas, truncated
from jaxacct.proposals.threshold import Resolved, budget_lines, threshold
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.composed import Composed, TabulatedProfile
from jaxacct.statistics.hockey_stick import Direction, NonFiniteLossError
from jaxacct.statistics.lines import KINDS, BudgetLine, Item, total
from jaxacct.strategies.stationary import circulant_length
from tests.core.test_budget_lines import compare
from tests.core.test_guards import BUDGET, of
from tests.oracles import budget
from tests.refusals import refused

DELTA_V, U = 1e-5, 2.0**-24
COLUMNS = Mechanism(BMinSep(40, 4, 0.05), BandedToeplitz.square_root(4), 1.5)


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
    refused("scale must be a number", threshold, dataclasses.replace(proposal, log_scale=math.nan), DELTA_V)


def gaussian_profile() -> TabulatedProfile:
    """Falls to a floor of 1e-9 within the table."""
    logs = np.linspace(-6.0, 6.0, 241)
    return TabulatedProfile(logs, np.minimum.accumulate(stats.norm.cdf(-logs - 1 - logs**2 / 20) + 1e-9))


def test_factors_of_pairs_allow_for_every_rounding():
    """`(2 slots + 2 m + 20) u` of the largest sums and `(m + 40) u` of all sizes, up or down."""
    m, number, slots = 6, 2, 100_000  # so many that the test's own float32 error is negligible
    shared = np.random.default_rng(5).uniform(0, 0.1, (m, m, 3))
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
    resolved = Resolved(proposal, 1.0, hockey_stick.hockey_stick, (), 2.0)
    assert resolved.terms(Draws(np.array([0.5, 3.0]), np.array([0.0, -700.0])), 0.0).tolist() == [0.0, 1.0]


SMALL = Mechanism(BMinSep(5, 2, 0.2), BandedToeplitz((2.0, 1.0)), 1.1)
TRUNCATED = Mechanism(TruncatedBMinSep(120, 4, 0.1, 50, 600), BandedToeplitz.square_root(3), 2.5)


def test_composed_replicas_book_what_is_left_out_and_weights_of_low_losses():
    """Terms reach down to a loss of epsilon less the end of the profile; the margin is off epsilon."""
    whole = Composed(gaussian_profile(), 1e-4)
    mechanism = Mechanism(Poisson(40, 0.05), SMALL.strategy.identity(), 1.5)
    found = replicas.build(Setting(mechanism, 1.0, Direction.REMOVE, whole), 2)
    log_z = mechanism.scheme.replicas(mechanism).log_normalizer(mechanism)
    expected = budget.loss_items(mechanism, 1e-4, 2)
    margin = sum(amount for kind, amount in expected.values() if kind == "epsilon")
    expected |= budget.weight_items(mechanism, 1e-4, 2, log_z, whole.end + margin)
    without = budget.weight_items(mechanism, 1e-4, 2, log_z)
    assert expected["float32 weights"][1] != without["float32 weights"][1] or whole.end < 4
    exchanged = whole.exchanged(1.0, mechanism.scheme)
    assert 0 < exchanged != whole.left_out > 0
    expected["end of the composed profile"] = "delta", whole.left_out + exchanged
    compare(budget_lines(found, 1e-4), expected, mechanism.scheme.replicas(mechanism).errors(mechanism))
    assert found.lowest == whole.end > 0
    far = dataclasses.replace(found, lowest=500.0)
    weights = budget.weight_items(mechanism, 1e-4, 2, log_z, 500.0 + margin)["float32 weights"][1]
    assert next(x for x in budget_lines(far, 1e-4) if x.name == "float32 weights").amount == pytest.approx(
        weights, rel=1e-9, abs=0)  # fmt: skip


def test_scales_at_an_inflated_probability_are_raised():
    """Both the ratio and what is left of f lowered by 1e-9 of themselves."""
    log_z, m, epsilon = 0.7, 4, 0.4
    more, log_ratio = SMALL.scheme.inflated(2)
    found = replicas._log_inflated_scale(SMALL, log_z, m, 2, epsilon)
    none, inflated_none = (math.exp(one.log_probability_of_none()) for one in (SMALL.scheme, more))
    ratio = math.exp(log_ratio)
    left = inflated_none + ratio * (math.exp(epsilon) - none)
    exact = log_z - math.log(ratio * (m - 1)) + m * math.log((m - 1) / m) + (1 - m) * math.log(left)
    assert 2.5e-9 < found - exact < 1e-8


def test_what_overlapping_columns_lift_is_rounded_up():
    """16 roundings of what is lifted, and no factor above 1."""
    zeros = jnp.zeros((1, 64), jnp.float32)
    arrays = {"lift": jnp.float32(1.0), "precision": jnp.float32(1.0)}
    strategy = BandedToeplitz.square_root(4)
    for lift in (3.0, 1e4):
        parts = zeros, zeros, jnp.asarray([lift], jnp.float32)
        found = float(overlaps.log_factor_of_overlaps(BMinSep(64, 2, 0.5), strategy, arrays, *parts)[0])
        assert 14 * U <= 1 + found / lift <= 18 * U


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_normalizers_of_truncated_batches_are_rounded_up(direction, monkeypatch):
    """What tilted truncation adds, with the allowance for float64; the tables' own part is set to 0."""
    independent = TRUNCATED.scheme.independent_truncation
    chances, untruncated = np.array(independent.chances), independent.untruncated
    monkeypatch.setattr(truncated.replicas, "log_normalizer", lambda of_two: 0.0)
    found = truncated.build(Setting(TRUNCATED, 1.0, Direction(direction), None))
    tilt = float(found.tables()["log_tilt"]) and -math.log1p(-untruncated.sampling_probability)
    exact = math.fsum(np.log1p(chances * math.expm1(tilt)))
    assert exact <= found.log_normalizer <= exact * (1 + 3e-12)
    assert tilt == 0 or found.log_normalizer > exact * (1 + 0.5e-12)


def test_wealth_is_rounded_down():
    """2^-40 of 1 and of the sum of absolute logs of every bet."""
    counts = np.zeros(len(bounds.TERM_EDGES), np.int64)
    counts[[0, 700, 4000, -1]] = 900_000, 40, 5, 2
    bet, theta = 0.3, 1e-4
    for weight in (1.0, 0.25):
        found = bounds.log_wealth(counts, theta, [bet], [weight])
        held = counts > 0
        logs = np.log1p(
            np.longdouble(bet) * (theta - bounds.TERM_EDGES[held].astype(np.longdouble)) / (1 - theta)
        )
        exact, size = logs @ counts[held] + math.log(weight), np.abs(logs) @ counts[held]
        assert 0.9 * 2.0**-40 * (1 + size) <= exact - found <= 1.1 * 2.0**-40 * (1 + size)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_no_weight_or_term_that_is_no_number_is_averaged(bad, direction):
    sign = 1 if direction == "remove" else -1
    losses, weights = np.full(8, 3.0 * sign), np.zeros(8)
    weights[3] = bad
    with pytest.raises(NonFiniteLossError, match="nothing was certified"):
        hockey_stick.weighted_terms(Draws(losses, weights), direction, 1.0)
    with pytest.raises(NonFiniteLossError, match="nothing was certified"):
        hockey_stick.weighted_terms(Draws(losses, 0 * weights[:1]), direction, 1.0, lambda t: np.abs(t) * bad)
    if math.isnan(bad):  # not even where the term is 0
        with pytest.raises(NonFiniteLossError, match="nothing was certified"):
            hockey_stick.weighted_terms(Draws(-losses, weights), direction, 1.0)
    losses[3] = bad
    for loss in (losses, -losses):
        with pytest.raises(NonFiniteLossError, match="not finite"):
            hockey_stick.bin_losses(loss)


def test_the_open_bins_of_losses_are_taken_for_the_worst():
    ends = hockey_stick.loss_bounds("remove"), hockey_stick.loss_bounds("add")
    assert ends[0][-1] == math.inf and ends[1][0] == -math.inf
    width = hockey_stick.LOSS_BIN_WIDTH
    for loss in (-70.0, -3.01, 0.0, 3.01, 70.0):
        (at,) = np.flatnonzero(hockey_stick.bin_losses(np.array([loss])))
        assert ends[0][at] >= loss >= ends[1][at]
        assert abs(loss) > 64 or (ends[0][at] <= loss + width and ends[1][at] >= loss - width)


def test_draws_of_a_mean_with_another_margin_are_not_gone_on_from(tmp_path):
    """Nor of another distribution."""
    begun, job = Run(of(plain(SMALL, "remove"))), "0123456789abcdef"
    margin, key = begun.of.margin, jax.random.key(0)
    distribution = begun.of.proposal.draw_metadata | {"margin": margin}
    state = {"bets": [[0.5], [1.0]], "blocks": 10**6, "counts": [[[0, 128 * 10**6]], [[0, 128 * 10**6]]]}
    for stored, message in [
        (distribution | {"margin": margin * 1.001}, "the proposal.margin is"),
        (distribution | {"margin": margin / 2}, "the proposal.margin is"),
        (distribution | {"log_scale": 1.0}, "the proposal.log_scale is"),
        (distribution | {"proposal": "replicas:2"}, "the proposal.proposal is"),
        (None, "the proposal is None where"),
    ]:
        with Checkpoint(tmp_path) as checkpoint:
            checkpoint.save(f"remove-{job}", state | {"distribution": stored})
            with pytest.raises(ValueError, match=f"checkpoint_dir must be another one: .* {message}"):
                verifying.draw(begun, BUDGET, Stop(), job, key, checkpoint)
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.save(f"remove-{job}", state | {"distribution": distribution})
        found = verifying.draw(begun, BUDGET, Stop(), job, key, checkpoint)
    assert found.num_samples == 128 * 10**6
