"""Chi-square of drawn participation against an enumerated distribution."""

import numpy as np
from scipy import stats

FALSE_ALARM = 1e-6


def chi_square_p_value(drawn, distribution) -> float:
    """P-value of drawn 0/1 vectors under `distribution`; rare patterns are pooled to expect five each."""
    drawn = drawn.astype(int)
    # Each pattern as one number: rows are sorted forty times as slowly.
    base = int(np.ptp(drawn)) + 1
    assert base ** drawn.shape[1] < 2**62
    digits = base ** np.arange(drawn.shape[1])
    _, first, counts = np.unique((drawn - drawn.min()) @ digits, return_index=True, return_counts=True)
    seen = {tuple(p): c for p, c in zip(drawn[first].tolist(), counts, strict=True)}
    assert set(seen) <= set(distribution), "a pattern that the scheme cannot produce was drawn"
    expected = np.array([w * len(drawn) for w in distribution.values()])
    observed = np.array([seen.get(x, 0) for x in distribution], float)
    rare = expected < 5
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        observed = np.append(observed[~rare], observed[rare].sum())
    if expected[-1] < 1e-9 or len(expected) < 2:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, len(expected) - 1))
