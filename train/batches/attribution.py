"""Who owns which example: users and examples in a bipartite graph, and what multi-attribution needs of it.

    python -m train.batches.attribution --edges edges.csv --dataset-size 60000 --examples-per-user 4 \\
        --batch-size 128 --min-separation 64 --out graph.npz

bounds every user's contributions, finds the sampling probability and keeps the graph for the training run.

The graph is public: privacy is for what the examples contain, not for whose they are (arXiv 2602.09338,
appendix C), so nothing here spends any of the guarantee.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxacct.cli.usage import parse, single
from jaxacct.common import validate as _validate
from jaxacct.common.files import write_bytes_atomically
from jaxacct.schemes import IndependentAttribution, MultiAttribution, Scheme
from jaxacct.statistics import roots

_PAIRS_AT_ONCE = 4_000_000


@dataclass(frozen=True, eq=False)
class Attribution:
    """A bipartite graph of examples and users, both ways in compressed rows; 8 bytes an edge.

    Attributes:
      rows: (examples,) int64: the row of the data set that each example is; one row may come several times.
      first_user: (examples + 1,) int64: where an example's users begin in `users`.
      users: (edges,) int32: numbers of users, each example's in ascending order.
      first_example: (users + 1,) int64: where a user's examples begin in `examples`.
      examples: (edges,) int32: numbers of examples.
      dataset_size: rows of the data set.
    """

    rows: np.ndarray
    first_user: np.ndarray
    users: np.ndarray
    first_example: np.ndarray
    examples: np.ndarray
    dataset_size: int

    @property
    def num_examples(self) -> int:
        return len(self.rows)

    @property
    def num_users(self) -> int:
        return len(self.first_example) - 1

    def barring_batches(self, scheme: MultiAttribution, generator: np.random.Generator) -> "AttributionPool":
        """Algorithm 3 on this graph."""
        return AttributionPool(scheme, self, generator)

    def examples_of_users(self) -> np.ndarray:
        """(users,) int64: how many examples each user has."""
        return np.diff(self.first_example)

    def save(self, path) -> None:
        """Write all arrays to an .npz file, whole or not at all."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        write_bytes_atomically(path, lambda file: np.savez_compressed(file, **fields))

    @classmethod
    def load(cls, path) -> "Attribution":
        """Read what `save` wrote; ValueError in one line otherwise."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                fields = {name: stored[name] for name in cls.__dataclass_fields__}
        except OSError as error:
            raise ValueError(f"graph {path} cannot be read: {error.strerror or error}") from None
        except Exception:  # zip, zlib and key errors of a damaged file
            raise ValueError(f"graph {path} is not a file that train.batches.attribution wrote") from None
        size = fields["dataset_size"]
        if size.shape == () and size.dtype.kind == "i":
            fields["dataset_size"] = int(size)
        graph = cls(**fields)
        check_consistent(graph)
        return graph


def from_edges(users, rows, *, dataset_size: int) -> Attribution:
    """The graph of (user, row of the data set) pairs; repeated pairs count once.

    Args:
      users: (edges,) ids of users: integers, or texts.
      rows: (edges,) integers in 0 .. dataset_size - 1.
      dataset_size: number of examples, each of which must have a user.

    Raises:
      ValueError: pairs that name no row of the data set, rows without users, other shapes.
    """
    size = _validate.positive_integer("dataset_size", dataset_size)
    users, rows = np.asarray(users), np.asarray(rows)
    if users.ndim != 1 or users.shape != rows.shape:
        raise ValueError(
            f"users and rows must be lists of one length, had shapes {users.shape}, {rows.shape}"
        )
    if rows.dtype.kind not in "iu":
        raise ValueError(f"rows must be integers, were {rows.dtype}")
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < size:
        bad = rows[(rows < 0) | (rows >= size)][0]
        raise ValueError(f"rows must be in 0..{size - 1}, one was {bad}")
    if users.dtype.kind in "iu" and users.size and 0 <= int(users.min()) and int(users.max()) < 2**31:
        numbers = users
    else:
        numbers = np.unique(users, return_inverse=True)[1]
    width = int(numbers.max(initial=0)) + 1
    pairs = np.unique(rows.astype(np.int64) * width + numbers)
    rows, numbers = pairs // width, pairs % width
    present = np.zeros(width, bool)
    present[numbers] = True
    renumbered = np.cumsum(present) - 1  # users that are in no pair do not exist
    without = np.flatnonzero(np.bincount(rows, minlength=size) == 0)
    if without.size:
        raise ValueError(f"rows must all have a user, row {without[0]} has none ({without.size} in all)")
    return _compressed(np.arange(size), rows, renumbered[numbers], int(present.sum()), size)


def _compressed(data_rows, examples, users, num_users: int, dataset_size: int) -> Attribution:
    """The graph of pairs that are sorted by example."""
    counts = np.bincount(examples, minlength=len(data_rows))
    by_user = np.argsort(users, kind="stable")
    return Attribution(
        rows=np.asarray(data_rows, np.int64),
        first_user=np.concatenate([[0], np.cumsum(counts)]),
        users=users.astype(np.int32),
        first_example=np.concatenate([[0], np.cumsum(np.bincount(users, minlength=num_users))]),
        examples=examples[by_user].astype(np.int32),
        dataset_size=dataset_size,
    )


def read_edges(path) -> tuple[np.ndarray, np.ndarray]:
    """(users, rows) from a CSV or Parquet file with the columns "user" and "row".

    Users are integers or texts; rows count the data set's examples from 0.

    Raises:
      ValueError: a file that cannot be read or lacks a column.
    """
    import pyarrow
    from pyarrow import csv, parquet

    columns = ["user", "row"]
    try:
        if Path(path).suffix == ".parquet":
            table = parquet.read_table(path, columns=columns)
        else:
            options = csv.ConvertOptions(include_columns=columns)
            table = csv.read_csv(path, convert_options=options)
    except OSError as error:
        raise ValueError(f"edges {path} cannot be read: {error.strerror or error}") from None
    except (pyarrow.ArrowException, KeyError) as error:
        raise ValueError(f"edges {path} must have the columns user and row: {_first_line(error)}") from None
    if table.column_names != columns:
        raise ValueError(f"edges {path} must have the columns user and row, had {table.column_names}")
    users, rows = (table.column(name) for name in columns)
    if users.null_count or rows.null_count:
        raise ValueError(f"edges {path} must not have empty cells")
    if not pyarrow.types.is_integer(users.type):
        # Texts by the number of each distinct one: a few bytes an edge whatever their length.
        users = users.cast(pyarrow.string()).combine_chunks().dictionary_encode().indices
    return users.to_numpy(), rows.to_numpy()


def _first_line(error) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def bound_contributions(
    graph: Attribution,
    examples_per_user: int,
    *,
    max_neighborhood: int | None = None,
    duplicates: bool = False,
    seed: int = 0,
) -> Attribution:
    """A subgraph in which no user has more than `examples_per_user` examples.

    Examples are gone through in random order; one is kept if all its users have room. That is greedy and
    maximal. The graph is public, so the order may be too.

    Args:
      examples_per_user: k_u >= 1.
      max_neighborhood: k_e: examples that share a user with more than this many (themselves included) are
        dropped afterwards. Worth it where `barring(...)` is above 1 (arXiv 2602.09338, appendix C).
      duplicates: go round again and keep further copies of examples while all their users have room.
      seed: of the order.

    Returns:
      The graph of what is kept; its `rows` say which rows of the data set that is.

    Raises:
      ValueError: bad arguments, or nothing kept.
    """
    most = _validate.positive_integer("examples_per_user", examples_per_user)
    order = np.random.default_rng(seed).permutation(graph.num_examples).tolist()
    room = [most] * graph.num_users
    ends, users = graph.first_user.tolist(), graph.users.tolist()
    kept: list[int] = []
    while True:
        before = len(kept)
        for example in order:
            owners = users[ends[example] : ends[example + 1]]
            if all(room[user] for user in owners):
                for user in owners:
                    room[user] -= 1
                kept.append(example)
        if not duplicates or len(kept) == before:
            break
    bounded = _subgraph(graph, np.array(kept, np.int64))
    if max_neighborhood is not None:
        limit = _validate.positive_integer("max_neighborhood", max_neighborhood)
        bounded = _subgraph(bounded, np.flatnonzero(neighborhood_sizes(bounded) <= limit))
    if not bounded.num_examples:
        raise ValueError(f"max_neighborhood must keep some examples, {max_neighborhood} keeps none")
    return bounded


def _subgraph(graph: Attribution, kept: np.ndarray) -> Attribution:
    """The graph of the examples numbered `kept`, in order; users keep their numbers."""
    kept = np.sort(kept)
    examples, users = _users_of(graph, kept)
    return _compressed(graph.rows[kept], examples, users, graph.num_users, graph.dataset_size)


def _users_of(graph: Attribution, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(position in `examples`, user) of every pair of theirs, in order."""
    return _ranges(graph.first_user, graph.users, examples)


def _ranges(first: np.ndarray, values: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(position in `chosen`, value) of all entries of the compressed rows `chosen`."""
    lengths = first[chosen + 1] - first[chosen]
    ends = np.cumsum(lengths)
    at = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first[chosen] - (ends - lengths), lengths)
    return np.repeat(np.arange(len(chosen)), lengths), values[at]


def neighborhood_sizes(graph: Attribution) -> np.ndarray:
    """(examples,) int64: |N(e)|, how many examples share a user with each, itself included.

    Memory is linear in the edges: pairs of examples are counted in chunks.
    """
    sizes = np.zeros(graph.num_examples, np.int64)
    reach = np.add.reduceat(graph.examples_of_users()[graph.users], graph.first_user[:-1])
    cuts = np.searchsorted(np.cumsum(reach), np.arange(0, reach.sum(), _PAIRS_AT_ONCE)[1:])
    for chunk in np.split(np.arange(graph.num_examples), np.unique(cuts)):
        if not len(chunk):
            continue
        position, users = _users_of(graph, chunk)
        pair, neighbor = _ranges(graph.first_example, graph.examples, users.astype(np.int64))
        distinct = np.unique(position[pair] * np.int64(graph.num_examples) + neighbor)
        sizes[chunk] = np.bincount(distinct // graph.num_examples, minlength=len(chunk))
    return sizes


def phantoms(graph: Attribution, examples_per_user: int) -> np.ndarray:
    """(users,) int64: how many examples each user lacks; phantoms that bar but never join a batch.

    Raises:
      ValueError: a user has more.
    """
    numbers = _bounded(graph, examples_per_user)
    # A user none of whose examples is kept bars nobody.
    return np.where(numbers > 0, examples_per_user - numbers, 0)


def _bounded(graph: Attribution, examples_per_user: int) -> np.ndarray:
    """(users,) int64: how many examples each user has, none more than allowed; ValueError."""
    numbers = graph.examples_of_users()
    if numbers.max(initial=0) > examples_per_user:
        raise ValueError(
            f"examples_per_user must be at least {numbers.max()}, the most examples of a user, "
            f"was {examples_per_user}: bound_contributions first"
        )
    return numbers


def check_graph(
    scheme: Scheme, graph: Attribution | None, dataset_size: int | None, shared_examples: bool
) -> None:
    """Refuse a graph that the plan's guarantee is not for, and a missing or needless one.

    Args:
      scheme: of the plan.
      graph: of users and examples; for schemes whose unit is a user.
      dataset_size: the plan's number of examples.
      shared_examples: `Plan.holds_for_shared_examples`.

    Raises:
      ValueError: in one line.
    """
    if (scheme.unit == "user") != (graph is not None):
        raise ValueError(
            "graph must be given for multi- and independent-attribution, and for no other scheme"
        )
    if graph is None:
        return
    check_consistent(graph)
    if graph.num_examples != dataset_size:
        raise ValueError(f"graph must have the {dataset_size} examples of the plan, had {graph.num_examples}")
    if not shared_examples:
        check_one_owner(graph)
    _bounded(graph, scheme.examples_per_unit)


def check_consistent(graph: Attribution) -> None:
    """Refuse a graph whose two sides tell of different edges: what is counted must be what bars.

    Raises:
      ValueError: in one line, for arrays that `from_edges` and `bound_contributions` do not make.
    """
    size = _validate.positive_integer("graph dataset_size", graph.dataset_size)
    for name in ("rows", "first_user", "users", "first_example", "examples"):
        array = getattr(graph, name)
        if not (isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind == "i"):
            raise ValueError(f"graph {name} must be a list of integers")
    owners, num_users = np.diff(graph.first_user), graph.num_users
    ends = graph.first_user[[0, -1]] if graph.first_user.size else np.zeros(2)
    numbers = graph.users
    if (
        not graph.num_examples
        or len(owners) != graph.num_examples
        or (owners < 1).any()
        or (ends != (0, len(numbers))).any()
        or not 0 <= numbers.min() <= numbers.max() < num_users
    ):
        raise ValueError("graph must list one user or more of every example, each by a number that it counts")
    if not 0 <= graph.rows.min() <= graph.rows.max() < size:
        raise ValueError(f"graph rows must be in 0..{size - 1}")
    examples = np.repeat(np.arange(graph.num_examples), owners)
    if _has_copies_with_other_owners(graph):
        raise ValueError("graph must give all examples that are the same row of the data the same users")
    if (np.diff(examples * np.int64(num_users) + numbers) <= 0).any():
        raise ValueError("graph users must be ascending for every example, none twice")
    again = _compressed(graph.rows, examples, numbers, num_users, size)
    for name in ("first_example", "examples"):
        if not np.array_equal(getattr(graph, name), getattr(again, name)):
            raise ValueError(f"graph {name} must say the same as its users, does not")


def _has_copies_with_other_owners(graph: Attribution) -> bool:
    """Whether two examples are one row of the data, and a user of one is none of the other's."""
    order = np.argsort(graph.rows, kind="stable")
    same = graph.rows[order[1:]] == graph.rows[order[:-1]]
    one, other = order[:-1][same], order[1:][same]
    owners = np.diff(graph.first_user)
    if (owners[one] != owners[other]).any():
        return True
    return not np.array_equal(_users_of(graph, one)[1], _users_of(graph, other)[1])


def check_one_owner(graph: Attribution) -> None:
    """Refuse a graph in which an example has several owners.

    Under multi-attribution the batches of the others then show the coins of the user at hand, and a guarantee
    that takes them for hidden is false (jaxacct/proofs/shared_examples.md).

    Raises:
      ValueError: with the way out, in one line.
    """
    shared = int((np.diff(graph.first_user) > 1).sum())
    if shared:
        raise ValueError(
            f"graph must give every example one owner for multi-attribution, {shared} of "
            f"{graph.num_examples} have several: use the scheme independent-attribution, or calibrate with "
            "the accountant revealed-pattern (all its coins revealed)"
        )


def barring(min_separation: int, sampling_probability: float, max_neighborhood: int) -> float:
    """The rule of thumb `b p k_e`: an example with such a neighbourhood is worth keeping below 1.

    Source: arXiv 2602.09338, appendix C; a rough guide about batch sizes, not about privacy.
    """
    return min_separation * sampling_probability * max_neighborhood


class _Barring(NamedTuple):
    """Distinct numbers of examples (phantoms too) that bar an example, and how many examples have each."""

    bars: np.ndarray
    examples: np.ndarray


def _barring(graph: Attribution, examples_per_user: int) -> _Barring:
    missing = phantoms(graph, examples_per_user)
    own = np.add.reduceat(missing[graph.users], graph.first_user[:-1])
    return _Barring(*np.unique(neighborhood_sizes(graph) + own, return_counts=True))


def _expected(bars: _Barring, p: float, barred_steps) -> np.ndarray:
    """Mean batch size after each number of steps that may have barred."""
    with np.errstate(divide="ignore"):
        log_free = np.log1p(-p) if p < 1 else -math.inf
    steps = np.atleast_1d(np.asarray(barred_steps, float))[:, None]
    # 0 * -inf: a step that nothing came before.
    exponent = np.where(steps > 0, np.maximum(steps, 1) * bars.bars * log_free, 0.0)
    return p * (np.exp(exponent) * bars.examples).sum(axis=1)


def expected_batch_sizes(graph: Attribution, scheme) -> np.ndarray:
    """(iterations,) float64, exact: `sum_e p (1-p)^((b-1) (|N(e)| + phantoms of e's users))`.

    Under a cold start fewer than b - 1 steps have been before the first ones. Independent attribution has the
    sizes of b-min-sep on every graph.
    """
    if scheme.examples_overlap:
        return scheme.expected_batch_sizes(graph.num_examples)
    b = scheme.min_separation
    before = np.minimum(np.arange(scheme.iterations), b - 1)
    if scheme.warm_start:
        before = np.full(scheme.iterations, b - 1)
    distinct, index = np.unique(before, return_inverse=True)
    bars = _barring(graph, scheme.examples_per_user)
    return _expected(bars, scheme.sampling_probability, distinct)[index]


def find_sampling_probability(
    graph: Attribution, *, batch_size: float, min_separation: int, examples_per_user: int
) -> float:
    """The smallest sampling probability whose mean batch size (warm start) is `batch_size`.

    Raises:
      ValueError: more than any probability gives, or a user with too many examples.
    """
    target = _validate.positive_number("batch_size", batch_size)
    b = _validate.positive_integer("min_separation", min_separation)
    bars = _barring(graph, _validate.positive_integer("examples_per_user", examples_per_user))

    def size(log_p):
        return float(_expected(bars, min(1.0, math.exp(log_p)), b - 1)[0])

    # No example's rate grows beyond 1 / (1 + (b-1) bars), so the largest is past the smallest of those.
    grid = np.append(np.linspace(math.log(target / graph.num_examples) - 1, 0.0, 4001)[:-1], 0.0)
    sizes = np.array([size(log_p) for log_p in grid])
    reached = np.flatnonzero(sizes >= target)
    if not reached.size:
        best = int(np.argmax(sizes))
        raise ValueError(
            f"batch_size must be at most {sizes[best]:.6g}, reached at sampling_probability "
            f"{math.exp(grid[best]):.4g}, was {batch_size!r}"
        )
    ends = grid[reached[0] - 1], grid[reached[0]]
    return min(1.0, math.exp(roots.bisect(lambda log_p: size(log_p) >= target, *ends, relative=0.0)[1]))


class AttributionPool:
    """Algorithm 3, step by step: a sampled example joins unless a user of its was sampled lately.

    "Sampled" means drawn, whether or not it joined: otherwise it would be algorithm 4, which is a conjecture,
    and false where examples are shared (jaxacct/proofs/shared_examples.md). This class draws from any graph;
    whoever trains with it asks `check_graph` first.

    A step costs what the sampled examples and their users number. Phantom examples fill every user up to k_u.

    Args:
      scheme: the scheme of the plan.
      graph: every user with at most `scheme.examples_per_user` examples.
      generator: of the draws before the first step (warm start): b - 1 steps are exactly stationary, because
        nothing older is remembered.
    """

    def __init__(self, scheme: MultiAttribution, graph: Attribution, generator: np.random.Generator):
        self.graph, self.scheme = graph, scheme
        self.phantom_ends = np.cumsum(phantoms(graph, scheme.examples_per_user))
        total = int(self.phantom_ends[-1]) if graph.num_users else 0
        self.population = graph.num_examples + total
        b = scheme.min_separation
        self.last = np.full(graph.num_users, -2 * b, np.int64)
        if scheme.warm_start:
            for step in range(-(b - 1), 0):
                self.draw(step, generator)

    def draw(self, step: int, generator: np.random.Generator) -> np.ndarray:
        """Numbers of the examples in the batch of `step`."""
        number = generator.binomial(self.population, self.scheme.sampling_probability)
        drawn = generator.choice(self.population, number, replace=False, shuffle=False)
        real = drawn[drawn < self.graph.num_examples]
        phantom_users = np.searchsorted(
            self.phantom_ends, drawn[drawn >= self.graph.num_examples] - self.graph.num_examples, side="right"
        )
        position, users = _users_of(self.graph, real)
        recent = self.last[users] > step - self.scheme.min_separation
        barred = np.bincount(position[recent], minlength=len(real)) > 0
        self.last[users] = step
        self.last[phantom_users] = step
        return real[~barred]


def prepare(
    edges: str,
    dataset_size: int,
    examples_per_user: int,
    batch_size: float,
    min_separation: int,
    out: str,
    scheme: Literal["multi-attribution", "independent-attribution"] = "multi-attribution",
    accountant: Literal["unamplified", "revealed-pattern"] | None = None,
    max_neighborhood: int | None = None,
    duplicates: bool = False,
    seed: int = 0,
) -> int:
    """Bound contributions, find the sampling probability, keep the graph; prints one JSON object.

    Args:
      edges: CSV or Parquet with the columns "user" and "row".
      dataset_size: rows of the data set.
      examples_per_user: k_u, the most examples that a user keeps.
      batch_size: expected batch size.
      min_separation: b, as for `jaxacct calibrate`.
      out: the graph, for `python -m train --graph`.
      scheme: that the run will have. The first is for graphs in which every example has one user, unless
        `accountant` says otherwise; under the second examples are drawn independently, whoever shares them.
      accountant: that the run will be calibrated by. With one of these two multi-attribution holds where
        users share examples, at the price of amplification.
      max_neighborhood: k_e, the most examples that an example may share users with.
      duplicates: use examples several times while their users have room.
      seed: of the order in which examples are considered; public.
    """
    graph = from_edges(*read_edges(edges), dataset_size=dataset_size)
    bounded = bound_contributions(
        graph, examples_per_user, max_neighborhood=max_neighborhood, duplicates=duplicates, seed=seed
    )
    sizes: dict[str, Any] = dict(
        batch_size=batch_size, min_separation=min_separation, examples_per_user=examples_per_user
    )
    if scheme == "independent-attribution":
        count = bounded.num_examples
        probability = IndependentAttribution.from_batch_size(
            dataset_size=count, iterations=1, **sizes
        ).sampling_probability
    else:
        rule = MultiAttribution(1, min_separation, 1.0, examples_per_user)
        if accountant is None and not rule.holds_for_shared_examples:
            check_one_owner(bounded)
        probability = find_sampling_probability(bounded, **sizes)
    bounded.save(out)
    largest = int(neighborhood_sizes(bounded).max())
    found = {
        "scheme": scheme,
        "dataset_size": bounded.num_examples,
        "rows_dropped": graph.num_examples - len(np.unique(bounded.rows)),
        "users": int((bounded.examples_of_users() > 0).sum()),
        "examples_per_user": examples_per_user,
        "sampling_probability": probability,
        "expected_batch_size": batch_size,
        "max_neighborhood": largest,
        "barring": barring(min_separation, probability, largest),
        "next": f"jaxacct calibrate --scheme {scheme} --examples-per-user {examples_per_user} "
        f"--min-separation {min_separation} --sampling-probability {probability!r} "
        f"--dataset-size {bounded.num_examples} "
        + ("" if accountant is None else f"--accountant {accountant} ")
        + "--iterations ... --bands ... --epsilon ... --delta ... --out plan.json",
    }
    print(json.dumps(found))
    return 0


def main(argv: list[str] | None = None) -> None:
    """Exits with 0, or 2 on bad input."""
    try:
        app = single(prepare, f"python -m {__spec__.name}", __doc__)
        code = parse(app, sys.argv[1:] if argv is None else argv)()
    except (ValueError, OSError) as error:
        print(f"train.batches.attribution: {error}", file=sys.stderr)
        code = 2
    raise SystemExit(code)


if __name__ == "__main__":
    main()
