"""Three and more vectors drawn together, against all tuples of vectors; what they are worth beside pairs."""

import math

import jax
import numpy as np
import pytest

from jaxacct import BallsInBins, BandedToeplitz, BMinSep, CyclicPoisson, Mechanism, Toeplitz
from jaxacct.core.verify import verify
from jaxacct.proposals import registry
from jaxacct.proposals.base import Setting
from jaxacct.proposals.families import joint_replicas
from jaxacct.proposals.threshold import budget_lines
from jaxacct.schemes.replicas import joint
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.lines import Item
from tests.draws import divergence_interval, draws_of
from tests.oracles import tuples
from tests.oracles.chi_square import chi_square_p_value
from tests.oracles.settings import slow
from tests.proposals_by_name import family_candidates, proposal_by_name

TWO, THREE, ONE = (0.8, 0.6), (0.8, 0.48, 0.36), (1.0,)
# Cold and warm, one band, a separation longer than the run, and runs of a few times the separation.
SETTINGS = [
    (BMinSep(5, 2, 0.3), TWO, 3),
    (BMinSep(4, 2, 0.3, False), TWO, 4),
    (BMinSep(4, 1, 0.4), ONE, 4),
    (BMinSep(3, 5, 0.2), THREE, 3),
    (BMinSep(7, 3, 0.1), THREE, 3),
]


def mechanism(scheme, coefficients, sigma=0.9) -> Mechanism:
    return Mechanism(scheme, BandedToeplitz(coefficients), sigma)


@pytest.mark.parametrize(("scheme", "coefficients", "m"), SETTINGS, ids=str)
def test_normalizer_against_all_tuples(scheme, coefficients, m):
    for sigma in (0.5, 3.0):
        exact, _ = tuples.count_distribution(scheme, coefficients, sigma, m)
        found = joint.log_normalizer(mechanism(scheme, coefficients, sigma), m)
        assert found == pytest.approx(math.log(exact), rel=1e-11, abs=1e-12)


@pytest.mark.parametrize(("scheme", "coefficients", "m"), SETTINGS, ids=str)
def test_draws_are_of_the_enumerated_distribution(scheme, coefficients, m, key):
    """False alarm 1e-6; 100,000 draws."""
    one = mechanism(scheme, coefficients)
    _, expected = tuples.count_distribution(scheme, coefficients, one.noise_multiplier, m)
    draw = jax.jit(joint.draw_counts, static_argnums=(1, 3))
    drawn = np.asarray(draw(key, scheme, joint.tables(one, m), 100_000))
    assert chi_square_p_value(drawn, expected) > 1e-6
    pairs = {vector: weight for vector, weight in expected.items() if max(vector) < m}
    wrong = {v: w / sum(pairs.values()) if v in pairs else 1e-9 for v, w in expected.items()}
    assert chi_square_p_value(drawn, wrong) < 1e-6, "it could not fail"


def test_errors_are_reserved():
    """Strong attraction needs more than rounding of a walk; where it has no bound there is no proposal."""
    relative = [joint.errors(mechanism(BMinSep(60, 2, 0.1), TWO, sigma), 3)[0] for sigma in (3.0, 0.5, 0.3)]
    assert relative[0] < 1e-3 < relative[1] < relative[2]
    assert joint.errors(mechanism(BMinSep(60, 2, 0.1), TWO, 0.1), 3)[0] == math.inf
    assert proposal_of(mechanism(BMinSep(60, 2, 0.1), TWO, 0.1)) is None


def proposal_of(one, m=3):
    return joint_replicas.build(Setting(one, 1.0, Direction.REMOVE, None), m)


def test_other_mechanisms_have_none():
    """Attack: mechanisms that the tables are not of: another sampler, p = 1, replace-one, no bands."""
    good = BMinSep(6, 2, 0.3)
    others = [
        mechanism(CyclicPoisson(6, 2, 0.3), TWO),
        mechanism(BallsInBins(6, 2), TWO),
        mechanism(BMinSep(6, 2, 1.0), TWO),
        Mechanism(good, BandedToeplitz(TWO), 0.9, "replace-one"),
        Mechanism(good, Toeplitz((0.8, 0.4, 0.3, 0.2, 0.1, 0.05)), 0.9),
    ]
    assert proposal_of(mechanism(good, TWO)) is not None
    assert [proposal_of(other) for other in others] == [None] * len(others)
    for m in (2, 9):
        with pytest.raises(ValueError, match="joint-replicas"):
            proposal_by_name(mechanism(good, TWO), 1.0, "remove", f"joint-replicas:{m}")


@pytest.mark.parametrize(
    ("scheme", "coefficients", "m"), [SETTINGS[0], slow(BMinSep(4, 1, 0.4), ONE, 3)], ids=str
)
def test_terms_have_the_mean_of_the_divergence(scheme, coefficients, m):
    """Terms are in [0, 1]; intervals of the divergence and of plain samples meet; false alarm 1e-6."""
    one = mechanism(scheme, coefficients)
    for epsilon in (0.5, 2.0):
        found = []
        for name in (f"joint-replicas:{m}", "plain"):
            proposal = proposal_by_name(one, epsilon, "remove", name)
            draws = draws_of(proposal, jax.random.key(5), 512)
            found.append(divergence_interval(proposal, draws, epsilon, 5e-7))
        (low, high), (least, most) = found
        assert low <= most and least <= high and high < 1.3 * low, "it could not fail"


def test_rounding_is_that_of_m_vectors():
    """An error of the loss moves a weight m - 1 times as much; the weight has a reserve of its own."""
    one = mechanism(BMinSep(60, 2, 0.01), TWO)
    found = [proposal_by_name(one, 2.0, "remove", f"joint-replicas:{m}") for m in (3, 4)]
    assert [proposal.weight_error(0.1) for proposal in found] == pytest.approx([0.2, 0.3])
    for proposal in found:
        lines = {line.item: line.amount for line in budget_lines(proposal, 1e-6)}
        assert 0 < lines[Item.WEIGHTS] < 1e-3 and lines[Item.DISTRIBUTION] > 0


def test_a_verification_is_near_the_divergence():
    """Pairs need 200,000 samples or more here; certified at 1.3 times the divergence, and not at .7 times."""
    one = Mechanism(BMinSep(200, 8, 1e-3), BandedToeplitz.square_root(8), 0.55)
    proposal = proposal_by_name(one, 4.0, "remove", "joint-replicas:4")
    low, high = divergence_interval(proposal, draws_of(proposal, jax.random.key(7), 256), 4.0, 1e-6)
    for delta, expected in ((0.7 * low, False), (1.3 * high, True)):
        verdict = verify(one, 4.0, delta, proposal=proposal.name, max_samples=30_000, key=jax.random.key(3))
        assert verdict.certified is expected


def test_rare_participation_is_resolved_where_pairs_do_not():
    """The scale of a large run's target; pairs of a tournament attract each other m - 1 times as much."""
    one = Mechanism(BMinSep(2000, 16, 1.218e-4), BandedToeplitz.square_root(16), 0.4741)
    joint_scale = min(p.log_scale for p in family_candidates("joint-replicas", one, 4.0))
    assert joint_scale < min(p.log_scale for p in family_candidates("replicas", one, 4.0)) - 7
    setting = Setting(one, 4.0, Direction.REMOVE, None)
    for limit, expected in ((-5, False), (-12, True)):  # of what needs few samples: pairs, or four together
        found = registry.candidates(setting, lambda proposal: 0.0 if proposal.log_scale < limit else 1e6)  # noqa: B023
        assert any(proposal.spec.family == "joint-replicas" for proposal in found) is expected
