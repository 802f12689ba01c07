"""Many noise multipliers from the same samples: the scores are signal plus sigma times noise.

Participations, random bits and both FFTs are computed once; what remains for each noise multiplier is the
recurrence, in linear scale (`kernels.linear_scale`). Thirty take two to four times as long as one
(`sample_privacy_loss`; up to thirteen times as long as one by the same code, where examples are drawn
independently; see tests/benchmarks/RESULTS.md). Use it for exploration and candidates: theorem A.1 of arXiv
2602.09338 would allow it for verification (proofs/derivations.md section 4), but the verifier has better
proposals than plain ones, and those depend on sigma.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.kernels import randomness, threefry
from jaxacct.kernels.programs import check_arithmetic, compiled
from jaxacct.likelihood.loss import column_norms, loss_of_scores, lowered_norms
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import CACHE_NUMBERS, blocks_at_once, direction_key, few_windows, workers
from jaxacct.schemes import Scheme
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.hockey_stick import DIRECTIONS, Direction
from jaxacct.strategies import Strategy

# Noise multipliers that a CPU processes at once: a step is then long beside its call, a block stays in cache;
# and how many numbers their likelihoods may keep.
_TOGETHER = 15
_KEPT = 2**20


class DeltaCurve(NamedTuple):
    """Estimates of delta at each noise multiplier, (count,) float64 each; no guarantee.

    Attributes:
      low: lower end, the larger of both directions; each interval holds with the requested confidence, but
        all share their samples. 0 where losses are upper bounds.
      value: estimate, as `low`.
      high: upper end, as `low`.
    """

    noise_multipliers: np.ndarray
    low: np.ndarray
    value: np.ndarray
    high: np.ndarray


def sample_privacy_losses(
    key,
    scheme: Scheme,
    strategy: Strategy,
    noise_multipliers,
    num_samples: int,
    direction: str = Direction.REMOVE,
):
    """Draw privacy losses at several noise multipliers, from the same participations and noise.

    Args:
      key: JAX key. Row j has the samples of `sample_privacy_loss` with this key at the j-th noise multiplier,
        up to rounding.
      scheme: any scheme without side information.
      strategy: strategy matrix.
      noise_multipliers: (count,) above 0.
      num_samples: at least 1.
      direction: "remove" or "add".

    Returns:
      (count, num_samples) float32, natural log. The work space is a few blocks of 128 samples, for any count
      and number of samples.

    Raises:
      ValueError: bad arguments; a scheme with side information, whose Q is not one Gaussian.
    """
    check_arithmetic()
    sigmas, mechanism = _checked(scheme, strategy, noise_multipliers)
    num_samples = _validate.positive_integer("num_samples", num_samples)
    direction = Direction.of(direction)
    stream = direction_key(key, direction)
    num_blocks = -(-num_samples // randomness.BLOCK_SIZE)
    # An accelerator holds the log-ratios of all noise multipliers, and the state of their recurrences.
    batches = -(-num_blocks // blocks_at_once(mechanism, arrays=12 + 2 * len(sigmas)))
    # The same number for every thread.
    at_once = -(-num_blocks // (batches + -batches % workers()))

    def losses(sigmas, in_logs: bool) -> np.ndarray:
        def draw(first):
            keys = randomness.block_trees(stream, first, at_once)
            return np.asarray(_blocks(scheme, strategy, direction, in_logs, sigmas, keys))

        with ThreadPoolExecutor(workers()) as pool:
            parts = list(pool.map(draw, range(0, num_blocks, at_once)))
        return np.concatenate(parts, axis=1)[:, :num_samples]

    found = losses(sigmas, False)
    # In linear scale small noise is out of range; logarithms always work.
    beyond = ~np.isfinite(found).all(axis=1)
    if beyond.any():
        found[beyond] = losses(sigmas[beyond], True)
    return found


def delta_curve(
    scheme: Scheme,
    strategy: Strategy,
    noise_multipliers,
    epsilon: float,
    *,
    num_samples: int = 20_000,
    confidence: float = 0.95,
    key=None,
) -> DeltaCurve:
    """Estimate delta(epsilon) at every noise multiplier from one set of plain samples, both directions.

    Args:
      scheme: any scheme without side information.
      strategy: strategy matrix.
      noise_multipliers: (count,) above 0.
      epsilon: nats, at least 0.
      num_samples: per direction.
      confidence: of each interval, in (0, 1).
      key: JAX key; from the operating system by default.

    Returns:
      The estimates and intervals of each direction; not a guarantee.

    Raises:
      ValueError: bad arguments, or a scheme with side information.
    """
    epsilon = _validate.epsilon(epsilon)
    risk = (1 - _validate.open_probability("confidence", confidence)) / len(DIRECTIONS)
    key = randomness.checked_key(key)
    found = []
    for direction in DIRECTIONS:
        losses = sample_privacy_losses(key, scheme, strategy, noise_multipliers, num_samples, direction)
        sign = direction.sign
        rows = []
        for row in losses.astype(np.float64):
            terms = hockey_stick.hockey_stick(epsilon - sign * row)
            counts = bounds.bin_terms(terms)
            low = bounds.lower_confidence_bound(counts, risk / 2)
            high = bounds.upper_confidence_bound(counts, risk / 2)
            mean = math.fsum(terms) / terms.size
            rows.append((min(low, mean), mean, max(high, mean)))
        found.append(rows)
    low, value, high = np.max(np.array(found), axis=0).T
    if Mechanism(scheme, strategy, 1.0).is_upper_bound:
        low = np.zeros_like(low)
    return DeltaCurve(np.asarray(noise_multipliers, np.float64), low, value, high)


def _checked(scheme, strategy, noise_multipliers) -> tuple[jax.Array, Mechanism]:
    try:
        given = np.asarray(noise_multipliers, np.float64)
    except (TypeError, ValueError):
        given = np.array(np.nan)
    if given.ndim != 1 or not given.size or not np.all(np.isfinite(given) & (given > 0)):
        raise ValueError(f"noise_multipliers must be a list of numbers above 0, got {noise_multipliers!r}")
    for sigma in given:
        _validate.noise_multiplier("noise_multipliers", float(sigma))
    if scheme.side_information is not None:
        raise ValueError(f"scheme must not be {scheme.name}: its draws are not signal plus noise alone")
    # The mechanism refuses incompatible pairs.
    return jnp.asarray(given, jnp.float32), Mechanism(scheme, strategy, float(given[0]))


@compiled(static=4)
def _blocks(scheme, strategy, direction, in_logs: bool, sigmas, keys):
    """Return (count, samples of the blocks `keys`) losses; not finite where linear scale overflows."""
    by_sums = scheme.many_multipliers is not None and not in_logs

    def losses(keys):
        signal, noise = (
            part.reshape(-1, scheme.iterations)
            for part in jax.vmap(lambda key: _signal_and_noise(scheme, strategy, direction, key))(keys)
        )
        if by_sums:
            return _losses_of_sums(scheme, strategy, direction, sigmas, signal, noise)

        def at(sigma):
            return loss_of_scores(scheme, strategy, signal + sigma * noise, sigma, direction)

        return jax.lax.map(at, sigmas) if jax.default_backend() == "cpu" else jax.vmap(at)(sigmas)

    number = len(jax.tree.leaves(keys)[0])
    if jax.default_backend() == "cpu":
        # Vectorized only where a step is short beside its call, and stays in cache.
        wide = _together(scheme, sigmas.shape[0]) if by_sums else 1
        max_rows = min(8 // wide, CACHE_NUMBERS // (randomness.BLOCK_SIZE * scheme.iterations))
        if by_sums:
            max_rows = min(max_rows, _max_together(scheme) // wide)
        max_rows = max(1, max_rows)
        number = max(k for k in range(1, max_rows + 1) if number % k == 0)
    groups = jax.tree.map(lambda leaf: leaf.reshape(-1, number, *leaf.shape[1:]), keys)
    found = jax.lax.map(losses, groups)
    return found.transpose(1, 0, 2).reshape(sigmas.shape[0], -1)


def _signal_and_noise(scheme, strategy, direction, key):
    """Return the signal and noise scores of one block at sigma = 1, (BLOCK_SIZE, iterations) float32 each."""
    normals_key, counts_key = threefry.split(key)
    n, size = scheme.iterations, randomness.BLOCK_SIZE
    normals = strategy.draw_normals(normals_key, n, size, jnp.float32)
    noise = strategy.scores_from_normals(normals, n, 1.0)
    nothing = jnp.zeros_like(noise)
    if direction == Direction.ADD:
        return nothing, noise
    if few_windows(scheme, strategy):
        positions = scheme.sparse_positions.draw(counts_key, size)
        return strategy.add_signal_windows(nothing, positions, 1.0), noise
    return strategy.signal_scores(scheme.draw_participation(counts_key, size)), noise


def _losses_of_sums(scheme, strategy, direction, sigmas, signal, noise):
    """Return (count, num_samples) losses: log-ratios are `(signal - lowered) / sigma^2 + noise / sigma`."""
    lowered = jax.lax.broadcast_to_rank(lowered_norms(scheme, strategy, direction, noise.dtype), 2)
    arrays = (signal - lowered).T, noise.T
    factors = jnp.stack([sigmas**-2, 1 / sigmas], axis=1)
    norms = jnp.asarray(column_norms(scheme, strategy), noise.dtype)
    count = len(factors)
    wide = _together(scheme, count) if jax.default_backend() == "cpu" else count
    if count == wide:
        return scheme.many_multipliers.log_likelihood_ratios(arrays, factors, norms)
    groups = jnp.pad(factors, ((0, -count % wide), (0, 0)), mode="edge").reshape(-1, wide, 2)
    found = jax.lax.map(
        lambda some: scheme.many_multipliers.log_likelihood_ratios(arrays, some, norms), groups
    )
    return found.reshape(-1, noise.shape[0])[:count]


def _together(scheme, count: int) -> int:
    """Return how many noise multipliers a CPU processes at once: equal groups, the last one padded."""
    return math.ceil(count / math.ceil(count / min(_TOGETHER, _max_together(scheme))))


def _max_together(scheme) -> int:
    """Return how many blocks of samples, each at one noise multiplier, stay in cache."""
    return max(1, _KEPT // (randomness.BLOCK_SIZE * scheme.many_multipliers.numbers_kept))
