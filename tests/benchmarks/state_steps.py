"""What a state costs a step at one more noise multiplier, at least: two independent examples.

PYTHONPATH=. python tests/benchmarks/state_steps.py [noise multipliers at once]

The recurrence of `kernels.interacting_linear_scale` without its ends, a part at a time: b states a step, of
128 samples each, a table of b rows. A step adds to every state `w (1 + ahead)`, `ahead` what the table
holds of the state after a participation. Nanoseconds of the processor.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

B, STEPS, SAMPLES = 16, 992, 128


def _weights(ratio, overlap):
    first = jnp.exp(ratio * jnp.linspace(0.5, 1, overlap.shape[1])[:, None] - 5.0)
    return overlap[:, :, None] * lax.optimization_barrier(first)


def row_alone(carry, at):
    """One array read and written."""
    table, row = carry
    _, ratio, overlap = at
    return (table, row + _weights(ratio, overlap) * (1 + row)), None


def row_and_table(carry, at):
    """The table is read too, in the order that it is kept in."""
    table, row = carry
    k, ratio, overlap = at
    ahead = lax.dynamic_slice_in_dim(table, k * B, B)
    return (table, row + _weights(ratio, overlap) * (1 + ahead)), None


def table_written(carry, at):
    """And written: without the order of states, their ends and scales the whole step."""
    table, row = carry
    k, ratio, overlap = at
    ahead = lax.optimization_barrier(lax.dynamic_slice_in_dim(table, k * B, B))
    now = lax.optimization_barrier(row + _weights(ratio, overlap) * (1 + ahead))
    return (lax.dynamic_update_slice_in_dim(table, now, k * B, 0), now), None


def as_it_is(carry, at):
    """With states in the order of the kernel, gathered from both."""
    table, row = carry
    k, ratio, overlap = at
    state = np.arange(B)
    ahead = table[(k + np.maximum(1, state)) % B * B + np.where(state, B - state, B - 1)]
    now = row[np.maximum(state - 1, 0)] + _weights(ratio, overlap) * (1 + ahead)
    return (lax.dynamic_update_slice_in_dim(table, now, k * B, 0), now), None


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    ratios = jax.random.normal(jax.random.key(0), (STEPS, SAMPLES))
    given = jnp.arange(STEPS, dtype=jnp.int32)[::-1] % B, ratios, jnp.full((STEPS, B, count), 0.5)
    start = jnp.zeros((B * B, count, SAMPLES)), jnp.zeros((B, count, SAMPLES))
    for step in (row_alone, row_and_table, table_written, as_it_is):
        run = jax.jit(lambda start, given, step=step: lax.scan(step, start, given)[0][1])
        jax.block_until_ready(run(start, given))
        taken = []
        for _ in range(5):
            started = time.process_time()
            jax.block_until_ready(run(start, given))
            taken.append(time.process_time() - started)
        each = 1e9 * min(taken) / (STEPS * B * count * SAMPLES)
        print(f"{step.__name__}: {each:.3f} ns a state and step", flush=True)


if __name__ == "__main__":
    main()
