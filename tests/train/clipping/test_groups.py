"""Clipping by group: all groups together within the clip norm, ghost and per_example the same, partitions."""

import functools
import json
import math
from fractions import Fraction
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.train.plans import plan
from tests.train.test_command import command
from tests.train.test_loop import PARAMS, flat, run
from train.clipping import per_example as clipping
from train.clipping.grid import Grid
from train.clipping.groups import ClipGroups, Groups, partition
from train.individual import IndividualAccounting
from train.procedures.protocol import Result
from train.procedures.step import CLIPPINGS

pytestmark = pytest.mark.usefixtures("shared_programs")

GRID = Grid(2.0, 20)
# Four groups of unequal norms: a vector, two matrices of which one is used by one product, and a number.
SIZES = {"a": (3,), "b": (5, 8), "c": (2, 2), "d": ()}
GROUPS = Groups((0, 1, 2, 3), (Fraction(1, 4), Fraction(1, 2), Fraction(1, 5), Fraction(1, 20)))
NORMS = 2.0 * np.sqrt([float(share) for share in GROUPS.shares])


def planted(params, example):
    """Its gradient is what the example says: anything can be planted in any group."""
    written = sum(jnp.sum(params[name] * example[name]) for name in "acd")
    return written + jnp.sum((example["left"] @ params["b"]) * example["right"])


@functools.cache
def summed(kind: str, wrong: bool = False):
    """The program; `wrong` gives every group the whole clip norm."""
    groups = GROUPS
    if wrong:
        groups = Groups((0, 1, 2, 3), (Fraction(1, 4),) * 4)
        object.__setattr__(groups, "shares", (Fraction(1),) * 4)
    params = {name: jnp.zeros(shape) for name, shape in SIZES.items()}
    options = dict(grid=GRID, groups=groups, microbatch_size=2)
    return jax.jit(functools.partial(CLIPPINGS[kind], planted, params, **options))


def example(a=0.0, b=0.0, c=0.0, d=0.0):
    """One whose gradient's entries in a group are all this number, in float32 factors where it has some."""
    left, right = np.zeros((3, 5), np.float32), np.zeros((3, 8), np.float32)
    left[0], right[0] = 1.0, b
    return {
        **{name: np.full(SIZES[name], value, np.float32) for name, value in (("a", a), ("c", c), ("d", d))},
        "left": left,
        "right": right,
    }


def batch_of(*rows):
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def by_group(total) -> list[int]:
    """Squares of the sum in grid units, exactly."""
    units = total.units()
    return [sum(int(n) ** 2 for n in units[name].ravel()) for name in SIZES]


def moved(kind: str, row, wrong: bool = False) -> list[int]:
    """What an example changes of the sum with another one, by group."""
    batch = batch_of(row, example(0.3, 0.1, -0.2, 0.01))
    both, without = (summed(kind, wrong)(batch, np.array([here, True])).total for here in (True, False))
    change = jax.tree.map(lambda x, y: np.asarray(x, np.int64) - np.asarray(y, np.int64), both, without)
    return by_group(change)


@pytest.mark.parametrize("kind", CLIPPINGS)
def test_an_example_moves_the_sum_by_at_most_the_clip_norm(kind):
    """Long in every group at once, which wins if each may have all of C; tiny, huge or poison in one."""
    long = moved(kind, example(1e3, 1e9, 1e20, 1e30))
    assert 0.99 * 4**GRID.bits < sum(long) <= 4**GRID.bits
    for square, share in zip(long, GROUPS.shares, strict=True):
        # Ghost pays for what the sum of others may be rounded to, here less than one unit an entry.
        assert 0.99 * share * 4**GRID.bits < square <= (math.sqrt(share) * 2**GRID.bits + 7) ** 2
    assert sum(moved(kind, example(1e3, 1e9, 1e20, 1e30), wrong=True)) > 3 * 4**GRID.bits
    for value in (0.0, 1e-42, 1e-20, 1e-3, 1e12, 3e38):
        for name in "abcd":
            assert sum(moved(kind, example(**{n: 5.0 for n in "abcd"} | {name: value}))) <= 4**GRID.bits
    for poison in (np.inf, -np.inf, np.nan):
        for name in "abcd":
            assert moved(kind, example(**{n: 5.0 for n in "abcd"} | {name: poison})) == [0, 0, 0, 0]


@pytest.mark.parametrize("wrong", [1, 2])
def test_the_check_is_of_every_group(wrong, monkeypatch):
    """A norm that came out wrong in one group only: what it lets through is refused, not summed."""
    real = clipping.global_norm
    monkeypatch.setattr(
        clipping, "global_norm", lambda part: real(part) * (0.75 if part[0].ndim == wrong else 1)
    )
    gradient = {"a": np.full((1, 4), 3.0, np.float32), "b": np.full((1, 2, 2), 3.0, np.float32)}
    halves = Groups((0, 1), (Fraction(1, 2),) * 2)
    run = jax.jit(clipping.clip_rows_to_grid, static_argnums=(1, 2))
    kept, counts, *_ = run(gradient, GRID, halves)
    assert not kept and not any(np.any(leaf) for leaf in counts.values())


def test_both_kinds_of_clipping_against_numpy():
    """Groups that are clipped beside groups that are not; what is logged counts an example once."""
    generator = np.random.default_rng(0)
    rows = [
        example(*generator.normal(size=4) * scale) for scale in ([1e-3] * 4, [5, 1e-3, 1e-3, 1e-3], [3] * 4)
    ]
    mask, batch = np.array([True, True, True, False]), batch_of(*rows, rows[0])
    gradients = [np.float64(batch[n]) if n != "b" else np.einsum("itk,itn->ikn", *map(
        np.float64, (batch["left"], batch["right"]))) for n in SIZES]  # fmt: skip
    norms = np.array([np.sqrt(np.sum(g.reshape(4, -1) ** 2, axis=1)) for g in gradients])
    long = norms > NORMS[:, None]
    assert long.any(0).tolist() == [False, True, True, False] and not long.all(0)[1]
    for kind in CLIPPINGS:
        found = summed(kind)(batch, mask)
        for name, gradient, norm, most in zip(SIZES, gradients, norms, NORMS, strict=True):
            weights = mask * np.minimum(1, most / norm)
            expected = np.tensordot(weights, gradient, 1)
            np.testing.assert_allclose(found.total.scaled(1.0)[name], expected, rtol=1e-4, atol=8 * GRID.unit)
        np.testing.assert_allclose(found.norms, mask * np.sqrt((norms**2).sum(0)), rtol=1e-6)
        assert found.clipped_fraction == pytest.approx(2 / 3)


def test_groups_of_another_model_are_refused():
    params = {name: jnp.zeros(shape) for name, shape in SIZES.items()}
    options = dict(params=params, batch=batch_of(example(), example()), mask=np.ones(2, bool))
    for sum_of in CLIPPINGS.values():
        with pytest.raises(ValueError, match="groups must be of 4 parameters, got of 1"):
            run = functools.partial(sum_of, planted, **options, grid=GRID, groups=Groups.one(1))
            jax.eval_shape(run)
    with pytest.raises(
        ValueError, match="clip_groups must leave each group a norm of at least 1, one unit of"
    ):
        GROUPS.limits(Grid(1.0, 0))


def test_limits_add_up_exactly():
    """In integers, whatever the shares; more than the clip norm is refused however little it is."""
    for bits in (3, 20, 23):
        for number in (1, 3, 7, 60):
            limits = Groups(tuple(range(number)), (Fraction(1, number),) * number).limits(Grid(1.0, bits))
            assert 4**bits - number < sum(limits) <= 4**bits
    with pytest.raises(ValueError, match=r"shares must be positive and add up to at most 1, got 0\.5, 0\.5"):
        Groups((0, 1), (Fraction(1, 2), Fraction(1, 2) + Fraction(1, 2**80)))
    with pytest.raises(ValueError, match="shares must be positive"):
        Groups((0, 1), (Fraction(1), Fraction(0)))
    with pytest.raises(ValueError, match="groups must have parameters in each of 2 and in no other"):
        Groups((0, 0), (Fraction(1, 2),) * 2)


class Tied(nnx.Module):
    """Two layers and one of them again under another name; a kernel of its own, or the first layer's."""

    def __init__(self, tied: bool = False):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(11)])
        self.again = self.layers[1]
        self.other = nnx.Linear(2, 2, use_bias=False, rngs=rngs)
        if tied:
            self.other.kernel = self.layers[0].kernel
        self.adapted = nnx.LoRALinear(2, 2, lora_rank=1, rngs=rngs)


def of(model, given, norm=1.0, wrt=nnx.Param):
    params = nnx.state(model, wrt)
    return partition(params, given, norm)


def test_partitions():
    groups, kept = of(Tied(), "layer", 2.0)
    names = [each["parameters"] for each in kept]
    assert ["layers.10.bias", "layers.10.kernel"] in names and len(names) == 14
    assert sum((each["norm"] / 2) ** 2 for each in kept) == pytest.approx(1.0)
    leaves = jax.tree.leaves(nnx.state(Tied(), nnx.Param))
    assert [len(part) for part in groups.split(leaves)] == [len(part) for part in names]
    _, kept = of(
        Tied(), [nnx.PathContains("other"), nnx.OfType(nnx.LoRAParam), ...], wrt=(nnx.Param, nnx.LoRAParam)
    )
    assert [len(each["parameters"]) for each in kept] == [1, 2, 24]
    # What is frozen is in no group and has no share.
    _, kept = of(Tied(), "layer", wrt=nnx.LoRAParam)
    assert [each["parameters"] for each in kept] == [["adapted.lora.lora_a", "adapted.lora.lora_b"]]
    groups, kept = partition({"x": {"w": jnp.ones(2), "b": jnp.ones(())}, "y": [jnp.ones(1)]}, ClipGroups(
        [nnx.PathContains("x"), ...], (0.6, 0.8)), 1.0)  # fmt: skip
    assert groups.of == (0, 0, 1) and sum(groups.shares) == 1
    assert [each["norm"] for each in kept] == pytest.approx([0.6, 0.8])


def test_what_is_no_partition_is_refused():
    for given, said in [
        ("rows", "clip_groups must be 'layer' or a list of nnx filters, got 'rows'"),
        ([], "clip_groups must be 'layer' or a list of nnx filters, got []"),
        ([3.0], "clip_groups must be 'layer' or a list of nnx filters, got [3.0]"),
        ([nnx.PathContains("other")], "must select every parameter, adapted.bias is in no group"),
        ([nnx.PathContains("others"), ...], "select a trained parameter by each filter, number 0 has none"),
        (ClipGroups("layer", (1.0,)), "clip_groups must have filters where it has norms"),
        (ClipGroups([...], (1.0, 1.0)), "clip_groups must have a norm for each of 1 filters, got 2"),
        (ClipGroups([...], (1.1,)), "add up to at most 1^2, the clip norm's, got 1.1^2"),
        (ClipGroups([...], (0.0,)), "clip_groups norm must be"),
        (ClipGroups([...], cast(Any, 0.5)), "clip_groups norms must be a list of numbers, got 0.5"),
    ]:
        with pytest.raises(ValueError) as error:
            of(Tied(), given)
        assert said in str(error.value) and "\n" not in str(error.value)


def test_a_parameter_of_two_layers_counts_once():
    model = Tied(tied=True)
    for given in ("layer", [nnx.PathContains("layers"), ...]):
        groups, kept = of(model, given)
        names = [name for each in kept for name in each["parameters"]]
        assert (
            len(names)
            == len(set(names))
            == len(groups.of)
            == len(jax.tree.leaves(nnx.state(model, nnx.Param)))
        )


def test_a_run_is_bound_to_its_partition(tmp_path):
    two = [nnx.PathContains("w"), ...]
    ours = run(clip_groups=two, out=tmp_path / "run", steps=4)
    stored = json.loads((tmp_path / "run/run.json").read_text())
    half = pytest.approx(math.sqrt(0.5))
    assert stored["clip_groups"] == [
        {"norm": half, "parameters": ["w"]}, {"norm": half, "parameters": ["b"]}]  # fmt: skip
    again = run(clip_groups=two, out=tmp_path / "run", steps=4)
    np.testing.assert_array_equal(flat(ours.params), flat(again.params))
    for other in (None, ClipGroups(two, (0.6, 0.8))):
        with pytest.raises(ValueError, match="another partition of the parameters") as error:
            run(clip_groups=other, out=tmp_path / "run", steps=4, elastic=other is None)
        assert "its noise must not be used twice" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match="clip_groups must not be given with individual"):
        run(clip_groups=two, plan=plan("poisson", dataset_size=60), individual=IndividualAccounting())


def test_the_command_line(tmp_path, capsys, monkeypatch):
    seen = []

    def fit(plan, *, options, **_):
        seen.append(options.clip_groups)
        return Result(PARAMS, 1, {"accuracy": 0.5}, "guarantee")

    monkeypatch.setattr("train.command.fit", fit)
    plan("poisson", dataset_size=1440).save(tmp_path / "plan.json")
    given = ["--plan", tmp_path / "plan.json", "--out", tmp_path / "run"]
    assert command(capsys, *given, "--clip-groups", "layer")[0] == 0 and command(capsys, *given)[0] == 0
    assert seen == ["layer", None]
