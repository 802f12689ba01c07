"""Small mechanisms that cover every scheme and edge, for tests against enumeration."""

import pytest

from jaxacct.schemes import BallsInBins, BMinSep, CyclicPoisson, MultiAttribution, Poisson

PRODUCTION = BMinSep.from_batch_size(
    dataset_size=14_745_600, batch_size=1793, iterations=7200, min_separation=256
)
# (scheme, bands): cold and warm, n not a multiple of b, n < b, b = 1, p = 1, n = 1.
SMALL = [
    (Poisson(8, 0.2), 1),
    (Poisson(5, 1.0), 1),
    (Poisson(1, 0.5), 1),
    (CyclicPoisson(11, 4, 0.3), 3),
    (CyclicPoisson(12, 3, 1.0), 3),
    (CyclicPoisson(3, 5, 0.7), 5),
    (CyclicPoisson(7, 1, 0.4), 1),
    (BallsInBins(10, 4), 4),
    (BallsInBins(3, 5), 2),
    (BMinSep(12, 3, 0.3), 3),
    (BMinSep(10, 4, 0.25, False), 2),
    (BMinSep(9, 1, 0.4), 1),
    (BMinSep(9, 1, 0.4, False), 1),
    (BMinSep(7, 3, 1.0), 3),
    (BMinSep(7, 3, 1.0, False), 3),
    (BMinSep(5, 8, 0.4), 8),
    (BMinSep(5, 8, 0.4, False), 5),
    (BMinSep(1, 1, 0.5), 1),
    (BMinSep(12, 2, 0.01), 2),
    (MultiAttribution(7, 3, 0.2, 2), 3),
    (MultiAttribution(6, 3, 0.3, 3, False), 2),
    (MultiAttribution(4, 1, 0.3, 2), 1),
    (MultiAttribution(5, 2, 1.0, 3), 2),
    (MultiAttribution(3, 5, 0.4, 2), 4),
    (MultiAttribution(8, 3, 0.3, 1), 3),
]


def slow(*values):
    """A case of a parametrized test that CI leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(fast, cases) -> list:
    """Cases of a parametrized test, slow but for those of the indices `fast`."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case) if i in fast else slow(*case) for i, case in enumerate(tuples)]


def few_in_ci(fast, settings=SMALL) -> list:
    """As parameters of a test, slow but for those of the indices `fast`: each is a program of its own."""
    return [
        pytest.param(*setting, id=f"{setting[0]}-{setting[1]}", marks=() if i in fast else pytest.mark.slow)
        for i, setting in enumerate(settings)
    ]


# Of every kernel one, cold and warm, and n < b; Poisson batches are drawn everywhere else.
SOME_IN_CI = few_in_ci({3, 10, 15, 19})
