"""Generalised DP-SGD: whole terms of s records are clipped rather than examples (arXiv 2212.05796).

A round has m terms. A term is the mean gradient of s records, or the path of an inner optax optimizer through
them, from the current parameters and from nothing else. Terms are clipped to norm C and summed on the integer
grid, with noise of standard deviation 2 C sigma: replacing records that are in k terms moves the sum by at
most 2 k C. Only noisy sums leave a round.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxacct.accountants.tradeoff.generalized_dpsgd.participation import SAMPLING
from jaxacct.accountants.tradeoff.plan import GeneralPlan
from jaxacct.common import validate as _validate
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.schemes import Poisson
from jaxacct.strategies import BandedToeplitz

from ..batches.sampler import Replayed, make_generator
from ..clipping.ghost import choose
from ..clipping.grid import Grid
from ..clipping.per_example import clipped_gradient_sum, global_norm
from ..clipping.sums import ClippedSum, check_real
from ..models.loss import as_loss, numbered
from ..optimizers import Privatizer, privatize
from ..run.loop import Run
from .protocol import Procedure, Request, Result
from .step import PrivateStep, make_step
from .stored import stored


def mean_gradient_term(loss: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return the term whose gradient is the mean gradient of its records (equation 4)."""

    def term(params, rows):
        return jnp.mean(jax.vmap(lambda row: loss(params, row))(rows))

    return term


def optimizer_term(
    loss: Callable[..., jax.Array], inner: optax.GradientTransformation
) -> Callable[..., jax.Array]:
    """Return the term whose gradient is `params - params after s steps of inner` (equation 2).

    The inner state begins anew in every term, so no record of another round, or of another term, is in it.
    """

    def moved(params, rows):
        def step(carry, row):
            here, state = carry
            gradient = jax.grad(loss)(here, row)
            updates, state = inner.update(gradient, state, here)
            return (optax.apply_updates(here, updates), state), None

        (last, _), _ = jax.lax.scan(step, (params, inner.init(params)), rows)
        return jax.tree.map(lambda a, b: a - b, params, last)

    return _term_of(moved)


def _term_of(update: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Return the term whose gradient is `update(params, rows)`, without derivatives of it."""

    def term(params, rows):
        way = jax.lax.stop_gradient(update(params, rows))
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(way), strict=True)
        return sum((jnp.sum(p * w) for p, w in pairs), jnp.zeros(()))

    return term


def _sum_of_terms(update, params, batch, grid: Grid) -> ClippedSum:
    """Return the sum over the rows (m, ...) of a batch of `update(params, row)`, each clipped on a grid."""
    mask = jnp.ones(np.shape(jax.tree.leaves(batch)[0])[0], bool)
    return clipped_gradient_sum(_term_of(update), params, batch, mask, grid=grid, microbatch_size=1)


def epoch_batches(
    key, dataset_size: int, num_microbatches: int, microbatch_size: int, sampling: str
) -> np.ndarray:
    """Return (R, m, s) int32: the records of one epoch by round and term, uniform and exact.

    Args:
      key: 4 words of 32 bits, or a NumPy generator that continues from epoch to epoch.
      dataset_size: N.
      num_microbatches: m terms a round.
      microbatch_size: s records a term.
      sampling: "shuffling" (every record once) or "subsampling" (a fresh m s-subset each round).
    """
    N = _validate.positive_integer("dataset_size", dataset_size)
    m = _validate.positive_integer("num_microbatches", num_microbatches)
    s = _validate.positive_integer("microbatch_size", microbatch_size)
    _validate.one_of("sampling", sampling, SAMPLING)
    if N % (m * s):
        raise ValueError(
            f"num_microbatches x microbatch_size must divide dataset_size, got {m} x {s} for {N}"
        )
    generator = key if isinstance(key, np.random.Generator) else make_generator(key)
    rounds = N // (m * s)
    if sampling == "shuffling":
        order = generator.permutation(N)
    else:
        # Shuffled, so that the term of a record within its round is uniform.
        order = np.concatenate(
            [generator.choice(N, m * s, replace=False, shuffle=True) for _ in range(rounds)]
        )
    return order.reshape(rounds, m, s).astype(np.int32)


def private_rounds(plan: GeneralPlan, *, clip_norm: float, key=None) -> Privatizer:
    """Return the noise of a certified plan's rounds: `(sum of clipped terms + 2 C sigma N(0, I)) / m`."""
    if not isinstance(plan, GeneralPlan):
        raise ValueError(f"plan must be a GeneralPlan, got {type(plan).__name__}")
    if not plan.certified:
        raise ValueError("plan must be certified; its noise does not give its epsilon at its delta")
    # Describes the noise alone: white, for this number of rounds. The plan is what is accounted for.
    white = Mechanism(Poisson(plan.iterations, 1.0), BandedToeplitz.square_root(1), 2 * plan.sigma)
    return privatize(white, clip_norm=clip_norm, expected_batch_size=plan.num_microbatches, key=key)


def make_round(
    plan: GeneralPlan,
    loss: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float,
    inner: optax.GradientTransformation | None = None,
    key=None,
    terms_at_once: int | None = None,
) -> PrivateStep:
    """Return one round: `step(state, rows (m, s, ..), mask (m,)) -> (state, private info)`, jitted.

    The outer optimizer gets noisy sums only, so its state is post-processing. The `inner` one goes through
    the records of each term; the mean gradient by default.
    """
    private = private_rounds(plan, clip_norm=clip_norm, key=key)
    term = mean_gradient_term if inner is None else lambda each: optimizer_term(each, inner)
    return make_step(as_loss(loss).wrapped(term), private, optimizer, microbatch_size=terms_at_once)


def _train(plan: GeneralPlan, request: Request) -> Result:
    """Return the procedure of a `GeneralPlan`: its sampler, its terms, its noise."""
    options = request.options
    if options.inner is not None and plan.run.clip == "individual":
        raise ValueError("inner must not be given for individual clipping: a term is one gradient")
    rounds, rows = request.steps(plan.iterations), request.rows(plan.dataset_size)
    clip_norm = request.given_clip_norm()
    loss, params = request.functional()
    sampler_key, noise_key = request.keys()
    step = make_round(
        plan,
        loss,
        request.given_optimizer(),
        clip_norm=clip_norm,
        inner=options.inner,
        key=noise_key,
        terms_at_once=options.microbatch_size,
    )
    batch = _Terms(numbered(loss, rows), plan.num_microbatches, plan.microbatch_size)
    empty, _ = batch.take(np.zeros(0, np.int64))
    return Run(
        plan=plan,
        request=request,
        start=lambda: step.init(params),
        step=step,
        batch=batch,
        steps=rounds,
        clip_norm=clip_norm,
        sampler_key=sampler_key,
        source_at=lambda key, drawn: Replayed(lambda generator: _rounds(plan, generator), key, drawn),
        clipping=choose(step.loss.at(0), params, empty, grid=step.private.grid),  # as every step chooses
    ).take()


PROCEDURE = Procedure(
    _train, frozenset("optimizer clip_norm inner steps microbatch_size wrt loss_key average".split())
)


@dataclass(frozen=True)
class _Terms:
    """The records of a round as `(m, s, ..)` terms, and their mask."""

    rows: Any
    number: int
    size: int

    def take(self, indices):
        flat = self.rows.take(indices, self.number * self.size)
        shape = self.number, self.size
        return jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), flat), np.ones(shape[0], bool)


def _rounds(plan: GeneralPlan, generator: np.random.Generator) -> Iterator[np.ndarray]:
    for _ in range(plan.num_epochs):
        yield from epoch_batches(
            generator, plan.dataset_size, plan.num_microbatches, plan.microbatch_size, plan.sampling
        )


def clip_by_l2_norm(tree, clip_norm: float) -> Any:
    """Return a pytree scaled to a global norm of at most `clip_norm`; training clips on the grid instead.

    What is returned has this norm with its roundings; an update that is not finite, or that is too long all
    the same, counts as zero.

    Args:
      tree: pytree of arrays of real floating-point numbers.
      clip_norm: C, above 0.

    Raises:
      ValueError: bad arguments.
    """
    _validate.positive_number("clip_norm", clip_norm)
    tree = jax.tree.map(jnp.asarray, tree)
    check_real("tree", tree)
    leaves = jax.tree.leaves(tree)
    with jax.enable_x64(True):
        # Rounding of each entry, and of a norm.
        room = max((float(jnp.finfo(leaf.dtype).eps) for leaf in leaves), default=0.0)
        room += sum(leaf.size for leaf in leaves) * 2.0**-52
        norm = global_norm(tree)
        scale = jnp.where(norm <= clip_norm, 1.0, clip_norm / norm * (1 - room))

        def clipped(leaf):
            smallest = float(jnp.finfo(leaf.dtype).tiny)  # below it rounding is not relative
            scaled = leaf.astype(jnp.float64) * scale
            return jnp.where(jnp.abs(scaled) < smallest, 0.0, scaled).astype(leaf.dtype)

        nothing = functools.partial(jax.tree.map, jnp.zeros_like)
        return stored(jax.tree.map(clipped, tree), lambda kept: global_norm(kept) <= clip_norm, nothing)


class RoundInfo(NamedTuple):
    """Private: no guarantee covers it.

    Attributes:
      norms: (m,) float32: of terms before clipping.
    """

    norms: jax.Array
    clipped_fraction: jax.Array


def aggregate(per_group_updates, clip_norm: float, mode: str):
    """Return `U`, the sum of terms, each clipped to `clip_norm`, on the integer grid of training, as float32.

    Private: no noise is added.

    Args:
      per_group_updates: pytree of arrays (m, ...); an update is one vector over all leaves.
      clip_norm: C.
      mode: "batch" (m = 1), "individual" or "mixed".

    Raises:
      ValueError: bad arguments, or updates that are not finite.
    """
    _validate.one_of("mode", mode, ("individual", "batch", "mixed"))
    leaves = jax.tree.leaves(per_group_updates)
    numbers = {np.shape(leaf)[0] if np.ndim(leaf) else None for leaf in leaves}
    if len(numbers) != 1 or None in numbers:
        raise ValueError("per_group_updates must be arrays with one common leading axis, of terms")
    if mode == "batch" and numbers != {1}:
        raise ValueError(f"mode must not be batch for {numbers.pop()} terms: it has one a round")
    like = jax.tree.map(lambda leaf: jnp.zeros(np.shape(leaf)[1:]), per_group_updates)
    found = _sum_of_terms(lambda _, row: row, like, per_group_updates, Grid(clip_norm, _BITS))
    if not bool(jnp.isfinite(found.norms).all()):
        raise ValueError("per_group_updates must be finite, got NaN or infinity")
    return found.total.scaled(1.0)


def private_round_update(
    key, params, batch, inner_fn: Callable[..., Any], clip_norm: float, sigma: float, *, diagnostics=False
):
    """Return `(U + 2 C sigma N(0, I)) / m` of one round, and None or `RoundInfo`.

    The round of a `GeneralPlan`, for a loop of your own that counts rounds.

    Args:
      key: (8,) uint32, secret, of this round alone: two rounds with one key can be subtracted.
      params: w, what has been released so far.
      batch: pytree of arrays (m, s, ...).
      inner_fn: `inner_fn(params, records (s, ...)) -> update`, a pytree like `params`, without memory of
        earlier calls.
      clip_norm: C.
      sigma: noise std over 2 C.
      diagnostics: return `RoundInfo` as well: private.
    """
    terms = np.shape(jax.tree.leaves(batch)[0])[0]
    white = Mechanism(Poisson(1, 1.0), BandedToeplitz.square_root(1), 2 * sigma)
    private = privatize(white, clip_norm=clip_norm, expected_batch_size=terms, key=key)
    found = _sum_of_terms(inner_fn, params, batch, private.grid)
    released, _ = private.update(found.total, private.init(params))
    return released, RoundInfo(found.norms, jnp.mean(found.norms > clip_norm)) if diagnostics else None


def outer_update(params, released, stepsize: float):
    """Return the parameters after a step, `w - stepsize * released`; post-processing, no privacy cost.

    Args:
      params: w, a pytree of arrays.
      released: first result of `private_round_update`, a pytree like `params`.
      stepsize: eta, above 0.
    """
    _validate.positive_number("stepsize", stepsize)
    return jax.tree.map(lambda w, u: w - stepsize * u, params, released)


_BITS = 20  # of the grid of `aggregate`, where no noise determines it
