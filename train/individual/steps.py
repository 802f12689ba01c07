"""Steps that follow every example: the parts of a run with `individual`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxacct.common import validate as _validate
from jaxacct.core.plan import Plan

from ..batches.sampler import Sampler, SamplerState
from ..clipping.ghost import PER_EXAMPLE
from ..optimizers import Privatizer
from ..procedures.step import PrivateStep, TrainState, make_step
from .accounting import IndividualAccounting, PrivateLosses, Tracker


def individual_step(
    loss: Callable[..., jax.Array],
    private: Privatizer,
    optimizer: optax.GradientTransformation,
    tracker: Tracker,
    start,
    **options,
) -> PrivateStep:
    """Return `make_step` on admitted examples: `step(state, all rows, sampled) -> (state, info)`."""

    def admit(records, squares):
        with jax.enable_x64(True):
            norms = _rounded_up(jnp.sqrt(squares) * 2.0**-private.grid.bits)
        return tracker.step(records, norms)

    followed: dict[str, Any] = dict(admit=admit, records=start, clipping=PER_EXAMPLE)
    return make_step(loss, private, optimizer, **followed, **options)


def _rounded_up(values) -> jax.Array:
    """float64 as float32 that is not below it."""
    rounded = values.astype(jnp.float32)
    above = jnp.nextafter(rounded, jnp.full_like(rounded, jnp.inf))
    return jnp.where(rounded.astype(jnp.float64) < values, above, rounded)


@dataclass(frozen=True)
class _AllRows:
    """All rows at every step, and which of them were sampled: every example is charged."""

    rows: Any
    on_device: Any

    def take(self, indices):
        sampled = np.zeros(len(self.rows), bool)
        sampled[indices] = True
        return self.on_device, sampled


def follow(
    individual: IndividualAccounting,
    plan: Plan,
    rows,
    loss: Callable[..., jax.Array],
    private: Privatizer,
    optimizer: optax.GradientTransformation,
    **options,
) -> dict[str, Any]:
    """Return the fields of `train.run.loop.Run` for a run that follows every example.

    ValueError for a plan whose steps are not independent.
    """
    _validate.instance(
        "individual", individual, IndividualAccounting, "a train.individual.IndividualAccounting"
    )
    scheme, size = plan.mechanism.scheme, len(rows)
    tracker = individual.tracker(_probability(plan), plan.mechanism.noise_multiplier)

    def source_at(key, drawn: SamplerState | None) -> Sampler:
        # Batches may be as long as the data set: every gradient is computed anyway.
        return Sampler(scheme, size, size, key, state=drawn)

    def report(state: TrainState, steps: int) -> PrivateLosses:
        records = jax.tree.map(np.asarray, state.private_individual)
        return PrivateLosses(steps, tracker, records)

    return dict(
        step=individual_step(loss, private, optimizer, tracker, tracker.init(size), **options),
        batch=_AllRows(rows, jax.tree.map(jnp.asarray, rows.take(np.arange(size), size))),
        source_at=source_at,
        adds=individual.statement(tracker),
        report=report,
    )


def _probability(plan: Plan) -> float:
    """Return the sampling probability of every example at every step; ValueError where it varies."""
    mechanism, scheme = plan.mechanism, plan.mechanism.scheme
    rounds = scheme.independent_rounds
    if (
        rounds is None
        or rounds[1] != scheme.iterations
        or scheme.unit != "example"
        or scheme.batch_size_cap is not None
        or plan.truncation_delta is not None
    ):
        raise ValueError(
            "individual needs a plan whose examples join every batch independently (Poisson, not truncated), "
            f"got {scheme.name}"
        )
    if mechanism.strategy.noise_copies:
        raise ValueError(
            "individual needs a plan of independent noise (one band): the proof adds individual losses of "
            f"steps, got {mechanism.strategy.describe()}"
        )
    return float(rounds[0])
