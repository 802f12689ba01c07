"""Pilots at several noise multipliers, taken together: an estimate, judged by how near it comes."""

import math

import numpy as np
import pytest

from jaxacct.statistics import bounds
from jaxacct.statistics.trend import Pilot, trend

THETA, Q = 7.3e-4, 1.3e-10
SIZES = (3000, 4500, 5100)  # bins of terms above 0


def pilots(rng, slope=-36.0, samples=20_480, places=tuple(range(-4, 4)), level=0.45, theta=lambda x: THETA):
    """Of noise multipliers a hundredth apart, the divergence `level` of what is allowed at the middle one."""
    size, found = float(np.mean(bounds.TERM_EDGES[list(SIZES)])), []
    for place in places:
        x = place * math.log(1.01)
        hits = rng.poisson(samples * level * math.exp(slope * x) * theta(x) / size)
        counts = np.zeros(len(bounds.TERM_EDGES), np.int64)
        np.add.at(counts, rng.choice(SIZES, hits), 1)
        counts[0] = samples - counts.sum()
        found.append(Pilot(x, theta(x), counts))
    return found


@pytest.mark.parametrize("slope", [-50.0, -36.0, -15.0])
def test_nearby_pilots_together_halve_the_error(slope):
    """About 30 nonzero terms at each of eight: the middle one has an error of 25 %, all together 10 %."""
    rng, alone, together = np.random.default_rng(5), [], []
    for _ in range(40):
        seen = pilots(rng, slope)
        found = trend(seen)
        assert found is not None
        together.append(math.log(found.ratio(0.0) / 0.45))
        alone.append(math.log(max(seen[4].total, 0.1) / (20_480 * THETA * 0.45)))
    assert np.std(together) < 0.6 * np.std(alone)
    assert abs(np.mean(together)) < 0.1


def test_a_trend_predicts_the_samples_of_its_divergence():
    """As one long pilot does; more of them for more divergence, no end where it is as large as allowed."""
    rng = np.random.default_rng(6)
    found = trend(pilots(rng, samples=10_000_000))
    assert found is not None
    whole = pilots(rng, samples=50_000_000, places=(0,))[0]
    wanted = bounds.predicted_samples(THETA, whole.counts, Q)
    assert found.samples(0.0, THETA, Q) == pytest.approx(wanted, rel=0.05)
    steps = [found.samples(place * math.log(1.01), THETA, Q) for place in (2, 1, 0, -1, -3)]
    assert steps == sorted(steps) and steps[-1] == math.inf


def test_thresholds_of_their_own():
    """Scales differ from one noise multiplier to the next, and what is measured is the divergence."""
    seen = pilots(np.random.default_rng(7), samples=2_000_000, theta=lambda x: THETA * math.exp(4 * x))
    found = trend(seen)
    assert found is not None and found.slope == pytest.approx(-36, abs=2)


@pytest.mark.parametrize("number", [0, 1, 8])
def test_nothing_seen_has_no_trend(number):
    nothing = np.zeros(len(bounds.TERM_EDGES), np.int64)
    nothing[0] = 2048
    assert trend([Pilot(0.01 * i, THETA, nothing) for i in range(number)]) is None


def test_what_was_seen_at_one_place_alone_falls_as_divergences_do():
    seen = pilots(np.random.default_rng(8), samples=10**6, places=(0,))
    found = trend(seen)
    assert found is not None and -31 < found.slope < -29
    far = [Pilot(0.05, THETA, np.eye(1, len(bounds.TERM_EDGES), dtype=np.int64)[0] * 10**6)]
    steep = trend([*seen, *far])  # it saw nothing
    assert steep is not None and -200 < steep.slope < -35 and steep.ratio(0.0) == pytest.approx(0.45, rel=0.1)
