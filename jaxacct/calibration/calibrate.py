"""Estimate, verify, release: the smallest number that can be certified.

Source: arXiv 2602.09338, algorithm 5.
"""

import contextlib
import dataclasses

from jaxacct.calibration.grid import Problem
from jaxacct.calibration.options import DEFAULTS, CalibrationOptions
from jaxacct.calibration.pilots import Clock, Pilots
from jaxacct.calibration.route import NotCertifiedError, Route
from jaxacct.calibration.targets import Target, asked
from jaxacct.common import validate
from jaxacct.common.files import Checkpoint
from jaxacct.common.progress import Progress
from jaxacct.core.plan import Plan
from jaxacct.kernels import randomness
from jaxacct.mechanisms.mechanism import ADJACENCIES, AdjacencyName, check_pair
from jaxacct.proposals import registry
from jaxacct.schemes import Scheme
from jaxacct.schemes.protocol.batch_sizes import check_dataset_size
from jaxacct.strategies import Strategy, ending

__all__ = ["NotCertifiedError", "calibrate"]


def calibrate(
    scheme: Scheme,
    strategy: Strategy,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    target: Target | None = None,
    noise_multiplier: float | None = None,
    dataset_size: int | None = None,
    max_batch_size: int | None = None,
    adjacency: AdjacencyName = ADJACENCIES[0],
    compose_with=None,
    options: CalibrationOptions = DEFAULTS,
    progress: Progress | None = None,
    key=None,
) -> Plan:
    """Find and certify a noise multiplier for an (epsilon, delta) target.

    A bound comes first: the smallest noise multiplier that an accountant certifies without samples. It is
    released where it is exact (independent noise and Poisson sampling), and where pilots do not predict at
    least 3 % less noise within the `seconds` of the options. Otherwise pilots with a key of their own select
    the first candidate on the grid, which is verified with 0.9 q of the failure probability q; `core.shares`
    lists the next candidates and their shares. Where none is certified, the bound is released. So a false
    release has probability at most q, and by theorem A.1 of arXiv 2602.09338 the whole procedure, calibration
    and training together, is (epsilon, delta_v + q (1 - delta_v))-DP, which is (epsilon, delta).

    Args:
      scheme: sampling scheme of the privacy units.
      strategy: strategy matrix C of the noise correlation. A `BandedToeplitz` with at least a twentieth as
        many bands as there are steps is certified as the n x n matrix that it is in training, a
        `FiniteToeplitz`, with less noise (proofs/finite_horizon.md).
      epsilon: target, in nats, above 0.
      delta: target, in (0, 1).
      target: in place of both, such as `Target.advantage(0.1)` or `Target.tpr(0.5, fpr=0.01)`.
      noise_multiplier: certify this value only. With epsilon alone the smallest delta is found and certified,
        with delta alone the smallest epsilon.
      dataset_size: number of examples, for the plan's batch sizes.
      max_batch_size: truncate larger batches to this, and account for it (`jaxacct.core.truncation`);
        by default batches are never truncated, and the plan states a size that none exceeds.
      adjacency: "zero-out" or "add-or-remove-one", which have the same dominating pair where examples are
        sampled independently, or "replace-one" (proofs/adjacency.md); other mechanisms allow the first only.
      compose_with: a dp-accounting `DpEvent` that the guarantee also covers.
      options: time, samples, accountant and machines of the search.
      progress: called with (what, samples done, samples expected).
      key: JAX key, from the operating system by default. Only tests should fix it.

    Returns:
      A certified `Plan`.

    Raises:
      ValueError: bad arguments, too few samples for the target, or no bound for it.
      NotCertifiedError: a given `noise_multiplier` could not be certified, within the seconds of samples.
    """
    check_pair(scheme, strategy)
    strategy = ending(strategy, scheme)
    target = asked(target, epsilon, delta)
    if noise_multiplier is None:
        target.point  # noqa: B018 - one of both alone is refused
    if max_batch_size is not None:
        validate.positive_integer("max_batch_size", max_batch_size)
    validate.instance("options", options, CalibrationOptions, "a jaxacct.CalibrationOptions")
    if options.proposal is not None:
        registry.check_name(options.proposal, compose_with is not None)
    if scheme.patterns is not None:  # nothing to sample
        options = dataclasses.replace(options, accountant=options.accountant or "unamplified")
    if options.accountant is not None and key is not None:
        raise ValueError("key must not be given together with accountant: no samples are drawn")
    if dataset_size is not None:
        check_dataset_size(scheme, validate.positive_integer("dataset_size", dataset_size))
    if target.rates is not None:
        target = target.with_least_noise(scheme, strategy)
    problem = Problem(
        scheme=scheme,
        strategy=strategy,
        adjacency=adjacency,
        compose_with=compose_with,
        dataset_size=dataset_size,
        truncate_to=max_batch_size,
        noise_multiplier=noise_multiplier,
        epsilon=target.epsilon,
        delta=target.delta,
    )
    problem.check()
    clock = Clock(progress, options.seconds, options.executor)
    pilots = Pilots(options, randomness.fresh_key() if key is None else key, clock)
    folder = options.checkpoint_dir
    with Checkpoint(folder) if folder else contextlib.nullcontext() as checkpoint:
        return Route(problem, options, pilots, checkpoint, key).plan()
