"""What scales, tangents and factors are raised or lowered by, recomputed; see test_allowances.py."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxacct import BandedToeplitz, BMinSep, Mechanism, Poisson, TruncatedBMinSep
from jaxacct.common.files import Checkpoint
from jaxacct.core import verify as verifying
from jaxacct.core.verify import Run, Stop
from jaxacct.proposals.base import Draws, Setting, plain
from jaxacct.proposals.families import overlaps, replicas, truncated
from jaxacct.proposals.threshold import budget_lines
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.composed import Composed
from jaxacct.statistics.hockey_stick import Direction, NonFiniteLossError
from tests.core.test_allowances import U, gaussian_profile
from tests.core.test_budget_lines import compare
from tests.core.test_guards import BUDGET, of
from tests.oracles import budget_families as families

SMALL = Mechanism(BMinSep(5, 2, 0.2), BandedToeplitz((2.0, 1.0)), 1.1)
TRUNCATED = Mechanism(TruncatedBMinSep(120, 4, 0.1, 50, 600), BandedToeplitz.square_root(3), 2.5)


def test_composed_replicas_book_what_is_left_out_and_weights_of_low_losses():
    """Terms reach down to a loss of epsilon less the end of the profile; the margin is off epsilon."""
    whole, mechanism = (
        Composed(gaussian_profile(), 1e-4),
        Mechanism(Poisson(40, 0.05), SMALL.strategy.identity(), 1.5),
    )
    found = replicas.build(Setting(mechanism, 1.0, Direction.REMOVE, whole), 2)
    log_z = mechanism.scheme.replicas(mechanism).log_normalizer(mechanism)
    expected = families.loss_items(mechanism, 1e-4, 2)
    margin = sum(amount for kind, amount in expected.values() if kind == "epsilon")
    expected |= families.weight_items(mechanism, 1e-4, 2, log_z, whole.end + margin)
    without = families.weight_items(mechanism, 1e-4, 2, log_z)
    assert expected["float32 weights"][1] != without["float32 weights"][1] or whole.end < 4
    exchanged = whole.exchanged(1.0, mechanism.scheme)
    assert 0 < exchanged != whole.left_out > 0
    expected["end of the composed profile"] = "delta", whole.left_out + exchanged
    relative, variation = mechanism.scheme.replicas(mechanism).errors(mechanism)
    compare(budget_lines(found, 1e-4), expected, [("relative", relative), ("total variation", variation)])
    assert found.lowest == whole.end > 0
    far = dataclasses.replace(found, lowest=500.0)
    weights = families.weight_items(mechanism, 1e-4, 2, log_z, 500.0 + margin)["float32 weights"][1]
    assert next(x for x in budget_lines(far, 1e-4) if x.name == "float32 weights").amount == pytest.approx(
        weights, rel=1e-9, abs=0)  # fmt: skip


# --- Remove direction ---


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
    setting = Setting(TRUNCATED, 1.0, Direction(direction), None)
    found = truncated.build(setting)
    tilt = float(found.tables()["log_tilt"]) and -math.log1p(-untruncated.sampling_probability)
    exact = math.fsum(np.log1p(chances * math.expm1(tilt)))
    assert exact <= found.log_normalizer <= exact * (1 + 3e-12)
    assert tilt == 0 or found.log_normalizer > exact * (1 + 0.5e-12)


# --- Tests of a mean ---


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
