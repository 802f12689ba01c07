"""Generalised DP-SGD: whole terms of s records are clipped rather than examples (arXiv 2212.05796).

A round has m terms; a term is what an inner procedure makes of s records, starting from the current
parameters and from nothing else: the mean gradient, or the way that an optax optimizer goes through them.
Terms are clipped to norm C and summed on the integer grid, and get noise of standard deviation 2 C sigma:
replacing records that are in k terms moves the sum by at most 2 k C. Only noisy sums ever leave a round.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxacct import BandedToeplitz, Mechanism, Poisson
from jaxacct.accountants.tradeoff.generalized_dpsgd.participation import SAMPLING
from jaxacct.accountants.tradeoff.plan import GeneralPlan
from jaxacct.common import validate as _validate

from . import by_device as _by_device
from .batches import sampler
from .batches.sampler import Batch, SamplerState
from .clipping.grid import Grid, GridSum
from .clipping.per_example import clip_to_grid
from .loop import (
    Procedure,
    Result,
    Wanted,
    as_rows,
    fit,
    functional,
    given_microbatch_size,
    given_optimizer,
    run_and_keep,
)
from .loss import as_loss, numbered
from .optimizers import Privatizer, privatize
from .step import PrivateStep, make_step


def mean_gradient_term(loss: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The term whose gradient is the mean gradient over its records (equation 4); of one record, its own."""

    def term(params, rows):
        return jnp.mean(jax.vmap(lambda row: loss(params, row))(rows))

    return term


def optimizer_term(
    loss: Callable[..., jax.Array], inner: optax.GradientTransformation
) -> Callable[..., jax.Array]:
    """The term whose gradient is how far `inner` moves through its records, in order (equation 2).

    `params - params after s steps`: for SGD with learning rate 1 the sum of gradients along the way. The
    inner state begins anew in every term, so no record of another round, or of another term, is in it.
    """

    def moved(params, rows):
        def step(carry, row):
            here, state = carry
            gradient = jax.grad(loss)(here, row)
            updates, state = inner.update(gradient, state, here)
            return (optax.apply_updates(here, updates), state), None

        (last, _), _ = jax.lax.scan(step, (params, inner.init(params)), rows)
        return jax.tree.map(lambda a, b: a - b, params, last)

    def term(params, rows):
        # Linear in params, so that its gradient is the movement itself and nothing flows through the steps.
        way = jax.lax.stop_gradient(moved(params, rows))
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(way), strict=True)
        return sum((jnp.sum(p * w) for p, w in pairs), jnp.zeros(()))

    return term


def epoch_batches(
    key, dataset_size: int, num_microbatches: int, microbatch_size: int, sampling: str
) -> np.ndarray:
    """(R, m, s) int32: the records of one epoch by round and term, uniform and exact (Fisher and Yates).

    Args:
      key: 4 words of 32 bits, or a NumPy generator that goes on from epoch to epoch.
      sampling: "shuffling" (every record once) or "subsampling" (a fresh m s-subset each round).
    """
    N = _validate.positive_integer("dataset_size", dataset_size)
    m = _validate.positive_integer("num_microbatches", num_microbatches)
    s = _validate.positive_integer("microbatch_size", microbatch_size)
    _validate.one_of("sampling", sampling, SAMPLING)
    if N % (m * s):
        raise ValueError(
            f"num_microbatches x microbatch_size must divide dataset_size, was {m} x {s} for {N}"
        )
    generator = key if isinstance(key, np.random.Generator) else make_generator(key)
    rounds = N // (m * s)
    if sampling == "shuffling":
        order = generator.permutation(N)
    else:
        # Shuffled as well: which term of the round a record goes to is uniform.
        order = np.concatenate(
            [generator.choice(N, m * s, replace=False, shuffle=True) for _ in range(rounds)]
        )
    return order.reshape(rounds, m, s).astype(np.int32)


def make_generator(key) -> np.random.Generator:
    """A counter-based generator from 4 secret words of 32 bits."""
    words = [int(word) for word in key]
    if len(words) != 4 or not all(0 <= word < 2**32 for word in words):
        raise ValueError(f"key must be 4 words of 32 bits, had {len(words)}")
    return np.random.Generator(
        np.random.Philox(key=words[0] | words[1] << 32 | words[2] << 64 | words[3] << 96)
    )


def private_rounds(plan: GeneralPlan, *, clip_norm: float, key=None) -> Privatizer:
    """The noise of a plan's rounds: `(sum of clipped terms + 2 C sigma N(0, I)) / m`, NaN after its last one.

    Args:
      plan: certified.
      clip_norm: C, of every term.
      key: (8,) uint32; by default `init` draws one from the operating system for every run. Only tests should
        fix it.
    """
    if not isinstance(plan, GeneralPlan):
        raise ValueError(f"plan must be a GeneralPlan, was {type(plan).__name__}")
    if not plan.certified:
        raise ValueError("plan must be certified; its noise does not give its epsilon at its delta")
    # Stands for the noise alone (white, for this many rounds); what is accounted for is the plan.
    white = Mechanism(Poisson(plan.rounds, 1.0), BandedToeplitz.square_root(1), 2 * plan.sigma)
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
    """One round: `step(state, rows (m, s, ..), mask (m,)) -> (state, private info)`, jitted.

    Args:
      loss: `loss(params, record) -> scalar` of one record.
      optimizer: the outer one; it sees noisy sums only, so its state is post-processing.
      inner: goes through the records of each term; the mean gradient by default.
      terms_at_once: terms whose updates are in memory at a time.
    """
    private = private_rounds(plan, clip_norm=clip_norm, key=key)
    term = mean_gradient_term if inner is None else lambda loss: optimizer_term(loss, inner)
    return make_step(as_loss(loss).wrapped(term), private, optimizer, microbatch_size=terms_at_once)


def fit_general(
    plan: GeneralPlan,
    model,
    loss: Callable[..., jax.Array],
    data,
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float,
    terms_at_once: int | None = None,
    **options,
) -> Result:
    """`train.loop.fit` for a `GeneralPlan`, `microbatch_size` by its better name `terms_at_once`.

    Raises:
      ValueError: as `fit`, and for a plan of another kind.
    """
    if getattr(plan, "training", None) != GeneralPlan.training:
        raise ValueError(f"plan must be a GeneralPlan, was {type(plan).__name__}")
    options |= dict(clip_norm=clip_norm, microbatch_size=terms_at_once)
    # Its `training` is an attribute of the class, which the protocol does not know.
    return fit(plan, model, loss, data, optimizer, **options)  # pyrefly: ignore[bad-argument-type]


def _train(plan: GeneralPlan, wanted: Wanted) -> Result:
    """Whole terms are clipped: the procedure of a `GeneralPlan`. Its sampler, its terms, its noise."""
    if wanted.clip not in (None, plan.run.clip):
        raise ValueError(f"clip must be the plan's {plan.run.clip}, was {wanted.clip!r}")
    if wanted.inner is not None and plan.run.clip == "individual":
        raise ValueError("inner must not be given for individual clipping: a term is one gradient")
    rounds = plan.rounds if wanted.steps is None else _validate.positive_integer("steps", wanted.steps)
    if rounds > plan.rounds:
        raise ValueError(
            f"steps must be at most the plan's {plan.rounds}, was {rounds}: more are not covered"
        )
    rows = as_rows(wanted.data)
    if len(rows) != plan.dataset_size:
        raise ValueError(f"data must have the plan's dataset_size {plan.dataset_size} rows, had {len(rows)}")
    clip_norm = _validate.positive_number("clip_norm", 1.0 if wanted.clip_norm is None else wanted.clip_norm)
    loss, params = functional(wanted)
    rows = numbered(loss, rows)
    sampler_key, noise_key = wanted.keys or (sampler.fresh_key(), None)
    step = make_round(
        plan,
        loss,
        given_optimizer(wanted),
        clip_norm=clip_norm,
        inner=wanted.inner,
        key=noise_key,
        terms_at_once=given_microbatch_size(wanted),
    )
    return run_and_keep(
        step,
        step.init(params),
        _Terms(rows, plan.num_microbatches, plan.microbatch_size),
        rounds,
        plan=plan.lasting(),
        clip_norm=clip_norm,
        sampler_key=sampler_key,
        source_at=lambda key, drawn: Replayed(lambda generator: _rounds(plan, generator), key, drawn),
        statement=plan.statement(),
        frozen=loss.digests,
        # Draws say nothing of how they were come by: they are made anew.
        before_first=(lambda: plan.verify(progress=wanted.progress)) if wanted.verify else None,
        **wanted.kept(),
    )


PROCEDURE = Procedure(
    _train, frozenset("optimizer clip_norm clip inner steps microbatch_size wrt loss_key".split())
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


class Replayed:
    """Batches that a key draws one after the other: `draws(generator)` gives positions.

    Raises:
      ValueError: for a `drawn` that the key does not draw.
    """

    def __init__(
        self, draws: Callable[[np.random.Generator], Iterator[np.ndarray]], key, drawn: SamplerState | None
    ):
        self._key = tuple(int(word) for word in key)
        self._left = draws(make_generator(self._key))
        self.state = SamplerState(self._key, 0, "")
        while drawn is not None and self.state.step < drawn.step:
            self.next()
        if drawn is not None and drawn != self.state:
            raise ValueError("state must be of this plan and key: its batches were others")

    def next(self) -> Batch:
        """The records of the next round, all of its terms in a row."""
        places = next(self._left).reshape(-1).astype(np.int64)
        digest = hashlib.blake2b(self.state.digest.encode() + places.tobytes(), digest_size=16).hexdigest()
        self.state = SamplerState(self._key, self.state.step + 1, digest)
        return Batch(places, np.ones(len(places), bool))


def _rounds(plan: GeneralPlan, generator: np.random.Generator) -> Iterator[np.ndarray]:
    for _ in range(plan.num_epochs):
        yield from epoch_batches(
            generator, plan.dataset_size, plan.num_microbatches, plan.microbatch_size, plan.sampling
        )


def clip_by_l2_norm(tree, clip_norm: float) -> Any:
    """A pytree scaled to one global norm of at most `clip_norm` (float32; sums in training use the grid)."""
    _validate.positive_number("clip_norm", clip_norm)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)))
    scale = 1 / jnp.maximum(1.0, norm / clip_norm)
    return jax.tree.map(lambda leaf: leaf * scale, tree)


class RoundInfo(NamedTuple):
    """Private: no guarantee covers it."""

    norms: jax.Array
    """(m,) float32: of terms before clipping."""
    clipped_fraction: jax.Array


def aggregate(per_group_updates, clip_norm: float, mode: str):
    """`U`, the sum over terms of each clipped to `clip_norm`: on the integer grid of training, as float32.

    Private: nothing is added to it.

    Args:
      per_group_updates: pytree of arrays (m, ...): one update a term, over all leaves one vector each.
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
    total, kept, _ = _sum_on_grid(per_group_updates, Grid(clip_norm, _BITS))
    if not bool(kept.all()):
        raise ValueError("per_group_updates must be finite, had NaN or infinity")
    return total.scaled(1.0)


def private_round_update(
    key, params, batch, inner_fn: Callable[..., Any], clip_norm: float, sigma: float, *, diagnostics=False
):
    """One round by itself: `(U + 2 C sigma N(0, I)) / m`, and `None`, or what no guarantee covers.

    What a `GeneralPlan` runs in `train.loop.fit`, for who writes a loop of his own and counts rounds.

    Args:
      key: (8,) uint32, secret, of this round alone: two rounds with one key can be subtracted.
      params: w, what has been released so far.
      batch: pytree of arrays (m, s, ...).
      inner_fn: `inner_fn(params, records (s, ...)) -> update`, a pytree like `params`. It must keep nothing
        from call to call.
      clip_norm: C.
      sigma: noise std over 2 C.
      diagnostics: return `RoundInfo` as well: private.
    """
    _by_device.refuse_several_devices(params=params, batch=batch)
    terms = np.shape(jax.tree.leaves(batch)[0])[0]
    white = Mechanism(Poisson(1, 1.0), BandedToeplitz.square_root(1), 2 * sigma)
    private = privatize(white, clip_norm=clip_norm, expected_batch_size=terms, key=key)
    # One after the other: `jax.vmap` computes gradients of grouped convolutions for all terms at once, with
    # zeros between them that XLA multiplies: what is infinite in one term would spoil all others.
    updates = jax.lax.map(lambda records: inner_fn(params, records), batch)
    total, _, norms = _sum_on_grid(updates, private.grid)
    released, _ = private.update(total, private.init(params))
    return released, RoundInfo(norms, jnp.mean(norms > clip_norm)) if diagnostics else None


def outer_update(params, released, stepsize: float):
    """`w - eta Ubar / m`: post-processing of what `private_round_update` released."""
    _validate.positive_number("stepsize", stepsize)
    return jax.tree.map(lambda w, u: w - stepsize * u, params, released)


_BITS = 20  # of the grid where no noise says which one serves it


@functools.partial(jax.jit, static_argnames="grid")
def _sum_on_grid(updates, grid: Grid):
    """(sum of clipped updates, (m,) whether each counted, (m,) norms before clipping)."""
    _by_device.refuse_several_devices(updates=updates)
    kept, counts, norms = jax.vmap(lambda one: clip_to_grid(one, grid))(updates)
    one = jax.tree.map(lambda leaf: leaf[0], updates)
    part = jax.tree.map(lambda n: n.sum(axis=0, dtype=jnp.int32), counts)
    if len(kept) > grid.most_at_once:
        raise ValueError(f"batch must have at most {grid.most_at_once} terms, had {len(kept)}")
    return GridSum.zeros(one, grid).plus(part), kept, norms
