"""Users and examples in a bipartite graph, and batches of multi-attribution drawn on it.

The graph is public: privacy is for what the examples contain, not for whose they are (arXiv 2602.09338,
appendix C), so nothing here spends any of the guarantee.
"""

import functools
import itertools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import scipy

from jaxacct.common import validate as _validate
from jaxacct.common.files import write_bytes_atomically
from jaxacct.schemes import MultiAttribution, Scheme

_PAIRS_AT_ONCE = 4_000_000


@dataclass(frozen=True, eq=False)
class Attribution:
    """A bipartite graph of examples and users, in compressed rows.

    Attributes:
      rows: (examples,) int64: the row of the data set that each example is; one row may come several times.
      first_user: (examples + 1,) int64: where an example's users begin in `users`.
      users: (edges,) int32: numbers of users, each example's in ascending order.
      dataset_size: number of rows of the data set.
    """

    rows: np.ndarray
    first_user: np.ndarray
    users: np.ndarray
    dataset_size: int

    @property
    def num_examples(self) -> int:
        return len(self.rows)

    @property
    def num_users(self) -> int:
        """Largest number of a user, plus 1."""
        return int(self.users.max(initial=-1)) + 1

    def lockout_batches(self, scheme: MultiAttribution, generator: np.random.Generator) -> "AttributionPool":
        """Return the batches of algorithm 3 on this graph."""
        return AttributionPool(scheme, self, generator)

    def examples_of_users(self) -> np.ndarray:
        """Return (users,) int64: how many examples each user has."""
        return np.bincount(self.users)

    @functools.cached_property
    def matrix(self) -> "scipy.sparse.csr_array":
        """The (examples, users) matrix of zeros and ones."""
        ones = np.ones(len(self.users), np.int8)
        return scipy.sparse.csr_array(
            (ones, self.users, self.first_user), shape=(self.num_examples, self.num_users)
        )

    def users_of(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (position in `examples`, user) of every edge of these examples, in order."""
        some = self.matrix[examples]
        return np.repeat(np.arange(len(examples)), np.diff(some.indptr)), some.indices

    def save(self, path) -> None:
        """Write all arrays to an .npz file, atomically."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        write_bytes_atomically(path, lambda file: np.savez_compressed(file, **arrays))

    @classmethod
    def load(cls, path) -> "Attribution":
        """Read what `save` wrote; a one-line ValueError otherwise."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = {field.name: stored[field.name] for field in fields(cls)}
        except OSError as error:
            raise ValueError(f"graph {path} cannot be read: {error.strerror or error}") from None
        except Exception:  # zip, zlib and key errors of a damaged file
            raise ValueError(f"graph {path} is not a file that train.batches.attribution wrote") from None
        size = arrays["dataset_size"]
        if size.shape == () and size.dtype.kind == "i":
            arrays["dataset_size"] = int(size)
        graph = cls(**arrays)
        check_well_formed(graph)
        return graph


def from_edges(users, rows, *, dataset_size: int) -> Attribution:
    """Return the graph of (user, row of the data set) pairs; repeated pairs count once.

    Users are integers or texts, and every row of the data set must have one.

    Raises:
      ValueError: bad arguments, a missing user, or two names that differ by case or spaces only.
    """
    size = _validate.positive_integer("dataset_size", dataset_size)
    users, rows = np.asarray(users), np.asarray(rows)
    if users.ndim != 1 or users.shape != rows.shape:
        raise ValueError(
            f"users and rows must be lists of one length, got shapes {users.shape}, {rows.shape}"
        )
    if rows.dtype.kind not in "iu":
        raise ValueError(f"rows must be integers, got {rows.dtype}")
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < size:
        bad = rows[(rows < 0) | (rows >= size)][0]
        raise ValueError(f"rows must be in 0..{size - 1}, one was {bad}")
    if users.dtype.kind not in "iu":
        users = users.astype(str)
    names, numbers = np.unique(users, return_inverse=True)
    found = ambiguous_name(names.tolist()) if users.dtype.kind == "U" else None
    if found is not None:
        raise ValueError(f"users must each have one name, edge {np.argmax(numbers == found[0])} {found[1]}")
    width = int(numbers.max(initial=0)) + 1
    rows, numbers = np.divmod(np.unique(rows.astype(np.int64) * width + numbers), width)
    counts = np.bincount(rows, minlength=size)
    without = np.flatnonzero(counts == 0)
    if without.size:
        raise ValueError(f"rows must all have a user, row {without[0]} has none ({without.size} in all)")
    first = np.concatenate([[0], np.cumsum(counts)])
    return Attribution(np.arange(size), first, numbers.astype(np.int32), size)


_MISSING = frozenset(("", "nan", "-nan", "na", "n/a", "#n/a", "<na>", "nat", "none", "null"))


def ambiguous_name(names: Sequence[str]) -> tuple[int, str] | None:
    """Return (place, what it is) of a name that is missing, or that differs from another by case or spaces.

    Each would count as one more person: contributions of one user would be bounded by name. None where there
    is no such name. Unicode's compatible characters are one.
    """
    seen: dict[str, str] = {}
    for place, name in enumerate(names):
        key = "".join(unicodedata.normalize("NFKC", name).casefold().split())
        if key in _MISSING:
            return place, f"has {name!r}: drop it, or name its user"
        if key in seen:
            return place, f"has {name!r}, another has {seen[key]!r}: these differ by case or spaces only"
        seen[key] = name
    return None


def subgraph(graph: Attribution, kept: np.ndarray) -> Attribution:
    """Return the graph of the examples numbered `kept`, in order; users keep their numbers."""
    kept = np.sort(kept)
    position, users = graph.users_of(kept)
    first = np.concatenate([[0], np.cumsum(np.bincount(position, minlength=len(kept)))])
    return Attribution(graph.rows[kept], first, users, graph.dataset_size)


def neighborhood_sizes(graph: Attribution) -> np.ndarray:
    """Return (examples,) int64: |N(e)|, how many examples share a user with each, itself included.

    Memory is linear in the edges: pairs of examples are counted in chunks.
    """
    matrix = graph.matrix
    reach = np.cumsum(matrix @ graph.examples_of_users())
    cuts = np.unique(np.searchsorted(reach, np.arange(0, reach[-1], _PAIRS_AT_ONCE)[1:]))
    transposed, ends = matrix.T.tocsr(), [0, *cuts, graph.num_examples]
    parts = [matrix[a:b].astype(bool) @ transposed.astype(bool) for a, b in itertools.pairwise(ends)]
    return np.concatenate([np.diff(part.indptr) for part in parts])


def phantoms(graph: Attribution, examples_per_user: int) -> np.ndarray:
    """Return (users,) int64: phantom examples of each user, which cause lockouts but never join a batch."""
    numbers = bounded_numbers(graph, examples_per_user)
    # A user without examples causes no lockouts.
    return np.where(numbers > 0, examples_per_user - numbers, 0)


def bounded_numbers(graph: Attribution, examples_per_user: int) -> np.ndarray:
    """Return (users,) int64: how many examples each user has; ValueError for more than allowed."""
    numbers = graph.examples_of_users()
    if numbers.max(initial=0) > examples_per_user:
        raise ValueError(
            f"examples_per_user must be at least {numbers.max()}, the most examples of a user, "
            f"got {examples_per_user}: bound_contributions first"
        )
    return numbers


def check_graph(
    scheme: Scheme, graph: Attribution | None, dataset_size: int | None, shared_examples: bool
) -> None:
    """Refuse a graph that the plan's guarantee is not for, and a missing or needless one.

    `shared_examples` is `Plan.holds_for_shared_examples`.
    """
    if (scheme.unit == "user") != (graph is not None):
        raise ValueError(
            "graph must be given for multi- and independent-attribution, and for no other scheme"
        )
    if graph is None:
        return
    check_well_formed(graph)
    if graph.num_examples != dataset_size:
        raise ValueError(f"graph must have the {dataset_size} examples of the plan, got {graph.num_examples}")
    if not shared_examples:
        check_one_owner(graph)
    bounded_numbers(graph, scheme.examples_per_unit)


def check_well_formed(graph: Attribution) -> None:
    """Refuse arrays that are no graph of the data set; one-line ValueError."""
    size = _validate.positive_integer("graph dataset_size", graph.dataset_size)
    for name in ("rows", "first_user", "users"):
        array = getattr(graph, name)
        if not (isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind == "i"):
            raise ValueError(f"graph {name} must be a list of integers")
    owners, number = np.diff(graph.first_user), graph.num_examples
    if (
        not number
        or len(owners) != number
        or (owners < 1).any()
        or (graph.first_user[[0, -1]] != (0, len(graph.users))).any()
        or graph.users.min() < 0
    ):
        raise ValueError("graph must list one user or more of every example, each by a number")
    if not 0 <= graph.rows.min() <= graph.rows.max() < size:
        raise ValueError(f"graph rows must be in 0..{size - 1}")
    if (np.diff(np.repeat(np.arange(number), owners) * np.int64(graph.num_users) + graph.users) <= 0).any():
        raise ValueError("graph users must be ascending for every example, none twice")
    # Two examples may be the same row of the data only if they have the same users.
    order = np.argsort(graph.rows, kind="stable")
    same = graph.rows[order[1:]] == graph.rows[order[:-1]]
    one, other = order[:-1][same], order[1:][same]
    equal = np.array_equal(owners[one], owners[other])
    if not (equal and np.array_equal(graph.users_of(one)[1], graph.users_of(other)[1])):
        raise ValueError("graph must give all examples that are the same row of the data the same users")


def check_one_owner(graph: Attribution) -> None:
    """Refuse a graph in which an example has several owners.

    Under multi-attribution the batches of the others then reveal the coins of a user, and a guarantee that
    takes them for hidden is false (jaxacct/proofs/shared_examples.md).
    """
    shared = int((np.diff(graph.first_user) > 1).sum())
    if shared:
        raise ValueError(
            f"graph must give every example one owner for multi-attribution, {shared} of "
            f"{graph.num_examples} have several: use the scheme independent-attribution, or calibrate with "
            "the accountant revealed-pattern (all its coins revealed)"
        )


class AttributionPool:
    """Algorithm 3, step by step: a sampled example joins unless one of its users was sampled recently.

    "Sampled" means drawn, whether or not it joined: otherwise it would be algorithm 4, which is a conjecture,
    and false where examples are shared (jaxacct/proofs/shared_examples.md). This class draws from any graph;
    training calls `check_graph` first. Phantom examples fill every user up to k_u. Under a warm start b - 1
    steps before the first are exactly stationary, because older ones have no effect.
    """

    def __init__(self, scheme: MultiAttribution, graph: Attribution, generator: np.random.Generator):
        self.graph, self.scheme = graph, scheme
        self.phantom_ends = np.cumsum(phantoms(graph, scheme.examples_per_user))
        self.population = graph.num_examples + int(self.phantom_ends[-1])
        b = scheme.min_separation
        self.last = np.full(graph.num_users, -2 * b, np.int64)
        if scheme.warm_start:
            for step in range(-(b - 1), 0):
                self.draw(step, generator)

    def draw(self, step: int, generator: np.random.Generator) -> np.ndarray:
        """Return the numbers of the examples in the batch of `step`."""
        number = generator.binomial(self.population, self.scheme.sampling_probability)
        drawn = generator.choice(self.population, number, replace=False, shuffle=False)
        real = drawn[drawn < self.graph.num_examples]
        phantom = drawn[drawn >= self.graph.num_examples] - self.graph.num_examples
        position, users = self.graph.users_of(real)
        recent = self.last[users] > step - self.scheme.min_separation
        locked_out = np.bincount(position[recent], minlength=len(real)) > 0
        self.last[users] = step
        self.last[np.searchsorted(self.phantom_ends, phantom, side="right")] = step
        return real[~locked_out]
