"""Real batches with the distributions of the schemes: members of each, in O(batch) a step (NumPy)."""

from collections import deque
from typing import Protocol

import numpy as np


class Batches(Protocol):
    """Draws the batches of one run, step by step from 0."""

    def draw(self, step: int, generator: np.random.Generator) -> np.ndarray:
        """Return the positions of the examples of this step, in any order."""
        ...


def choose(generator: np.random.Generator, population: int, number: int) -> np.ndarray:
    """Return `number` distinct integers below `population`, uniformly, in O(number)."""
    return generator.choice(population, number, replace=False, shuffle=False)


def subsets(generator: np.random.Generator, population: int, size: int, number: int) -> np.ndarray:
    """Return (number, size) integers below `population`: uniform subsets, ascending (Floyd's algorithm)."""
    drawn = np.full((number, size), population)
    for i in range(size):
        top = population - size + i
        candidate = generator.integers(top + 1, size=number)
        drawn[:, i] = np.where((drawn[:, :i] == candidate[:, None]).any(axis=1), top, candidate)
    return np.sort(drawn, axis=1)


class ByStep:
    """Batches of fixed numbers of participations: each example's steps are drawn before the first batch."""

    def __init__(self, steps: np.ndarray, iterations: int):
        """Store the steps, (size, participations); `iterations` is none."""
        size, participations = steps.shape
        order = np.argsort(steps, axis=None, kind="stable")
        self.members = (order // participations).astype(np.int32 if size < 2**31 else np.int64)
        self.ends = np.concatenate([[0], np.cumsum(np.bincount(steps.ravel(), minlength=iterations))])

    def draw(self, step: int, generator: np.random.Generator) -> np.ndarray:
        del generator
        return self.members[self.ends[step] : self.ends[step + 1]]


class ByEpoch:
    """Epochwise allocation: the place of each example in an epoch is drawn before its first step."""

    def __init__(self, epoch_steps: int, separation: int, size: int):
        self.epoch_steps, self.separation, self.size = epoch_steps, separation, size
        self.places: np.ndarray | None = None

    def draw(self, step: int, generator: np.random.Generator) -> np.ndarray:
        place = step % self.epoch_steps
        if place == 0:
            self.places = self._next_places(generator)
            self.members = np.argsort(self.places, kind="stable")
            numbers = np.bincount(self.places, minlength=self.epoch_steps)
            self.ends = np.concatenate([[0], np.cumsum(numbers)])
        return self.members[self.ends[place] : self.ends[place + 1]]

    def _next_places(self, generator: np.random.Generator) -> np.ndarray:
        if self.places is None:
            return generator.integers(self.epoch_steps, size=self.size)
        spare = self.epoch_steps - self.separation
        waits = generator.geometric(1 / (spare + 1), self.size) - 1
        reached = np.maximum(self.places - spare, 0) + waits
        last = generator.integers(self.separation - 1, self.epoch_steps, self.size)
        return np.where(reached < self.separation - 1, reached, last)


class EveryStep:
    """Poisson batches: any example at any step."""

    def __init__(self, probability: float, size: int):
        self.size, self.probability = size, probability

    def draw(self, step: int, generator: np.random.Generator) -> np.ndarray:
        return choose(generator, self.size, generator.binomial(self.size, self.probability))


class ByPhase:
    """Batches of cyclic Poisson and balls-in-bins: each example has an independent phase."""

    def __init__(self, cycle: int, probability: float, size: int, generator: np.random.Generator):
        self.cycle, self.probability = cycle, probability
        phases = generator.integers(self.cycle, size=size, dtype=np.int32)
        self.members = np.argsort(phases, kind="stable").astype(np.int32)
        self.ends = np.concatenate([[0], np.cumsum(np.bincount(phases, minlength=self.cycle))])

    def draw(self, step: int, generator: np.random.Generator) -> np.ndarray:
        phase = step % self.cycle
        members = self.members[self.ends[phase] : self.ends[phase + 1]]
        return members[choose(generator, len(members), generator.binomial(len(members), self.probability))]


class Eligible:
    """Batches of b-min-sep, also of users' examples: a pool of the eligible examples.

    Each is eligible at the first step with probability `eligible`, independently. The first `count` of
    `pool` are the eligible; `locked_out` starts with those that return at the next step.
    """

    def __init__(
        self, separation: int, probability: float, eligible: float, size: int, generator: np.random.Generator
    ):
        b, self.probability = separation, probability
        self.pool = np.arange(size, dtype=np.int32 if size < 2**31 else np.int64)
        self.count = size
        self.locked_out: deque[np.ndarray] = deque(np.zeros(0, self.pool.dtype) for _ in range(b - 1))
        if eligible < 1 and b > 1:
            held = generator.binomial(size, 1 - eligible)
            chosen = generator.permuted(self._take(choose(generator, size, held)))
            # Locked out for 1..b-1 more steps, all equally likely: those returning after s steps are entry s
            # - 1.
            parts = generator.multinomial(held, np.full(b - 1, 1 / (b - 1)))
            self.locked_out = deque(np.split(chosen, np.cumsum(parts)[:-1]))

    def draw(self, step: int, generator: np.random.Generator) -> np.ndarray:
        drawn = self._take(choose(generator, self.count, generator.binomial(self.count, self.probability)))
        self.locked_out.append(drawn)
        # Participants of b - 1 steps ago (of this step for b = 1) are eligible at the next step.
        back = self.locked_out.popleft()
        self.pool[self.count : self.count + len(back)] = back
        self.count += len(back)
        return drawn

    def _take(self, positions: np.ndarray) -> np.ndarray:
        """Remove the entries at `positions` from the pool and return them, in O(their number)."""
        taken = self.pool[positions]
        left = self.count - len(positions)
        tail = np.ones(len(positions), bool)
        tail[positions[positions >= left] - left] = False
        # The last entries that stay fill the gaps before them.
        self.pool[positions[positions < left]] = self.pool[left : self.count][tail]
        self.count = left
        return taken


class FromTable:
    """Batches of a sampling table: every unit follows the process of `schemes.table`, independently.

    Units that are eligible at a step wait in one pool a number of participations left; a step takes as many
    as join out of each, and puts them into the pool of the step at which they are eligible again.
    """

    def __init__(self, table, size: int, generator: np.random.Generator):
        self.table, self.size = table, size
        starts = np.append(table.start, table.never)
        numbers = generator.multinomial(size, starts / starts.sum())[:-1]
        units = generator.permutation(size) if len(starts) > 2 or table.never else np.arange(size)
        firsts = np.split(units, np.cumsum(numbers))[:-1]
        length = 1 + max(len(firsts), int(table.lockout.max()))
        self.returning: list[list[list[np.ndarray]]] = [
            [[] for _ in range(table.num_left)] for _ in range(length)
        ]
        for step, members in enumerate(firsts):
            self.returning[step][-1].append(members)
        self.pools = [_Pool(size) for _ in range(table.num_left)]

    def draw(self, step: int, generator: np.random.Generator) -> np.ndarray:
        """Return the members of a step, the next one after the last call."""
        table, length = self.table, len(self.returning)
        here = self.returning[step % length]
        later = self.returning[(step + int(table.lockout[step])) % length]
        batch = []
        for left, (pool, arrived) in enumerate(zip(self.pools, here, strict=True)):
            pool.add(arrived)
            arrived.clear()
            joined = pool.take(generator.binomial(pool.count, table.join[step, left]), generator)
            if not table.num_left > 1 or left > 1:
                later[max(left - 1, 0)].append(joined)
            if table.turns:
                later[left].append(pool.take(pool.count, generator))
            batch.append(joined)
        members = np.concatenate(batch)
        return members if table.keep == 1 else members[generator.random(len(members)) < table.keep]


class _Pool:
    """Set of units from which a uniform subset is taken in time proportional to its size."""

    def __init__(self, size: int):
        self.members = np.empty(0, np.int32 if size < 2**31 else np.int64)
        self.count = 0

    def add(self, groups: list[np.ndarray]) -> None:
        """Add groups of units."""
        number = sum(map(len, groups))
        if self.count + number > len(self.members):
            kept = self.members[: self.count]
            self.members = np.empty(max(self.count + number, 2 * self.count), kept.dtype)
            self.members[: self.count] = kept
        for group in groups:
            self.members[self.count : self.count + len(group)] = group
            self.count += len(group)

    def take(self, number: int, generator: np.random.Generator) -> np.ndarray:
        """Remove `number` uniform units and return them."""
        if number == self.count:
            self.count = 0
            return self.members[:number].copy()
        positions = choose(generator, self.count, number)
        taken, left = self.members[positions], self.count - number
        tail = np.ones(number, bool)
        tail[positions[positions >= left] - left] = False
        # The last members that stay fill the gaps before them.
        self.members[positions[positions < left]] = self.members[left : self.count][tail]
        self.count = left
        return taken
