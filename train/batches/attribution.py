"""`jaxacct attribution`: bounded contributions of users, and the sampling probability on their graph."""

import json
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxacct.cli.usage import Integer, Number
from jaxacct.common import validate as _validate
from jaxacct.schemes import IndependentAttribution, MultiAttribution
from jaxacct.statistics import roots

from . import graph as _graph
from .graph import Attribution, neighborhood_sizes, subgraph


def read_edges(path) -> tuple[np.ndarray, np.ndarray]:
    """Return (users, rows) from a CSV or Parquet file with the columns "user" and "row".

    Users are integers or texts; rows count the data set's examples from 0.

    Raises:
      ValueError: no such file or columns, and, with its row, a missing user or two names that differ by case
        or spaces only: each would count as one more person.
    """
    import pyarrow
    from pyarrow import dataset

    columns = ["user", "row"]
    try:
        kind = "parquet" if Path(path).suffix == ".parquet" else "csv"
        table = dataset.dataset(path, format=kind).to_table(columns=columns)
    except OSError as error:
        raise ValueError(f"edges {path} cannot be read: {error.strerror or error}") from None
    except pyarrow.ArrowException as error:
        first = _validate.in_one_line(error)
        raise ValueError(f"edges {path} must have the columns user and row: {first}") from None
    users, rows = (table.column(name) for name in columns)
    for name, column in zip(columns, (users, rows), strict=True):
        if column.null_count:
            empty = column.is_null().index(True).as_py()
            raise ValueError(f"edges {path} must have a {name} in every row, row {empty} has none")
    if not pyarrow.types.is_integer(users.type):
        # Texts by number: a few bytes an edge, whatever their length.
        encoded = users.cast(pyarrow.string()).combine_chunks().dictionary_encode()
        users = encoded.indices
        found = _graph.ambiguous_name(encoded.dictionary.to_pylist())
        if found is not None:
            place = users.index(found[0]).as_py()
            raise ValueError(f"edges {path} must name every user in one way, row {place} {found[1]}")
    return users.to_numpy(), rows.to_numpy()


def bound_contributions(
    graph: Attribution,
    examples_per_user: int,
    *,
    max_neighborhood: int | None = None,
    duplicates: bool = False,
    seed: int = 0,
) -> Attribution:
    """Return a subgraph in which no user has more than `examples_per_user` examples, greedy and maximal.

    Examples are visited in random order, public as the graph; one is kept if all its users have room.
    Examples that share a user with more than `max_neighborhood` (themselves included) are dropped afterwards:
    useful where `barring` is above 1 (arXiv 2602.09338, appendix C). With `duplicates` this is repeated, and
    further copies of examples are kept while all their users have room.
    """
    max_examples = _validate.positive_integer("examples_per_user", examples_per_user)
    order = np.random.default_rng(seed).permutation(graph.num_examples).tolist()
    room = [max_examples] * graph.num_users
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
    bounded = subgraph(graph, np.array(kept, np.int64))
    if max_neighborhood is not None:
        limit = _validate.positive_integer("max_neighborhood", max_neighborhood)
        bounded = subgraph(bounded, np.flatnonzero(neighborhood_sizes(bounded) <= limit))
    if not bounded.num_examples:
        raise ValueError(f"max_neighborhood must keep some examples, {max_neighborhood} keeps none")
    return bounded


def _lockouts(graph: Attribution, examples_per_user: int) -> tuple[np.ndarray, np.ndarray]:
    """Return distinct numbers of examples (phantoms too) that bar an example, and how many have each."""
    own = graph.matrix @ _graph.phantoms(graph, examples_per_user)
    return np.unique(neighborhood_sizes(graph) + own, return_counts=True)


def _expected(lockouts: tuple[np.ndarray, np.ndarray], p: float, steps) -> np.ndarray:
    """Mean batch size after each number of steps that may have locked out."""
    sizes, examples = lockouts
    return p * ((1.0 - p) ** np.multiply.outer(steps, sizes) @ examples)


def expected_batch_sizes(graph: Attribution, scheme) -> np.ndarray:
    """Return (iterations,) float64, exact: `sum_e p (1-p)^((b-1) (|N(e)| + phantoms of e's users))`.

    A cold start has fewer than b - 1 earlier steps at first. Independent attribution has the sizes of
    b-min-sep on every graph.
    """
    if scheme.examples_overlap:
        return scheme.expected_batch_sizes(graph.num_examples)
    b = scheme.min_separation
    before = np.minimum(np.arange(scheme.iterations) + scheme.warm_start * (b - 1), b - 1)
    distinct, index = np.unique(before, return_inverse=True)
    lockouts = _lockouts(graph, scheme.examples_per_user)
    return _expected(lockouts, scheme.sampling_probability, distinct)[index]


def find_sampling_probability(
    graph: Attribution, *, batch_size: float, min_separation: int, examples_per_user: int
) -> float:
    """Return the smallest sampling probability whose mean batch size (warm start) is `batch_size`."""
    target = _validate.positive_number("batch_size", batch_size)
    b = _validate.positive_integer("min_separation", min_separation)
    lockouts = _lockouts(graph, _validate.positive_integer("examples_per_user", examples_per_user))

    def size(log_p):
        return float(_expected(lockouts, min(1.0, math.exp(log_p)), b - 1))

    # No example's rate grows beyond 1 / (1 + (b-1) neighbours), so the largest is past the smallest of those.
    grid = np.append(np.linspace(math.log(target / graph.num_examples) - 1, 0.0, 4001)[:-1], 0.0)
    sizes = np.array([size(log_p) for log_p in grid])
    reached = np.flatnonzero(sizes >= target)
    if not reached.size:
        best = int(np.argmax(sizes))
        raise ValueError(
            f"batch_size must be at most {sizes[best]:.6g}, reached at sampling_probability "
            f"{math.exp(grid[best]):.4g}, got {batch_size!r}"
        )
    ends = grid[reached[0] - 1], grid[reached[0]]
    return min(1.0, math.exp(roots.bisect(lambda log_p: size(log_p) >= target, *ends, relative=0.0)[1]))


def prepare(
    *,
    edges: str,
    dataset_size: Integer,
    examples_per_user: Integer,
    batch_size: Number,
    min_separation: Integer,
    out: str,
    scheme: Literal["multi-attribution", "independent-attribution"] = "multi-attribution",
    accountant: Literal["unamplified", "revealed-pattern"] | None = None,
    max_neighborhood: Integer | None = None,
    duplicates: bool = False,
    seed: Integer = 0,
) -> int:
    r"""Bound contributions, find the sampling probability, store the graph; prints one JSON object.

    For example:

        jaxacct attribution --edges edges.csv --dataset-size 60000 \
            --examples-per-user 4 --batch-size 128 --min-separation 64 --out graph.npz

    Args:
      edges: CSV or Parquet with the columns "user" and "row".
      dataset_size: rows of the data set.
      examples_per_user: k_u, the most examples that a user keeps.
      batch_size: expected batch size.
      min_separation: b, as for `jaxacct calibrate`.
      out: the graph, for `TrainOptions(graph=Attribution.load(out))`.
      scheme: of the run. The first is for graphs in which every example has one user, unless `accountant` is
        given; under the second examples are drawn independently, for any sharing.
      accountant: of the run's calibration. With one of these two multi-attribution holds where users share
        examples, without amplification.
      max_neighborhood: k_e, the most examples that an example may share users with.
      duplicates: use examples several times while their users have room.
      seed: of the order in which examples are visited; public.
    """
    graph = _graph.from_edges(*read_edges(edges), dataset_size=dataset_size)
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
            _graph.check_one_owner(bounded)
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
        "barring": min_separation * probability * largest,  # rule of thumb b p k_e: keep it below 1
        "next": f"jaxacct calibrate --scheme {scheme} --examples-per-user {examples_per_user} "
        f"--min-separation {min_separation} --sampling-probability {probability!r} "
        f"--dataset-size {bounded.num_examples} "
        + ("" if accountant is None else f"--accountant {accountant} ")
        + "--iterations ... --bands ... --epsilon ... --delta ... --out plan.json",
    }
    print(json.dumps(found))
    return 0
