"""What it costs to decide which noise multiplier is certified: samples of searches and verifications.

    PYTHONPATH=. python -m tests.benchmarks.deciding

Simulated: terms are drawn in place of outputs, from distributions fitted to 65,000 (production) and 200,000
(README's run) draws at each of ten noise multipliers a hundredth apart. Thresholds and means are log-linear
in the exponent of the grid, terms above 0 have one shape. The edge of what is certified is put at eight
places of a step of the grid. Searches and rules are those of `calibrate`; "half a million" has that limit
wherever an accountant's noise needs no more, and "before" neither trends nor patience besides, and its
ladder.
"""

import contextlib
import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from jaxacct.calibration import search as calibration
from jaxacct.calibration.calibrate import PATIENCE
from jaxacct.core.check import accepts
from jaxacct.core.shares import FIRST_SHARES, LADDER
from jaxacct.core.verify import PILOT_BLOCKS, Stop, _is_settled, next_check
from jaxacct.kernels import randomness
from jaxacct.statistics import bounds
from jaxacct.statistics.hockey_stick import Direction

REPEATS, PLACES = 40, np.arange(8) / 8
RULES = ("before", "half a million", "now")
# (slope, level) of ln threshold and of ln mean in the exponent, q, bins of terms above 0, exponent of the
# accountant's noise multiplier.
SETTINGS: dict[str, Any] = {
    "production": (
        (0.026102, -4.762244),
        (-0.435032, -48.774517),
        1.301e-10,
        (4555, 4813, 4946, 5020, 5051, 5065, 5083, 5097, 5105, 5114, 5120, 5121),
        120,
    ),
    "README": (
        (0.072139, 0.37517),
        (-0.258149, -19.597148),
        1e-7,
        (4629, 4839, 4928, 4983, 5023, 5052, 5075, 5091, 5104, 5113, 5119, 5121),
        89,
    ),
}


class Distribution:
    """Terms at every exponent of the grid, moved by a part of a step."""

    def __init__(self, setting: str, place: float, rng: np.random.Generator):
        self.of_theta, self.of_mean, self.q, self.bins, self.fallback = SETTINGS[setting]
        self.place, self.rng = place, rng
        self.size = float(bounds.TERM_EDGES[list(self.bins)].mean())

    def theta(self, exponent: int) -> float:
        return min(0.9, math.exp(np.polyval(self.of_theta, exponent + self.place)))

    def draw(self, exponent: int, samples: int) -> np.ndarray:
        mean = math.exp(np.polyval(self.of_mean, exponent + self.place))
        counts = np.zeros(len(bounds.TERM_EDGES), np.int64)
        np.add.at(counts, self.rng.choice(self.bins, self.rng.binomial(samples, min(1, mean / self.size))), 1)
        counts[0] = samples - counts.sum()
        return counts


class Search(calibration.Search):
    """The real one with terms of a `distribution`."""

    distribution: Distribution

    def at(self, noise_multiplier: float) -> Any:
        exponent = round(math.log(noise_multiplier) / math.log(1.01))
        return SimpleNamespace(noise_multiplier=noise_multiplier, exponent=exponent)

    def covered(self, mechanism) -> bool:
        return True

    def stream(self, mechanism):
        return randomness.key_from_words((0, 0))

    def extrapolation(self, mechanism, theta, stream):
        return None

    def choose(self, mechanism, direction) -> Any:
        nothing = direction == Direction.ADD
        return SimpleNamespace(
            name="replicas",
            direction=direction,
            mechanism=mechanism,
            log_scale=-math.inf if nothing else 0.0,
            theta=self.distribution.theta(mechanism.exponent),
        )

    def pilot(self, chosen, stream, theta, limit, coarse=False) -> np.ndarray:
        noise = chosen.mechanism.noise_multiplier, chosen.direction
        blocks, counts = self.seen.setdefault(noise, (0, np.zeros(len(bounds.TERM_EDGES), np.int64)))
        while not (blocks if coarse else calibration._seen_enough(counts, theta, limit)):
            step = max(calibration.NUM_PILOT_BLOCKS, blocks // 2)
            counts = counts + self.distribution.draw(chosen.mechanism.exponent, 128 * step)
            blocks += step
            self.seen[noise] = blocks, counts
        return counts


def verified(
    distribution: Distribution, exponent: int, most: int, share: float, patience: float
) -> tuple[bool, int]:
    """(accepted, samples) of one verification of `most` samples, the pilot's too."""
    theta, pilot, blocks = distribution.theta(exponent), 128 * PILOT_BLOCKS, 0
    bets = bounds.default_bets(theta, distribution.draw(exponent, pilot))
    of: Any = SimpleNamespace(threshold=theta)
    stop, level = Stop("anytime", most, share, patience), share * distribution.q
    counts, limit = np.zeros(len(bounds.TERM_EDGES), np.int64), -(-most // 128)
    while not _is_settled(of, stop, level, counts, blocks, limit, *bets):
        end = min(limit, next_check(blocks))
        counts, blocks = counts + distribution.draw(exponent, 128 * (end - blocks)), end
    return accepts(counts, theta, "anytime", level, *bets), 128 * blocks + pilot


def decided(distribution: Distribution, before: bool) -> tuple[int, int, int]:
    """(exponent released, samples of the search, of verifications)."""
    budget = SimpleNamespace(failure_probability=distribution.q, delta_v=1.0)
    nothing: Any = None
    target: Any = SimpleNamespace(budget=budget)
    search = Search(nothing, target, "anytime", *[nothing] * 3)
    object.__setattr__(search, "distribution", distribution)
    smallest, limit = search.smallest_exponent(distribution.fallback, 1.01, None)
    drawn = 128 * sum(blocks for blocks, _ in search.seen.values())
    tried = [(0, 0.9)] if before else list(enumerate(FIRST_SHARES))
    samples, released = 0, None
    for step, share in tried:
        if released is None:
            patience = math.inf if before else PATIENCE * limit
            accepted, more = verified(distribution, smallest + step, limit, share, patience)
            samples, released = samples + more, smallest + step if accepted else None
    if released is None:
        for step in (5, 2, 1) if before else LADDER:
            rest = 1 - sum(share for _, share in tried)
            accepted, more = verified(distribution, smallest + step, limit, rest, math.inf)
            samples += more
            if not accepted:
                break
            released = smallest + step
    return distribution.fallback if released is None else released, drawn, samples


def simulated(setting: str, rules: str, patches: contextlib.ExitStack) -> list[tuple]:
    """(exponent released, samples of the search, of verifications) of every simulation."""

    def patch(where, **names) -> None:
        patches.enter_context(mock.patch.multiple(where, **names))

    patch(calibration, threshold=lambda chosen, delta_v: chosen.theta)
    if rules != "now":
        patch(calibration, _MIN_LIMIT=math.inf)
    if rules == "before":
        patch(Search, cost_by_trend=lambda *_: None, cost_by_neighbours=lambda *_: math.inf)
    rows = []
    for i, place in enumerate(PLACES):
        for repeat in range(REPEATS):
            found = decided(
                Distribution(setting, place, np.random.default_rng([i, repeat])), rules == "before"
            )
            rows.append((found[0] + place, *found[1:]))
    return rows


def main() -> None:
    print("| setting | rules | search | verifications: mean | median | 90 % | 99 % | most | noise, steps |")
    print("|---" * 9 + "|")
    for setting in SETTINGS:
        for rules in RULES:
            with contextlib.ExitStack() as patches:
                rows = simulated(setting, rules, patches)
            noise, drawn, samples = np.array(rows).T
            spread = " | ".join(f"{x:,.0f}" for x in np.quantile(samples, (0.5, 0.9, 0.99, 1)))
            print(
                f"| {setting} | {rules} | {drawn.mean():,.0f} | {samples.mean():,.0f} | "
                f"{spread} | {noise.mean():.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
