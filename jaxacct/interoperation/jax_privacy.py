"""Schemes and matrices from and to jax-privacy, where both libraries have the same distribution.

Its samplers draw from NumPy generators and its noise is float32: a certificate does not cover seeds that an
adversary may learn, nor the low bits of such noise (proofs/released_numbers.md).
"""

import math
from typing import Any

import numpy as np

from jaxacct.schemes import BalancedMinSep, BallsInBins, BMinSep, CyclicPoisson, Poisson, Scheme
from jaxacct.schemes.truncation.truncated_b_min_sep import TruncatedBMinSep
from jaxacct.strategies import BandedToeplitz

_MIN_NORM, _MAX_NORM = 1 - 1e-6, 1 + 1e-12
"""Norms of an array: a larger one has less noise than certified, by the rounding of float32 as well."""


def batch_selection(scheme: Scheme) -> Any:
    """Return the `jax_privacy.batch_selection` strategy with the distribution of a scheme.

    Args:
      scheme: one that jax-privacy has a sampler for.

    Raises:
      ValueError: jax-privacy has no sampler for the scheme, or is not installed.
    """
    module = _module()
    writers = {name: write for name, (_, write, _) in _distributions(module).items()}
    name = getattr(scheme, "name", None)
    if name not in writers:
        raise ValueError(f"scheme must be one of {', '.join(writers)} for jax-privacy, got {name}")
    return writers[name](scheme)


def scheme_of(selection: Any, dataset_size: int | None = None) -> Scheme:
    """Return the scheme with the distribution of a `jax_privacy.batch_selection` strategy.

    Args:
      selection: the strategy.
      dataset_size: number of examples, for truncated batches.

    Raises:
      ValueError: no scheme has this distribution. A cycle of more than one part with evenly split examples
        (`PartitionType.EQUAL_SPLIT`) is an example: the members of the other parts determine the part of an
        example.
    """
    module = _module()
    for kind, _, read in _distributions(module).values():
        if type(selection) is kind:
            return read(selection, dataset_size)
    known = sorted({kind.__name__ for kind, _, _ in _distributions(module).values()})
    raise ValueError(f"selection must be one of {', '.join(known)}, got {type(selection).__name__}")


def strategy_of(coefficients) -> BandedToeplitz:
    """Return the strategy of jax-privacy's Toeplitz coefficients, scaled to norm 1; not column-normalized.

    C x + s z with columns of norm v has the privacy of (C / v) x + (s / v) z. The noise of a `BandMFConfig`
    has s = noise multiplier times v, for coefficients of any norm. An array may be given to jax-privacy's
    noise directly, with s = noise multiplier: a norm above 1 has less noise than certified.

    Args:
      coefficients: (bands,) of norm 1, or a `BandMFConfig` of jax-privacy.

    Raises:
      ValueError: another norm of an array, or a `BandMFConfig` with column_normalize.
    """
    if hasattr(coefficients, "strategy"):
        if getattr(coefficients, "column_normalize", False):
            raise ValueError("coefficients must be of a BandMFConfig without column_normalize")
        return BandedToeplitz(tuple(np.asarray(coefficients.strategy, np.float64).tolist()))
    found = np.asarray(coefficients, np.float64)
    norm = math.sqrt(float(np.dot(found, found))) if found.ndim == 1 else math.nan
    if not _MIN_NORM <= norm <= _MAX_NORM:
        raise ValueError(
            f"coefficients must be a BandMFConfig or a vector of norm 1, got norm {norm!r}: "
            "divide them by it, in float64"
        )
    return BandedToeplitz(tuple(found.tolist()))


def _module():
    try:
        from jax_privacy import batch_selection as module
    except ImportError:
        raise ValueError("jax-privacy must be installed (pip install jax-privacy)") from None
    return module


def _distributions(module) -> dict:
    """Return {name of a scheme: (class of jax-privacy, scheme -> selection, (selection, size) -> scheme)}."""
    cyclic, independent = module.CyclicPoissonSampling, module.PartitionType.INDEPENDENT

    def write_cyclic(scheme):
        p, cycle = scheme.sampling_probability, scheme.min_separation
        return cyclic(p, scheme.iterations, cycle_length=cycle, partition_type=independent)

    def read_cyclic(given, dataset_size):
        del dataset_size
        _refuse_truncation(given)
        if given.cycle_length == 1:
            return Poisson(given.iterations, given.sampling_prob)
        if given.partition_type != independent:
            raise ValueError(
                "selection must have PartitionType.INDEPENDENT: with parts of equal size the other examples "
                "determine an example's part, so no accounting that hides it holds"
            )
        return CyclicPoisson(given.iterations, given.cycle_length, given.sampling_prob)

    def write_b_min_sep(scheme):
        p, n, b = scheme.sampling_probability, scheme.iterations, scheme.min_separation
        # Without lockouts both starts are one distribution, and jax-privacy fails to create the warm one.
        return module.BMinSepSampling(p, n, b, scheme.warm_start and b > 1, scheme.batch_size_cap)

    def read_b_min_sep(given, dataset_size):
        n, b, p, warm = given.iterations, given.min_sep, given.sampling_prob, given.warm_start
        if given.truncated_batch_size is None:
            return BMinSep(n, b, p, warm)
        if dataset_size is None:
            raise ValueError("dataset_size must be given for truncated batches")
        return TruncatedBMinSep(
            n, b, p, max_batch_size=given.truncated_batch_size, dataset_size=dataset_size, warm_start=warm
        )

    def read_allocation(given, dataset_size):
        del dataset_size
        if getattr(given, "cycle_length", 1) != 1:
            raise ValueError("selection must have cycle_length 1: no scheme here allocates within a part")
        return BalancedMinSep(given.iterations, 1, given.total_participations)

    def write_allocation(scheme):
        k = scheme.participations
        if k != int(k) or (scheme.min_separation > 1 and k > 1):
            raise ValueError("scheme must have whole participations at a separation of 1 for jax-privacy")
        return module.RandomAllocationSampling(int(k), scheme.iterations)

    # Releases before the sampler of k of n steps have no such class.
    allocation = getattr(module, "RandomAllocationSampling", None)
    newer = {"balanced-min-sep": (allocation, write_allocation, read_allocation)} if allocation else {}
    return newer | {
        "poisson": (cyclic, write_cyclic, read_cyclic),
        "cyclic-poisson": (cyclic, write_cyclic, read_cyclic),
        "balls-in-bins": (
            module.BallsInBinsSampling,
            lambda scheme: module.BallsInBinsSampling(scheme.iterations, scheme.cycle_length),
            lambda given, _: BallsInBins(given.iterations, given.cycle_length),
        ),
        "b-min-sep": (module.BMinSepSampling, write_b_min_sep, read_b_min_sep),
        "truncated-b-min-sep": (module.BMinSepSampling, write_b_min_sep, read_b_min_sep),
    }


def _refuse_truncation(given) -> None:
    if given.truncated_batch_size is not None:
        raise ValueError(
            "selection must not truncate batches of a cyclic scheme: no scheme here has that distribution"
        )
