"""Every `draw_error` and every error of a replica module, recomputed: two-sided, so that no term is left out.

Allowances are far above measured errors, so draws do not show a term that is missing.
"""

import math

import pytest

import jaxacct as ja
from jaxacct.kernels.likelihoods import epochs
from jaxacct.proposals.base import plain
from jaxacct.proposals.families.replicas import log_normalizer
from jaxacct.schemes.replicas import table as replica_table

U = 2.0**-24
SHARE = 2.0**-51  # of a choice's probability; of its own, for each of the choices


def product(*errors):
    return math.expm1(sum(map(math.log1p, errors)))


def waits(p, most, n, start=0.0):
    """Two ends of a wait, 2^-38 together, over the chance of its step; the last wait; hazards of n steps."""
    return math.expm1(most * 2.0**-38 / p + 2.0**-38 + n * 2.0**-44 + start)


def share(number, least):
    """Of a choice among so many, of this probability at least."""
    return SHARE * (1 / least + number)


DRAW_ERRORS = [
    (ja.Poisson(40, 0.3), waits(0.3, 40, 40)),
    (ja.Poisson(40, 1e-5), waits(1e-5, 40, 40)),
    (ja.BMinSep(41, 4, 1.0, False), 0.0),
    (ja.CyclicPoisson(41, 4, 0.3), math.expm1(11 * share(2, 0.3) + share(4, 1 / 4))),
    (ja.BallsInBins(41, 4), math.expm1(share(4, 1 / 4))),
    (ja.BMinSep(41, 4, 0.3, False), waits(0.3, 11, 41)),
    (ja.BMinSep(41, 4, 0.3), waits(0.3, 11, 41, share(4, 0.3 / 1.9))),
    # One participation is left from step 8 on, with 33 steps for it.
    (ja.BalancedMinSep(41, 4, 3), waits(1 / 33, 3, 41)),
    (ja.BalancedMinSep(41, 4, 2.5), waits(1 / 33, 3, 41, 3 * share(2, 1 / 6))),
    (ja.EpochwiseAllocation(41, 8, 3), waits(1 / 8, 6, 41)),
    # Counts 1 and 2, p^2 / (1 - (1-p)^2) for the latter.
    (ja.MultiAttribution(41, 4, 0.2, 2, False), waits(0.36, 11, 41, 11 * share(2, 0.04 / 0.36))),
]


@pytest.mark.parametrize("scheme, expected", DRAW_ERRORS, ids=str)
def test_errors_of_draws(scheme, expected):
    assert scheme.draw_errors[0] == pytest.approx(expected, rel=1e-9, abs=0)
    at = ja.Mechanism(scheme, ja.BandedToeplitz.identity(), 1.0)
    assert plain(at, "remove").relative_error == pytest.approx(expected, rel=1e-9, abs=0)
    assert scheme.draw_errors[1] == scheme.max_participations * (scheme.iterations + 1) * 2.0**-62
    assert plain(at, "remove").total_variation == scheme.draw_errors[1]


def test_counts_too_rare_to_draw_are_a_distance():
    scheme = ja.MultiAttribution(20, 4, 0.01, 40)
    weights = scheme.count_weights()
    rare = int(((weights > 0) & (weights < 2.0**-30)).sum())
    assert rare > 20 and scheme.draw_errors[1] == 5 * (21 * 2.0**-62 + rare * SHARE)


def test_errors_of_batch_sizes_and_of_participations_multiply():
    scheme = ja.TruncatedBMinSep(120, 4, 0.1, 50, 600)
    relative, variation = scheme.side_information.error()
    of = plain(ja.Mechanism(scheme, ja.BandedToeplitz.identity(), 2.5), "remove")
    assert relative > 0
    assert of.relative_error == pytest.approx(product(relative, scheme.draw_errors[0]), rel=1e-9)
    assert of.total_variation == variation + scheme.draw_errors[1]


def one(scheme, sigma=1.5, bands=1):
    return ja.Mechanism(scheme, ja.BandedToeplitz.square_root(bands), sigma)


def errors(scheme, sigma=1.5):
    at = one(scheme, sigma)
    return scheme.replicas(at).errors(at)


def test_errors_of_first_steps_of_pairs():
    """Relative where both phases are likely; where attraction makes two phases rare, as a distance."""
    scheme, of_choices = ja.BallsInBins(40, 4), 2 * 10 * 3 * SHARE
    for sigma, rare in ((3.0, 0), (0.6, 12)):  # two phases that differ
        relative, variation = errors(scheme, sigma)
        of_starts = SHARE * (16 + rare) + SHARE * (4 if rare else (3 + math.exp(10 / sigma**2)) * 4)
        waits = math.expm1(2 * 2.0**-38 + 42 * 2.0**-43 + 2 * 10 * 2.0**-38 + of_starts)
        assert relative == pytest.approx(waits, rel=1e-2)
        known = 2 * scheme.draw_errors[1] + of_choices + rare * SHARE
        assert variation == pytest.approx(known, rel=1e-9)


def test_errors_of_pairs_of_a_table():
    """Waits and outcomes of both replicas over their chances, which attraction makes smaller by a ratio."""
    scheme = ja.CustomScheme([0.05] * 400, 20)
    log_z, (relative, variation) = log_normalizer(one(scheme, 50.0)), errors(scheme, 50.0)
    least = 2 * 20 * 2.0**-38 / 0.05  # without attraction
    assert least < relative < 1.1 * least + 402 * 2.0**-48 and 0 < log_z < 0.1
    # 20 outcomes of each replica, of three in a state of two: that one, the other or both participate.
    assert variation == pytest.approx(2 * (scheme.draw_errors[1] + 20 * 3 * SHARE), rel=1e-12)
    assert errors(scheme, 0.7)[0] > 1.1 * least


def test_rounding_of_sums_over_epochs():
    count, M, b, ratio, error = 5, 100, 30, 3.0, 7.0
    offset, largest = -(b - 1) * math.log((M - b) / (M - b + 1)), count * ratio
    items = [
        error,
        11 * (2 * largest + offset),
        7 * largest + 6 * offset + 8 * 7 + 12,
        4 * largest + 2 * offset,
    ]
    assert epochs.rounding_bound(count, M, b, ratio, error) == pytest.approx(U * count * sum(items), rel=1e-9)


def test_errors_of_two_replicas_have_those_of_their_starts(monkeypatch):
    """The choice of both first eligible steps is drawn, too, with an error of either kind."""
    mechanism = ja.Mechanism(ja.BMinSep(41, 4, 0.3), ja.BandedToeplitz.square_root(4), 1.0)
    assert replica_table._start_errors(mechanism)[0] > 0

    def errors(of_starts):
        monkeypatch.setattr(replica_table, "_start_errors", lambda _: of_starts)
        monkeypatch.setattr(replica_table, "_relative_error", replica_table._relative_error.__wrapped__)
        return replica_table.errors(mechanism)

    real = replica_table._relative_error
    without = errors((0.0, 0.0))
    monkeypatch.setattr(replica_table, "_relative_error", real)
    relative, variation = errors((1e-3, 1e-3))
    assert relative - without[0] >= 1e-3 and variation - without[1] >= 0.99e-3
