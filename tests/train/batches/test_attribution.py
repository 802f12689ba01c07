"""Users and examples: the graph, algorithm 3 against its text, bounded contributions, batch sizes."""

import collections
import dataclasses
import itertools
import json

import numpy as np
import optax
import pyarrow
import pytest
from pyarrow import csv, parquet
from scipy import stats

from jaxacct import BandedToeplitz, IndependentAttribution, Mechanism, MultiAttribution, Plan
from jaxacct.core.text import unit_in_words
from tests.commands import command
from tests.oracles import enumeration, shared_examples
from tests.oracles.chi_square import chi_square_p_value
from tests.refusals import refused
from tests.stored_plans import whole
from tests.train.runs import fit, plan_of
from train.batches import attribution
from train.batches import graph as graphs
from train.batches.attribution import bound_contributions
from train.batches.graph import Attribution, AttributionPool, from_edges
from train.batches.sampler import Sampler
from train.procedures import bandmf

pytestmark = pytest.mark.usefixtures("shared_programs")

FALSE_ALARM = 1e-6


def papers(num_examples=60, num_authors=40, seed=0) -> Attribution:
    """A graph like co-authorship: one to three authors a paper, a few authors with many."""
    generator = np.random.default_rng(seed)
    popularity = generator.pareto(1.5, num_authors) + 0.1
    users, rows = [], []
    for row in range(num_examples):
        number, share = generator.integers(1, 4), popularity / popularity.sum()
        authors = generator.choice(num_authors, number, replace=False, p=share)
        users += authors.tolist()
        rows += [row] * len(authors)
    return from_edges(users, rows, dataset_size=num_examples)


def albums(num_examples=120, num_users=50, seed=5) -> Attribution:
    """Every example has one owner; some users have many."""
    generator = np.random.default_rng(seed)
    owners = np.floor(num_users * generator.random(num_examples) ** 2).astype(int)
    return from_edges(owners, np.arange(num_examples), dataset_size=num_examples)


def user_sets(graph: Attribution) -> list[set[int]]:
    return [set(owners.tolist()) for owners in np.split(graph.users, graph.first_user[1:-1])]


def sampler_on(graph: Attribution, scheme) -> Sampler:
    """The sampler of all examples of a graph, of which any number fits into a batch."""
    return Sampler(scheme, graph.num_examples, graph.num_examples, graph=graph)


def batches(scheme, graph, key) -> list[set[int]]:
    """Of algorithm 3, on any graph: its distribution holds where its guarantee does not."""
    generator = np.random.default_rng(key)
    pool = AttributionPool(scheme, graph, generator)
    return [set(pool.draw(step, generator).tolist()) for step in range(scheme.iterations)]


COPIES = 50


def side_by_side(graph) -> Attribution:
    """50 copies that have no user in common: example e of copy c is c * num_examples + e."""
    number, per_example = graph.num_examples, np.diff(graph.first_user)
    owners = [graph.users + copy * graph.num_users for copy in range(COPIES)]
    rows = [np.repeat(np.arange(number), per_example) + copy * number for copy in range(COPIES)]
    union = from_edges(np.concatenate(owners), np.concatenate(rows), dataset_size=COPIES * number)
    assert union.num_users == COPIES * len(np.unique(graph.users))  # none of users without an example
    return union


def runs_of_copies(scheme, graph, runs: int, key):
    """Yields (run, step, copy, example) as algorithm 3 draws on 50 copies of a graph side by side.

    Copies have no user in common and examples are sampled independently: each copy is a run by itself.
    """
    union = side_by_side(graph)
    for run in range(runs):
        generator = np.random.default_rng((run, *key))
        pool = AttributionPool(scheme, union, generator)
        for step in range(scheme.iterations):
            copy, example = np.divmod(pool.draw(step, generator), graph.num_examples)
            yield run, step, copy, example


def naive_distribution(graph, scheme, burn_in: int) -> dict[tuple[int, ...], float]:
    """Distribution of the membership vector (steps x examples) by algorithm 3 word for word, over all coins.

    Phantoms are written out as examples of one user each.
    """
    b, p = scheme.min_separation, scheme.sampling_probability
    sets = user_sets(graph)
    real = len(sets)
    for user, missing in enumerate(graphs.phantoms(graph, scheme.examples_per_user)):
        sets += [{user}] * int(missing)
    steps = burn_in + scheme.iterations
    distribution = collections.defaultdict(float)
    subsets = list(itertools.product((0, 1), repeat=len(sets)))
    for coins in itertools.product(subsets, repeat=steps):
        batches_ = []
        for i in range(steps):
            excluded = set()
            for j in range(max(0, i - b + 1), i):
                owners = set().union(*(sets[e] for e in range(len(sets)) if coins[j][e]), set())
                excluded |= {e for e in range(len(sets)) if sets[e] & owners}
            batches_.append([int(coins[i][e] and e not in excluded) for e in range(real)])
        heads = sum(map(sum, coins))
        tails = len(sets) * steps - heads
        distribution[tuple(itertools.chain(*batches_[burn_in:]))] += p**heads * (1 - p) ** tails
    return dict(distribution)


# A shared paper between two authors of two; one author of one paper with a phantom.
TINY = from_edges([0, 0, 1], [0, 1, 1], dataset_size=2)
ONE = from_edges([7], [0], dataset_size=1)


def test_the_sampler_is_algorithm_3():
    """The distribution of whole runs against all coins written out; two chi-squares, false alarm 1e-6
    together.

    Samples of a fixed size would hardly show on copies side by side: so there are runs of the graph alone.
    """
    for graph, scheme, burn_in in [
        (TINY, MultiAttribution(3, 2, 0.4, 2, False), 0),
        (TINY, MultiAttribution(2, 2, 0.3, 2, True), 1),
        (ONE, MultiAttribution(4, 3, 0.4, 1, True), 2),
        (ONE, MultiAttribution(3, 2, 0.4, 2, True), 1),
        (TINY, MultiAttribution(2, 1, 0.4, 2, True), 0),
    ]:
        distribution = naive_distribution(graph, scheme, burn_in)
        alone = []
        for seed in range(600):
            drawn = batches(scheme, graph, (seed, 1, 2, 3))
            alone.append([int(e in batch) for batch in drawn for e in range(graph.num_examples)])
        assert chi_square_p_value(np.array(alone), distribution) > FALSE_ALARM / 2
        many = np.zeros((120, COPIES, scheme.iterations, graph.num_examples), int)
        for run, step, copy, example in runs_of_copies(scheme, graph, len(many), (1, 2, 3)):
            many[run, copy, step, example] = 1
        assert chi_square_p_value(many.reshape(120 * COPIES, -1), distribution) > FALSE_ALARM / 2


@pytest.mark.parametrize("warm", [True, False])
def test_expected_batch_sizes(warm):
    """Exact against 4,000 runs, at every step, by their standard error; false alarm 1e-6."""
    graph = bound_contributions(papers(40, 30), 3)
    scheme = MultiAttribution(10, 4, 0.04, 3, warm)
    runs = 4000
    sizes = np.zeros(10)
    squares = np.zeros(10)
    for _, step, copy, _ in runs_of_copies(scheme, graph, runs // COPIES, (8, 8, 8)):
        found = np.bincount(copy, minlength=COPIES)
        sizes[step] += found.sum()
        squares[step] += (found**2).sum()
    exact = attribution.expected_batch_sizes(graph, scheme)
    error = np.sqrt((squares / runs - (sizes / runs) ** 2) / runs)
    assert np.all(np.abs(sizes / runs - exact) < stats.norm.isf(FALSE_ALARM / 20) * error)
    if warm:
        assert np.ptp(exact) == 0
    else:
        assert exact[0] > exact[-1]


@pytest.mark.parametrize("duplicates", [False, True])
@pytest.mark.parametrize("k_u", [1, 2, 5])
def test_bounded_contributions(k_u, duplicates):
    graph = papers(100, 30, seed=1)
    bounded = bound_contributions(graph, k_u, duplicates=duplicates)
    assert bounded.examples_of_users().max() == k_u
    sets, before = user_sets(bounded), user_sets(graph)
    for row, owners in zip(bounded.rows, sets, strict=True):
        assert owners == before[row]
    numbers = bounded.examples_of_users()
    # Nothing that was left out (or, with duplicates, nothing at all) would still fit.
    left = set(range(100)) if duplicates else set(range(100)) - set(bounded.rows.tolist())
    for row in left:
        assert any(numbers[user] == k_u for user in before[row])
    if not duplicates:
        assert len(set(bounded.rows.tolist())) == bounded.num_examples
    small = bound_contributions(graph, k_u, max_neighborhood=k_u, duplicates=duplicates)
    assert graphs.neighborhood_sizes(small).max() <= k_u


def test_find_sampling_probability():
    graph = bound_contributions(papers(200, 150), 3)
    p = attribution.find_sampling_probability(graph, batch_size=2.0, min_separation=4, examples_per_user=3)
    scheme = MultiAttribution(5, 4, p, 3)
    np.testing.assert_allclose(attribution.expected_batch_sizes(graph, scheme), 2.0, rtol=1e-9)
    fewer = attribution.expected_batch_sizes(graph, MultiAttribution(5, 4, p * 0.99, 3))
    assert fewer.max() < 2.0
    sizes = dict(batch_size=150, min_separation=4, examples_per_user=3)
    too_large = r"batch_size must be at most .* got 150"
    refused(too_large, attribution.find_sampling_probability, graph, **sizes)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_files(tmp_path, suffix):
    table = pyarrow.table({"user": ["ann", "bob", "ann", "cy", "ann"], "row": [0, 0, 1, 2, 1]})
    path = tmp_path / f"edges.{suffix}"
    (csv.write_csv if suffix == "csv" else parquet.write_table)(table, path)
    graph = from_edges(*attribution.read_edges(path), dataset_size=3)
    assert sorted(map(len, user_sets(graph))) == [1, 1, 2]
    assert sorted(graph.examples_of_users()) == [1, 1, 2]
    graph.save(tmp_path / "graph.npz")
    again = Attribution.load(tmp_path / "graph.npz")
    for name in Attribution.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(again, name), getattr(graph, name))


NAMES = {
    "empty": (["ann", "", "bob"], "row 1 has '': drop it"),
    "missing": (["ann", "bob", "nan"], "row 2 has 'nan': drop it"),
    "missing, capital": (["NaN ", "ann", "bob"], "row 0 has 'NaN ': drop it"),
    "case": (["ann", "bob", "Ann"], "row 2 has 'Ann', another has 'ann': these differ by case or spaces"),
    "spaces": (["ann", "bob ", "bob"], "row 2 has 'bob', another has 'bob '"),
    "inner spaces": (["ann lee", "ann  lee", "bob"], "row 1 has 'ann  lee', another has 'ann lee'"),
    "accents": (["zo\u00eb", "zoe\u0308", "bob"], "row 1 has 'zoe\u0308', another has 'zo\u00eb'"),
}


def test_users_who_would_count_twice_are_refused_with_their_line(tmp_path):
    """And those that are missing, as pandas writes a column of numbers of which one is."""
    path, places = tmp_path / "edges.csv", [0, 1, 2]
    for users, message in NAMES.values():
        path.write_text("user,row\n" + "".join(f'"{user}",{row}\n' for row, user in enumerate(users)))
        refused(f"must name every user in one way, {message}", attribution.read_edges, path)
        refused(r"users must each have one name, edge [012] has", from_edges, users, places, dataset_size=3)
    for missing in ("", "nan", "NULL"):
        path.write_text(f"user,row\n1.0,0\n{missing},1\n2.0,2\n")
        refused("must have a user in every row, row 1 has none", attribution.read_edges, path)
        path.write_text(f"user,row\n1,0\n2,1\n2,{missing}\n")
        refused("must have a row in every row, row 2 has none", attribution.read_edges, path)
    refused("edge 1 has 'nan': drop it", from_edges, [1.0, float("nan"), 2.0], places, dataset_size=3)


def test_bad_input(tmp_path, capsys):
    refused("row 1 has none", from_edges, [0, 1], [0, 2], dataset_size=3)
    refused(r"rows must be in 0..2, one was 3", from_edges, [0, 1], [0, 3], dataset_size=3)
    refused("rows must be integers", from_edges, [0, 1], [0.0, 1.0], dataset_size=2)
    refused("examples_per_user must be an integer", lambda: bound_contributions(papers(), 0))
    refused("examples_per_user must be at least", sampler_on, albums(), MultiAttribution(5, 2, 0.1, 1))
    refused("graph must be given", lambda: Sampler(MultiAttribution(5, 2, 0.1, 1), 60, 60))
    (tmp_path / "edges.csv").write_text("who,what\n1,2\n")
    code, _, error = prepared(capsys, tmp_path, size=3)
    assert code == 2 and error.count("\n") == 1
    (tmp_path / "graph.npz").write_bytes(b"PK\x03\x04 cut short")
    refused("not a file that", lambda: Attribution.load(tmp_path / "graph.npz"))


FORGED = {
    "negative user": dict(users=np.array([0, 0, 1, 1, -1])),
    "fraction": dict(users=np.array([0, 0, 1, 1, 2.0])),
    "no owner": dict(first_user=np.array([0, 1, 2, 3, 4, 4])),
    "first not 0": dict(first_user=np.array([1, 1, 2, 3, 4, 5])),
    "back and forth": dict(first_user=np.array([0, 3, 1, 3, 4, 5])),
    "a user twice": dict(first_user=np.array([0, 2, 3, 4, 5, 6]), users=np.array([0, 0, 0, 1, 1, 2])),
    "no such row": dict(rows=np.array([0, 1, 2, 3, 5])),
    "negative row": dict(rows=np.array([0, 1, 2, 3, -1])),
    "a row with two owners": dict(rows=np.array([0, 1, 1, 3, 4])),
    "two dimensions": dict(users=np.array([[0, 0, 1, 1, 2]])),
    "another type": dict(first_user=np.array([0, 1, 2, 3, 4, 5], np.uint64)),
    "size fraction": dict(dataset_size=np.array(5.7)),
    "size list": dict(dataset_size=np.array([5])),
    "size bool": dict(dataset_size=np.array(True)),
    "nothing": {name: np.zeros(0, int) for name in ("rows", "users", "first_user")},
}


def test_a_malformed_graph_is_refused(tmp_path):
    graph = from_edges([0, 0, 1, 1, 2], [0, 1, 2, 3, 4], dataset_size=5)
    for forged in FORGED.values():
        fields = {name: getattr(graph, name) for name in Attribution.__dataclass_fields__} | forged
        np.savez(tmp_path / "graph.npz", **fields)
        refused("graph", Attribution.load, tmp_path / "graph.npz")
        for scheme in (MultiAttribution(5, 2, 0.1, 2), IndependentAttribution(5, 2, 0.1, 2)):
            refused("graph", Sampler, scheme, 5, 5, graph=Attribution(**fields))


def prepared(capsys, folder, *more, size=60, batch=1, separation=2):
    """Exit code, output and error of the command on the file of edges in a folder."""
    given = dict(edges=folder / "edges.csv", out=folder / "graph.npz", dataset_size=size, batch_size=batch)
    given |= dict(min_separation=separation, examples_per_user=2)
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    return command(capsys, "attribution", *words, *more)


def write_edges(graph: Attribution, path) -> None:
    lines = ["user,row"]
    for row, owners in enumerate(user_sets(graph)):
        lines += [f"u{user},{row}" for user in sorted(owners)]
    path.write_text("\n".join(lines) + "\n")


def test_independent_draws_on_a_shared_graph():
    """Two examples with a user in common: both vectors are independent; false alarm 1e-6."""
    scheme = IndependentAttribution(4, 3, 0.4, 2)
    distribution = enumeration.pattern_distribution(scheme.one)
    pairs = {x + y: v * w for x, v in distribution.items() for y, w in distribution.items()}
    for graph, number in ((TINY, 400), (side_by_side(TINY), 80)):  # 400 and 4,000 pairs
        size = graph.num_examples
        runs = np.zeros((number, size, 4), int)
        for run in range(number):
            sampler = Sampler(scheme, size, size, (run, 1, 2, 3), graph=graph)
            for step in range(4):
                batch = sampler.next()
                runs[run, batch, step] = 1
        assert chi_square_p_value(runs.reshape(-1, 8), pairs) > FALSE_ALARM / 2


def test_independent_draws_keep_to_the_bound():
    shared = bound_contributions(papers(), 2)
    one, two = (IndependentAttribution(5, 2, 0.1, number) for number in (1, 2))
    sampler_on(shared, two)
    refused("examples_per_user must be at least 2, the most examples of a user", sampler_on, shared, one)
    refused("graph must be given", Sampler, one, 60, 60)
    refused("graph must have the 60 examples of the plan", Sampler, two, 60, 60, graph=shared)


def test_shared_examples_are_refused_wherever_training_begins(tmp_path, capsys):
    """By the command, by the sampler and by `fit`, old plans included: one line that names the way out."""
    shared = bound_contributions(papers(), 2)
    message = r"graph must give every example one owner .* independent-attribution, or .* revealed-pattern"
    scheme = MultiAttribution(5, 2, 0.1, 2)
    refused(message, sampler_on, shared, scheme)
    drawn = whole("users")  # by Monte Carlo, of the pair that hides the coins
    owners, rows = shared_examples.edges(499)
    graph = from_edges(owners, rows, dataset_size=500)
    for begin in (lambda: Sampler.from_plan(drawn, graph=graph), lambda: fit_on(drawn, graph)):
        refused(message, begin)
    write_edges(papers(), tmp_path / "edges.csv")
    code, _, error = prepared(capsys, tmp_path)
    assert code == 2 and "independent-attribution" in error
    assert not (tmp_path / "graph.npz").exists()
    code, out, _ = prepared(capsys, tmp_path, "--scheme", "independent-attribution")
    assert code == 0
    found = json.loads(out)
    kept = Attribution.load(tmp_path / "graph.npz").num_examples
    scheme = IndependentAttribution(9, 2, found["sampling_probability"], 2)
    np.testing.assert_allclose(scheme.expected_batch_sizes(kept), 1.0, rtol=1e-12)


def fit_on(plan, graph):
    data = {"x": np.zeros((graph.dataset_size, 1), np.float32)}
    given = plan, np.zeros(1, np.float32), lambda w, e: (w * e["x"]).sum(), data, optax.sgd(0.1)
    return fit(*given, graph=graph)


@pytest.mark.parametrize("separation", [1, 3])
def test_without_lockouts_of_others_sharing_is_allowed(separation):
    """b = 1, or one example a user: the pair holds on every graph; k_u = 2 with b = 3 locks out."""
    k_u = 2 if separation == 1 else 1
    shared = bound_contributions(papers(), k_u)
    scheme, locking = MultiAttribution(5, separation, 0.1, k_u), MultiAttribution(5, 3, 0.1, 2)
    sampler_on(shared, scheme).next()
    assert "however they are shared" in unit_in_words(scheme)
    assert "each with no other user" in unit_in_words(locking)
    refused("graph must give every example one owner", sampler_on, shared, locking)


def loose_plan(scheme, dataset_size: int) -> Plan:
    """Noise 1 at an epsilon so large that an analytic bound certifies it."""
    return plan_of(Mechanism(scheme, BandedToeplitz.square_root(3), 1.0), dataset_size)


def test_a_run_from_edges_to_a_model(tmp_path, capsys):
    """The command prepares the graph, and `fit` trains on its examples, every batch by the rule."""
    write_edges(albums(), tmp_path / "edges.csv")
    code, out, _ = prepared(capsys, tmp_path, size=120, batch=2.5, separation=3)
    assert code == 0
    found = json.loads(out)
    graph = Attribution.load(tmp_path / "graph.npz")
    scheme = MultiAttribution(12, 3, found["sampling_probability"], 2)
    plan = loose_plan(scheme, graph.num_examples)
    assert "user with up to 2 examples" in plan.statement()
    data = {"x": np.random.default_rng(0).normal(size=(120, 3)).astype(np.float32)}

    def loss(params, example):
        return ((params - example["x"]) ** 2).sum()

    def trained(plan, graph, rows=data["x"], **options):
        given = plan, np.zeros(3, np.float32), loss, {"x": rows}, optax.sgd(0.1)
        return fit(*given, graph=graph, checkpoint_every=4, **options).params

    assert np.isfinite(trained(plan, graph, out=tmp_path / "run")).all()
    refused("graph must be given", lambda: trained(plan, None, data["x"][: graph.num_examples]))
    refused("graph's 120 rows", lambda: trained(plan, graph, data["x"][:50]))
    shared = bound_contributions(papers(120), 2)
    number = shared.num_examples
    revealed = loose_plan(scheme, number)  # a bound with all coins revealed holds there
    assert "user with up to 2 examples, however they are shared" in revealed.statement()
    assert np.isfinite(trained(revealed, shared)).all()
    scheme = IndependentAttribution(12, 3, 0.02, 2)
    assert np.isfinite(trained(loose_plan(scheme, number), shared)).all()
    fewer = loose_plan(dataclasses.replace(scheme, examples_per_user=1), number)
    refused("examples_per_user must be at least 2", trained, fewer, shared)


def test_updates_on_a_graph_are_divided_by_its_own_batch_size(monkeypatch):
    """By the mean of what its own examples give, which is not a function of the plan."""
    graph = bound_contributions(papers(), 1)
    divided, sizes, privatize = [], attribution.expected_batch_sizes, bandmf.privatize

    def of_graph(given, scheme):
        assert given is graph
        return sizes(given, scheme) * np.linspace(1.5, 2.5, scheme.iterations)

    def watched(*args, expected_batch_size, **options):
        divided.append(expected_batch_size)
        return privatize(*args, expected_batch_size=expected_batch_size, **options)

    monkeypatch.setattr(bandmf, "expected_batch_sizes", of_graph)
    monkeypatch.setattr(bandmf, "privatize", watched)
    covered = loose_plan(MultiAttribution(12, 3, 0.1, 1), graph.num_examples)
    fit_on(covered, graph)
    assert divided == [pytest.approx(2 * covered.expected_batch_size, rel=1e-9)]


@pytest.mark.parametrize(("k_u", "b", "p"), [(2, 9, 0.03), (6, 1, 0.2)])
def test_no_user_takes_part_twice_within_the_separation(k_u, b, p):
    """Every batch of long runs on a co-authorship-like graph."""
    graph = bound_contributions(papers(), k_u, seed=b)
    sets, scheme = user_sets(graph), MultiAttribution(300, b, p, k_u)
    drawn = batches(scheme, graph, (b, k_u, 0, 9))
    assert sum(map(len, drawn)) > 0
    last = {}
    for step, batch in enumerate(drawn):
        users = set().union(*(sets[e] for e in batch), set())
        for user in users:
            assert step - last.get(user, -b) >= b
            assert sum(user in sets[e] for e in batch) <= k_u
            last[user] = step


def test_neighborhoods_against_sets(monkeypatch):
    monkeypatch.setattr(graphs, "_PAIRS_AT_ONCE", 50)  # many chunks
    graph = papers(80, 30, seed=3)
    sets = user_sets(graph)
    exact = [sum(bool(a & b) for b in sets) for a in sets]
    np.testing.assert_array_equal(graphs.neighborhood_sizes(graph), exact)


def test_one_user_an_example_is_what_the_scheme_says():
    """`from_batch_size` and the graph agree where every example has a user of its own, with phantoms."""
    graph = from_edges(np.arange(500), np.arange(500), dataset_size=500)
    sizes = dict(batch_size=7.0, min_separation=3, examples_per_user=2)
    p = attribution.find_sampling_probability(graph, **sizes)
    scheme = MultiAttribution.from_batch_size(dataset_size=500, iterations=9, **sizes)
    np.testing.assert_allclose(p, scheme.sampling_probability, rtol=1e-9)
