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

from jaxacct import BandedToeplitz, BMinSep, IndependentAttribution, Mechanism, Toeplitz
from jaxacct.common.files import Checkpoint
from jaxacct.core import verify as verifying
from jaxacct.core.verify import Run, Stop
from jaxacct.proposals import base
from jaxacct.proposals.add_direction import extrapolation, half_space, mean_overlaps
from jaxacct.proposals.base import Draws, plain
from jaxacct.proposals.families import overlaps, pair_weights
from jaxacct.proposals.threshold import Resolved, budget_lines, threshold
from jaxacct.statistics import bounds
from jaxacct.statistics.composed import Composed, TabulatedProfile
from jaxacct.statistics.hockey_stick import NonFiniteLossError, hockey_stick
from jaxacct.statistics.lines import KINDS, BudgetLine, Item, total
from jaxacct.strategies.stationary import circulant_length
from tests.core.test_guards import BUDGET, a_line, of
from tests.oracles import budget_families
from tests.proposals_by_name import proposal_by_name

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
    assert budget_lines(dataclasses.replace(proposal, log_scale=-math.inf), DELTA_V) == ()
    with pytest.raises(ValueError, match="scale must be a number"):
        threshold(dataclasses.replace(proposal, log_scale=math.nan), DELTA_V)


# --- The table of a coordinate ---


def distribution_of_cells(cells):
    """(chance of each cell, float64, and ln of the density in it) as they are drawn: words of 32 bits."""
    last = np.asarray(cells["last"], np.float64)
    chances = np.diff(np.append(-1.0, last)) / 2**32
    assert chances.min() > 0 and chances.sum() == 1
    return chances, np.log(chances) - math.log(float(cells["width"]))


def test_weights_of_a_table_are_rounded_up():
    """`ln phi(upper end) - ln r`, four roundings of it and of 1 above, of which storing it takes one."""
    width, rng = 2.0**-7, np.random.default_rng(2)
    upper = 2.0 - width * np.arange(half_space.CELLS)
    log_peak = stats.norm.logpdf(upper) + rng.uniform(-3, 0, upper.size)
    log_scale, cells = half_space.place_cells(upper, width, log_peak)
    chances, log_density = distribution_of_cells(cells)
    exact = stats.norm.logpdf(upper) - log_density
    raised = np.asarray(cells["log_weight"], float) - exact
    assert (raised >= 2.9 * U * (1 + np.abs(exact))).all() and raised.max() < 1e-3
    assert chances.min() >= 2.0**-32  # every cell may be drawn, or its weight would be infinite
    assert 0 < log_scale - (log_peak - log_density).max() < 1e-11


@pytest.mark.parametrize(("edge", "slope"), [(-5.0, 0.3), (-1.0, 2.0), (0.5, 0.7)])
def test_a_table_says_what_it_leaves_out(edge, slope):
    """The tail below the last cell, over the scale; no term in a cell exceeds that."""
    log_scale, tail, cells = half_space.coordinate_table(edge, slope)
    width = float(cells["width"])
    upper = edge - width * np.arange(half_space.CELLS)
    assert tail == pytest.approx(stats.norm.cdf(upper[-1] - width) / math.exp(log_scale), rel=1e-2, abs=0)
    # The normal density is largest at the end nearer to 0, the other factor at the lower end.
    largest = stats.norm.logpdf(np.clip(0.0, upper - width, upper))
    largest += np.log(-np.expm1(slope * (upper - width - edge)))
    assert (largest - distribution_of_cells(cells)[1]).max() == pytest.approx(log_scale, abs=1e-5)


def test_what_half_spaces_say_of_their_distribution():
    found = proposal_by_name(COLUMNS, 1.0, "add", "half-space")
    cells, remainder = found.tables(), half_space.log_remainder_scale(COLUMNS, 1.0)
    end = float(cells["upper"][-1]) - float(cells["width"])
    tail = stats.norm.cdf(end) / math.exp(found.log_scale - remainder)
    assert found.total_variation == pytest.approx(tail, rel=1e-2, abs=0) and tail > 0
    assert found.relative_error == 2.0**-20
    n = COLUMNS.scheme.iterations
    assert float(cells["rounding"]) == pytest.approx((math.ceil(math.log2(n)) + 6) * U, rel=1e-6)


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
    factor_of = jax.jit(overlaps.log_factor, static_argnums=(0, 1))
    found = float(factor_of(scheme, strategy, arrays, *rows, jnp.asarray([lift], jnp.float32))[0])
    raised = found - (far(together) - far(alone) - lift)
    wanted = allowed(together) + allowed(alone)
    slack = 40 * U * lift  # of sums in float32, and what is taken off `lift`
    assert wanted - slack <= raised <= 2.2 * wanted + slack
    assert min(allowed(alone), allowed(together)) > 3 * slack


@pytest.mark.parametrize("odds", [1e-4, 0.3, 2.0])
def test_means_are_those_of_a_distribution_that_is_only_near(odds):
    """k times (K e^Delta + 1) Delta^2 / 2, Delta from the error of the likelihood of one."""
    mechanism = Mechanism(IndependentAttribution(60, 4, 0.02, 3), BandedToeplitz.square_root(4), 2.5)
    lines = (BudgetLine(Item.RATIO, "epsilon", odds / 3, ""),)
    *kept, found = mean_overlaps.tilted_to_means(mechanism, lines)
    assert tuple(kept) == lines and found.kind == "epsilon"
    made = {line.name: (line.kind, line.amount) for line in lines}
    assert found.amount == pytest.approx(budget_families.means_item(mechanism, made), rel=1e-9, abs=0)
    by_hand = 3 * (15 * math.exp(odds + 1e-5) + 1) * (odds + 1e-5) ** 2 / 2
    assert found.amount == pytest.approx(by_hand, rel=1e-9, abs=0)


# --- Lines through two distributions ---


def test_both_distributions_of_a_line_are_pushed_the_safe_way():
    """The near one further and the far one less far, by 2^-20 of the distance, in float32."""
    near, far = 1.3, 2.9
    line = extrapolation.at_distances(COLUMNS, 0.5, near, far)
    mean = COLUMNS.scheme.participation_probabilities()
    signal = COLUMNS.strategy.gram(mean)
    along = signal / math.sqrt(mean @ signal)
    for distribution, distance, side in ((line.near, near, 1), (line.far, far, -1)):
        shift = np.asarray(distribution.tables()["shift"], float) / (distance * along) - 1
        np.testing.assert_allclose(shift, side * 2.0**-20, rtol=0.1)
        assert (side * shift > 2 * U).all()


def test_items_of_a_line_are_those_of_its_farther_distribution():
    """Scores as far as the far distribution moves them, and a hundredth; no delta is shared out."""
    near, far = 0.5, 9.0
    line = extrapolation.at_distances(COLUMNS, 0.5, near, far)
    expected = budget_families.loss_items(COLUMNS, 1e-12, "add", 1, 1.01 * far)
    found = {item.name: (item.kind, item.amount) for item in line.lines}
    assert found.keys() == expected.keys()
    for name, (kind, amount) in expected.items():
        assert found[name] == (kind, pytest.approx(amount, rel=1e-6, abs=0))
    of_kind = {
        kind: sum(a for k, a in expected.values() if k == kind) for kind in ("delta", "total variation")
    }
    assert of_kind["delta"] > 0.01 * of_kind["total variation"]
    assert line.unseen == pytest.approx(sum(of_kind.values()), rel=1e-6, abs=0)
    margin = sum(amount for kind, amount in expected.values() if kind == "epsilon")
    assert extrapolation.margin_of_line(line) == pytest.approx(margin, rel=1e-6, abs=0)


def test_the_bound_of_a_line_is_rounded_up():
    """`Phi((Phi^-1(near) - ratio Phi^-1(far)) / (1 - ratio))` of a height raised by 1e-9 of it and of 1."""
    for near, far, near_upper, far_lower in (
        (1.0, 2.0, 1e-4, 0.2),
        (2.0, 3.0, 0.01, 0.3),
        (0.5, 4.0, 0.2, 0.9),
    ):
        ratio = near / far
        height = (stats.norm.ppf(near_upper) - ratio * stats.norm.ppf(far_lower)) / (1 - ratio)
        found = extrapolation.log_bound(near, far, -0.25, near_upper, far_lower) + 0.25
        raised = stats.norm.logcdf(height + 1e-9 * (1 + abs(height)))
        assert found == pytest.approx(raised, rel=1e-12, abs=1e-14)
        assert found > stats.norm.logcdf(height + 0.5e-9 * (1 + abs(height)))
    assert extrapolation.log_bound(1.0, 2.0, -0.25, 1.0, 0.5) == -0.25
    assert extrapolation.log_bound(1.0, 2.0, -0.25, 0.5, 0.0) == -0.25


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("distribution", [0, 1])
def test_a_line_averages_no_infinite_losses(loss, distribution, monkeypatch):
    """Of either distribution; nor does a mean test of either direction."""
    called = []

    def draws(proposal, stream, first, number, dtype=None):
        losses = np.linspace(-1.0, -0.2, 128)
        losses[5] = loss if len(called) == distribution else -0.5
        called.append(proposal)
        yield Draws(losses, np.zeros_like(losses))

    monkeypatch.setattr(base, "draw_in_batches", draws)
    with pytest.raises(NonFiniteLossError, match="1 of 128 privacy losses are not finite"):
        extrapolation.count_terms(a_line(), jax.random.key(0), 0.1, 0, 1)
    assert len(called) == distribution + 1
    called[:] = [None] * distribution
    for direction in ("remove", "add"):
        with pytest.raises(NonFiniteLossError, match="not finite"):
            of(plain(COLUMNS, direction)).count(None, 0, 1, 0.0)
        called[:] = [None] * distribution


def test_draws_of_a_line_with_another_margin_are_not_gone_on_from(tmp_path):
    """Nor with other distances or another scale: all terms have the same units, or are not added up."""
    line, job = a_line(), "0123456789abcdef"
    begun = Run(of(plain(line.near.mechanism, "add")), line)
    margin = extrapolation.margin_of_line(line)
    distribution = {"near": 1.0, "far": 2.0, "log_scale": line.log_scale, "margin": margin}
    enough = [[0, 128 * 10**6]], [[len(bounds.TERM_EDGES) - 1, 128 * 10**6]]
    state = {"blocks": 10**6, "counts": enough, "bets": ((), ())}
    key = jax.random.key(0)
    for name, factor in [("margin", 1.001), ("margin", 0.5), ("near", 1.1), ("far", 1.1), ("log_scale", 2.0)]:
        with Checkpoint(tmp_path) as checkpoint:
            other = distribution | {name: distribution[name] * factor}
            checkpoint.save(f"add-line-{job}", state | {"distribution": other})
            with pytest.raises(ValueError, match="checkpoint_dir must be another one"):
                verifying.draw(begun, BUDGET, Stop(), job, key, checkpoint)
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.save(f"add-line-{job}", state | {"distribution": distribution})
        found = verifying.draw(begun, BUDGET, Stop(), job, key, checkpoint)
    assert found.num_samples == 2 * 128 * 10**6


# --- The other mechanism of a composition ---


def test_terms_of_a_composed_line_are_above_the_profile_by_an_allowance():
    """Heights are raised by 1e-9 of themselves and of 1, at every corner; so are scales."""
    profile = gaussian_profile()
    composed = Composed(profile, 1e-4)
    terms = composed.concave_terms(-4.0)
    assert terms is not None
    cap = 1 - 1e-3 * composed.delta
    before = np.searchsorted(profile.logs, terms.places[1:], side="left") - 1  # the point before each corner
    values = np.append(profile(terms.places[:1]), profile.values[before])
    exact = stats.norm.ppf(np.minimum(values, cap))
    raised = (terms.heights - exact) / (1 + np.abs(exact))
    assert len(terms.places) > 20 and (raised >= 0.9e-9).all()
    assert terms.left_out == pytest.approx(composed.left_out + 1e-3 * composed.delta, rel=1e-12, abs=0)
    floor = profile.values[profile.values <= 1e-3 * composed.delta][0]
    assert floor < composed.left_out <= floor * (1 + 2e-9)
    assert composed.log_at(0.5) >= math.log(float(profile(np.array([0.5]))[0])) + 0.9e-9
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
