"""Replicas of one example, for a unit whose counts are a sum of k independent draws (remove direction).

With f_1 the likelihood ratio of one example, `f <= f_1^k` (proofs/shared_examples.md, theorem 4). So for M
> k draw from the law R with density `Q f_1^M / Z_M`, which is that of M replicas of one example: the weight
of a draw is `Z_M f / f_1^M <= Z_M f^{1 - M/k}`, and the weighted term never exceeds

    Z_M (1 / (rho - 1)) ((rho - 1) / rho)^rho e^{(1 - rho) epsilon},   rho = M / k.

Where f itself is bounded by f_1^k, that bound takes its place and everything holds.
"""

import functools
import math
import re
from collections.abc import Callable

import jax.numpy as jnp

from jaxacct.kernels import randomness, threefry
from jaxacct.likelihood import rounding
from jaxacct.likelihood.loss import loss_of_scores
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import Draws, Proposal
from jaxacct.proposals.replicas import (
    around_the_smallest_scale,
    log_normalizer,
    log_scale,
    most_replicas,
)
from jaxacct.statistics.direction import Direction


def power_proposal(mechanism: Mechanism, m: int, epsilon: float) -> Proposal:
    """M = m replicas of one example, m above the number of examples, with the scale at `epsilon`.

    Raises:
      ValueError: for an m that there are no tables for, or whose Z_M overflows.
    """
    one, number = _one(mechanism)
    if not number < m <= most_replicas(one):
        raise ValueError(f"m must be in {number + 1}..{most_replicas(one)} for this scheme, was {m}")
    log_z = log_normalizer(one, m)
    if not math.isfinite(log_z):
        raise ValueError(f"m = {m} replicas overflow at noise multiplier {mechanism.noise_multiplier:g}")
    module = one.scheme.replicas
    assert module is not None  # as there are tables
    relative_error, total_variation = module.errors(one, m)

    def tables():
        arrays = module.tables(one, m)
        return {"log_z": jnp.float32(log_z), "m": jnp.float32(m), "arrays": arrays}

    return Proposal(
        name=f"{m} replicas of one example",
        direction=Direction.REMOVE,
        mechanism=mechanism,
        log_scale=log_scale(log_z, m / number, epsilon),
        draw_block=_drawer(module),
        tables=tables,
        relative_error=relative_error,
        total_variation=total_variation,
        replicas=-(-m // number),
        scale_at=lambda other: log_scale(log_z, m / number, other),
        rounding_lines=lambda delta_v: rounding.power_lines(mechanism, float(delta_v), m, log_z),
        log_normalizer=log_z,
    )


def _one(mechanism: Mechanism) -> tuple[Mechanism, int]:
    """The mechanism of one example, and how many examples a unit has."""
    if mechanism.scheme.parts is None:
        raise ValueError(f"scheme must be of independent examples, was {mechanism.scheme.name}")
    one, number = mechanism.scheme.parts
    return Mechanism(one, mechanism.strategy, mechanism.noise_multiplier), number


def power_candidates(
    mechanism: Mechanism, epsilon: float, samples_needed: Callable[[Proposal], float] | None = None
) -> list[Proposal]:
    """The proposals worth considering, as `replica_candidates` looks for them; none for other schemes."""
    if mechanism.scheme.parts is None:
        return []
    one, number = _one(mechanism)
    return around_the_smallest_scale(
        one, number + 1, lambda m: power_proposal(mechanism, m, epsilon), samples_needed
    )


def power_called(mechanism: Mechanism, epsilon: float, name: str) -> Proposal | None:
    """The proposal of that name, None for a name of another kind; ValueError as `power_proposal`."""
    order = re.fullmatch(r"([0-9]{1,3}) replicas of one example", name)
    if order is None or mechanism.scheme.parts is None:
        return None
    return power_proposal(mechanism, int(order[1]), epsilon)


@functools.cache  # one function a module, so that nothing compiles twice
def _drawer(module) -> Callable[..., Draws]:
    def draw_block(key, scheme, strategy, sigma, tables, dtype) -> Draws:
        one, _ = scheme.parts
        normals_key, counts_key = threefry.split(key)
        n, size = scheme.iterations, randomness.BLOCK_SIZE
        normals = strategy.draw_normals(normals_key, n, size, dtype)
        counts = module.draw_counts(counts_key, one, tables["arrays"], size).astype(dtype)
        drawn = strategy.scores_from_normals(normals, n, sigma, counts)
        loss = loss_of_scores(scheme, strategy, drawn, sigma)
        single = loss_of_scores(one, strategy, drawn, sigma)
        return Draws(loss, tables["log_z"] + loss - tables["m"] * single)

    return draw_block
