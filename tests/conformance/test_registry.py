"""Every registered scheme, from `SCHEMES`: what is drawn, trained and computed follows one distribution.

`problems` says in sentences what a scheme lacks. Small ones are made from plain numbers, so that a new scheme
is examined without a line in any table. Statistical tests have a false alarm of 1e-6 each.
"""

import math
import re
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
import pytest
from scipy import stats

from jaxacct import BandedToeplitz, CustomScheme, Mechanism, Poisson, privacy_loss
from jaxacct.schemes import SCHEMES, FixedOrder, MultiAttribution
from jaxacct.schemes.protocol.numbers import Numbers
from tests.conformance.test_schemes import MEMBERS, typical_side
from tests.draws import trained
from tests.oracles import enumeration
from tests.oracles.chi_square import FALSE_ALARM, chi_square_p_value

PAGES = (Path(__file__).parents[2] / "jaxacct/proofs").glob("*.md")
PROOFS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
# Schemes without what is examined here, by class, so that no other one is excused.
NOT_RANDOM = (FixedOrder,)  # tests/schemes/test_fixed_order.py
OF_GRAPHS = (MultiAttribution,)  # whose batches need users: tests/train/batches/test_attribution.py
UNITS, RUNS = 20_000, 1000


def made(kind):
    """A scheme of five steps in which an example participates 1.25 times, or 0.5 times for users."""
    if kind is CustomScheme:  # which has no other numbers than its table
        return MEMBERS["custom"][1]
    needed = {"examples_per_user": 2, "truncate_to": 12}
    options = {name: value for name, value in needed.items() if name in kind.options}
    options |= {"min_separation": 2} if "separation" in kind.options else {}
    batch_size = 4.0 if "examples_per_user" in options else 10.0
    return kind.from_numbers(Numbers(5, 2, dataset_size=40, batch_size=batch_size, **options))


def as_enumerated(scheme):
    """The scheme, or its table, whose vectors are enumerated; None where neither can be."""
    if enumeration.is_known(scheme):
        return scheme
    table = getattr(scheme, "table", None)
    if table is None:
        return None
    join = table.join[:, 0] if table.num_left == 1 else table.join
    return CustomScheme(join.tolist(), table.lockout.tolist(), table.turns, table.start.tolist(), table.keep)


def follows(drawn, distribution) -> bool:
    drawn = np.asarray(drawn).astype(int)
    seen = {tuple(row) for row in np.unique(drawn, axis=0).tolist()}
    return seen <= set(distribution) and chi_square_p_value(drawn, distribution) > FALSE_ALARM


def are_independent(scheme) -> bool:
    """Whether the vectors of two examples, alone in a data set, are: chi-square over all pairs of vectors."""
    codes = np.stack([trained(scheme, 2, run) for run in range(RUNS)]) @ (1 << np.arange(scheme.iterations))
    numbers = np.bincount(codes.ravel(), minlength=1 << scheme.iterations)
    common = np.flatnonzero(numbers >= RUNS / 5)  # the others are one cell
    cells = np.full(numbers.size, common.size)
    cells[common] = np.arange(common.size)
    joint = np.zeros((common.size + 1,) * 2)
    np.add.at(joint, tuple(cells[codes].T), 1)
    joint = joint[joint.sum(axis=1) > 0][:, joint.sum(axis=0) > 0]
    return stats.chi2_contingency(joint).pvalue > FALSE_ALARM


def problems(kind) -> list[str]:
    """What a registered scheme lacks, or does otherwise than it says; empty where it conforms."""
    name, found = kind.name, []
    if not any(re.search(rf"`{kind.__name__}`", text) for text in PROOFS.values()):
        found.append(f"no page of jaxacct/proofs names {kind.__name__}, the class of the scheme {name!r}")
    if kind in NOT_RANDOM:
        return found
    scheme = made(kind)
    reference = as_enumerated(getattr(scheme, "untruncated", scheme))
    if reference is None:
        return [*found, f"scheme {name!r} has no `table`, and tests/oracles/enumeration.py does not have it"]
    law = enumeration.pattern_distribution(reference)
    patterns, weights = enumeration.arrays(law)
    if not follows(jax.jit(lambda key: scheme.draw_participation(key, UNITS))(jax.random.key(1)), law):
        found.append(f"the verifier's draws of {name!r} are not of its distribution: draw_participation")
    if not np.allclose(scheme.participation_probabilities(), weights @ (patterns > 0), atol=1e-12):
        found.append(f"participation_probabilities of {name!r} are not those of its distribution")
    if scheme.side_information is None:
        none = math.log(max(weights[~patterns.any(axis=1)].sum(), 1e-300))
        if scheme.log_probability_of_none() > max(none, -600) + 1e-9:
            found.append(f"log_probability_of_none of {name!r} is above that of its distribution")
    strategy = BandedToeplitz.square_root(scheme.min_separation)
    outputs = np.random.default_rng(0).normal(0.5, 1.5, (8, scheme.iterations))
    with jax.enable_x64(True):
        ours = privacy_loss(Mechanism(scheme, strategy, 0.9), outputs, typical_side(scheme, 8))
    exact = enumeration.log_ratio(reference, strategy.coefficients, 0.9, outputs)
    if not np.allclose(ours, exact, rtol=1e-10, atol=1e-10):
        found.append(f"the likelihood of {name!r} is not that of its distribution: log_likelihood_ratios")
    if kind in OF_GRAPHS:
        return found
    one = as_enumerated(getattr(scheme, "one", getattr(scheme, "untruncated", scheme)))
    if not follows(trained(scheme, UNITS, 0), enumeration.pattern_distribution(one)):
        found.append(f"the trainer's batches of {name!r} are not of its distribution: batches")
    if scheme.others_are_independent and not are_independent(scheme):
        found.append(f"two examples in the trainer's batches of {name!r} are not independent: batches")
    return found


@pytest.mark.parametrize("name", SCHEMES)
def test_a_registered_scheme_conforms(name):
    assert not problems(SCHEMES[name])


class Less(Poisson, abstract=True):
    """Poisson sampling whose parts may be those of another probability."""

    verified: ClassVar[float] = 1.0
    computed: ClassVar[float] = 1.0
    trained: ClassVar[float] = 1.0

    def times(self, factor):
        return Poisson(self.iterations, factor * self.sampling_probability)

    def draw_participation(self, key, num_samples):
        return self.times(self.verified).draw_participation(key, num_samples)

    def log_likelihood_ratios(self, *given, **named):
        return self.times(self.computed).log_likelihood_ratios(*given, **named)

    def batches(self, dataset_size, generator, graph=None):
        return self.times(self.trained).batches(dataset_size, generator)


class Together:
    """Batches that hold both examples of a couple or none."""

    def __init__(self, batches):
        self.couples = batches

    def draw(self, step, generator):
        couples = self.couples.draw(step, generator)
        return np.concatenate([2 * couples, 2 * couples + 1])


class Couples(Poisson):
    """Poisson sampling of couples of examples."""

    name = "couples"

    def batches(self, dataset_size, generator, graph=None):
        return Together(super().batches(dataset_size // 2, generator))


def less(name: str, **parts):
    """A scheme of this name with other parts than its own."""
    return type(name.title().replace("-", ""), (Less,), {"name": name, "__doc__": "Planted."} | parts)


MISTAKES = {
    less("half-verified", verified=0.5): "verifier's draws",
    less("half-computed", computed=0.5): "the likelihood",
    less("less-trained", trained=0.9): "trainer's batches of",
    Couples: "two examples in",
    less("without-table", table=None): "has no `table`",
}


@pytest.mark.parametrize("kind", MISTAKES, ids=lambda kind: kind.name)
def test_a_planted_scheme_is_refused_in_a_sentence(kind, monkeypatch):
    """Registered for the time of this test, in no table of tests and on no page of proofs."""
    monkeypatch.setitem(SCHEMES, kind.name, kind)
    page, mistake = problems(SCHEMES[kind.name])
    assert page.startswith(f"no page of jaxacct/proofs names {kind.__name__}, ")
    assert MISTAKES[kind] in mistake and repr(kind.name) in mistake
