"""Real batches with the distributions of the schemes: members of each, in O(batch) a step (NumPy)."""

from typing import Protocol

import numpy as np


class Batches(Protocol):
    """Draws the batches of one run, step by step from 0."""

    def draw(self, step: int, generator: np.random.Generator) -> np.ndarray:
        """Return the positions of the examples of this step, in any order."""


def choose(generator: np.random.Generator, population: int, number: int) -> np.ndarray:
    """Return `number` distinct integers below `population`, uniformly, in O(number)."""
    return generator.choice(population, number, replace=False, shuffle=False)


class FromTable:
    """Batches of a sampling table: every unit follows the process of `schemes.table`, independently.

    Units that are eligible at a step wait in one pool a number of participations left; a step takes as many
    as join out of each, and puts them into the pool of the step at which they are eligible again.
    """

    def __init__(self, table, size: int, generator: np.random.Generator):
        self.table, self.size = table, size
        starts = np.append(table.start, table.never)
        numbers = generator.multinomial(size, starts / starts.sum())[:-1]
        units = np.arange(size, dtype=np.int32 if size < 2**31 else np.int64)
        if len(starts) > 2 or table.never:
            generator.shuffle(units)
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
        self.size, self.count = size, 0
        self.members = np.empty(0, np.int32 if size < 2**31 else np.int64)

    def add(self, groups: list[np.ndarray]) -> None:
        """Add groups of units."""
        number = sum(map(len, groups))
        if self.count + number > len(self.members):
            kept = self.members[: self.count]
            self.members = np.empty(max(self.count + number, min(2 * self.count, self.size)), kept.dtype)
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
