"""Loops over blocks of samples that stop together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct import BandedToeplitz, BMinSep, Mechanism
from jaxacct.kernels import loops, programs
from jaxacct.kernels.loops import any_left, in_one_kernel, samples_together
from jaxacct.proposals.replicas import replica_proposal


def halve(counts):
    """Turns until every count is zero, each sample's own number of turns, and the counts."""

    def turn(state):
        turns, own, counts = state
        return turns + 1, own + (counts > 0), counts // 2

    start = (0, jnp.zeros_like(counts), counts)
    return jax.lax.while_loop(lambda state: any_left(state[2] > 0), turn, start)


def test_blocks_run_until_the_last_is_done():
    counts = jnp.asarray([[0, 1, 2], [0, 0, 0], [900, 3, 1]])
    turns, own, left = jax.jit(jax.vmap(halve))(counts)
    np.testing.assert_array_equal(turns, [10, 10, 10])
    np.testing.assert_array_equal(own, [[0, 1, 2], [0, 0, 0], [10, 2, 1]])
    assert not left.any()
    nested = jax.vmap(jax.vmap(halve))(counts[:, None])
    np.testing.assert_array_equal(nested[1][:, 0], own)
    assert [int(halve(row)[0]) for row in counts] == [2, 0, 10]


def test_no_copy_of_the_state_a_turn(key):
    """Replicas of several blocks at once: no select over the counts inside the loop."""
    mechanism = Mechanism(BMinSep(60, 4, 0.1), BandedToeplitz.square_root(4), 1.0)
    proposal = replica_proposal(mechanism, 2, 1.0)
    draw = functools.partial(
        proposal.draw_block,
        scheme=mechanism.scheme,
        strategy=mechanism.strategy,
        sigma=1.0,
        tables=proposal.tables(),
        dtype=jnp.float32,
    )
    keys = jax.random.split(key, 3)
    jaxpr = jax.make_jaxpr(jax.vmap(lambda k: draw(k)))(keys)
    loops = [e for e in jaxpr.eqns if e.primitive.name == "while"]
    assert loops
    for loop in loops:
        assert all(v.aval.ndim == 0 for v in loop.params["cond_jaxpr"].jaxpr.outvars)
        whole = [
            e
            for e in loop.params["body_jaxpr"].jaxpr.eqns
            if e.primitive.name == "select_n" and e.outvars[0].aval.size >= 3 * 128 * 60
        ]
        assert not whole
    together = jax.jit(jax.vmap(lambda k: draw(k)))(keys)
    alone = jax.jit(lambda k: draw(k))
    for index, one in enumerate(keys):
        np.testing.assert_allclose(together.loss[index], alone(one).loss, rtol=1e-4, atol=1e-5)


def mixed(table, rows, unread, one):
    """A loop over rows that looks numbers up, and an array that nothing reads."""
    del unread

    def step(total, row):
        total = total * one + table[row % 4]
        return total, total

    return jax.lax.scan(step, jnp.zeros(3), rows)


def test_one_kernel_is_the_function(x64, monkeypatch):
    """Of constants, which XLA moves into the call, of what nothing reads, mapped, and with one turn alone.

    The first two stopped the process: XLA's emitter has no place for an array that its kernel does not read.
    """
    table, rows = np.array([1.0, 2.0, 4.0, 8.0]), np.arange(27).reshape(9, 3)
    given = table, rows, np.ones(5), 0.5
    expected = jax.tree.leaves(mixed(jnp.asarray(table), *given[1:]))
    kernel = in_one_kernel(mixed)
    mapped = jax.vmap(kernel, (None, 0, None, None))
    with loops.from_arguments(True):
        constants = jax.jit(
            lambda one: kernel(jnp.asarray(table) * 1.0, jnp.asarray(rows) + 0, jnp.ones(5), one)
        )(0.5)
        both = jax.jit(lambda *given: (kernel(*given), mapped(given[0], given[1][None], *given[2:])))(*given)
        alone = jax.jit(lambda rows, one: kernel(table, rows, 0.0, one))(rows[:1], 0.5)
        program = jax.jit(kernel).lower(*given).as_text()
        assert ("xla_cpu_small_call" in program) == (jax.default_backend() == "cpu")
        # XLA refused some of blocks side by side, and printed that it had; nor is a later XLA asked for any.
        of_blocks = jax.jit(mapped).lower(given[0], given[1][None], *given[2:]).as_text()
        monkeypatch.setattr(loops, "_TRIED", False)
        untried = jax.jit(lambda *given: kernel(*given)).lower(*given).as_text()
        assert "xla_cpu_small_call" not in of_blocks + untried
    for found in (constants, both[0], jax.tree.map(lambda one: one[0], both[1])):
        for ours, theirs in zip(jax.tree.leaves(found), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-15)
    np.testing.assert_array_equal(alone[1], expected[1][:1])


def test_programs_of_users_have_no_kernels():
    """They may hold the batch sizes, large constants: XLA stopped the process."""
    kernel = in_one_kernel(mixed)
    table, rows = np.float32([1, 2, 4, 8]), np.arange(18000, dtype=np.int32).reshape(6000, 3)
    own = programs.compiled(static=0)(lambda *given: kernel(*given)[1])

    def held(one):
        return own(jnp.asarray(table), jnp.asarray(rows), 0.0, one)

    for user in (jax.jit(held), jax.jit(lambda one: held(1.0))):
        assert "xla_cpu_small_call" not in user.lower(1.0).as_text()
        np.testing.assert_array_equal(user(1.0), np.cumsum(table[rows % 4], axis=0))
    program = own.lower(table, rows, 0.0, 1.0).as_text()
    assert ("xla_cpu_small_call" in program) == (jax.default_backend() == "cpu")


def test_what_a_compiler_cannot_make_a_kernel_of_is_done_without(monkeypatch):
    """A Fourier transform is refused in one; the program is made again, and later ones have no kernels."""
    monkeypatch.setitem(loops._kernels, "made", True)

    @programs.compiled(static=0)
    def transformed(x):
        return in_one_kernel(lambda x: jax.lax.fori_loop(0, 9, lambda _, x: jnp.fft.fft(x).real / 4, x))(x)

    x = jnp.arange(8.0)
    expected = x
    for _ in range(9):
        expected = np.fft.fft(expected).real / 4
    if jax.default_backend() == "cpu":
        np.testing.assert_allclose(transformed(x), expected, rtol=1e-5, atol=1e-5)
        assert not loops.kernels_made() and not loops.give_up_kernels()


def test_samples_of_all_blocks_together():
    """Arrays with and without blocks, with one column, numbers: as block after block."""
    seen = []

    @samples_together
    def weighted(values, column, one):
        seen.append(values.shape)
        return (values * column * one).sum(axis=0), values[0] + column[0] + one

    values, columns = np.arange(24.0).reshape(2, 3, 4), np.array([[[1.0], [2], [3]], [[4], [5], [6]]])
    for axes in ((0, 0, 0), (0, None, None), (None, 0, 0)):
        ones = np.array([2.0, 5.0])
        given = [
            one if axis == 0 else one[0] for one, axis in zip((values, columns, ones), axes, strict=True)
        ]
        found = jax.vmap(weighted, axes)(*given)
        for block in range(2):
            here = [one[block] if axis == 0 else one for one, axis in zip(given, axes, strict=True)]
            for ours, theirs in zip(found, weighted(*here), strict=True):
                np.testing.assert_allclose(ours[block], theirs)
    assert (3, 8) in seen
