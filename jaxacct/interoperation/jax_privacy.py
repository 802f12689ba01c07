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
# Samplers of jax-privacy by scheme; releases before the sampler of k of n steps lack the first.
_SAMPLERS = {"balanced-min-sep": "RandomAllocationSampling", "balls-in-bins": "BallsInBinsSampling"}
_SAMPLERS |= dict.fromkeys(("poisson", "cyclic-poisson"), "CyclicPoissonSampling")
_SAMPLERS |= dict.fromkeys(("b-min-sep", "truncated-b-min-sep"), "BMinSepSampling")


def batch_selection(scheme: Scheme) -> Any:
    """Return the `jax_privacy.batch_selection` strategy with the distribution of a scheme.

    Args:
      scheme: one that jax-privacy has a sampler for.

    Raises:
      ValueError: jax-privacy has no sampler for the scheme, or is not installed.
    """
    module = _module()
    known = [name for name, sampler in _SAMPLERS.items() if hasattr(module, sampler)]
    name = getattr(scheme, "name", None)
    if name not in known:
        raise ValueError(f"scheme must be one of {', '.join(known)} for jax-privacy, got {name}")
    given: Any = scheme
    n, b, p = given.iterations, given.min_separation, getattr(given, "sampling_probability", None)
    sampler = getattr(module, _SAMPLERS[name])
    match _SAMPLERS[name]:
        case "CyclicPoissonSampling":
            return sampler(p, n, cycle_length=b, partition_type=module.PartitionType.INDEPENDENT)
        case "BallsInBinsSampling":
            return sampler(n, given.cycle_length)
        case "BMinSepSampling":
            # Without lockouts both starts are one distribution, and jax-privacy fails to create the warm one.
            return sampler(p, n, b, given.warm_start and b > 1, given.batch_size_cap)
    k = given.participations
    if k != int(k) or (b > 1 and k > 1):
        raise ValueError("scheme must have whole participations at a separation of 1 for jax-privacy")
    return sampler(int(k), n)


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
    module, name = _module(), type(selection).__name__
    known = sorted(sampler for sampler in {*_SAMPLERS.values()} if hasattr(module, sampler))
    if name not in known or type(selection) is not getattr(module, name):
        raise ValueError(f"selection must be one of {', '.join(known)}, got {name}")
    p: Any = getattr(selection, "sampling_prob", None)
    cap: Any = getattr(selection, "truncated_batch_size", None)
    n, cycle = selection.iterations, getattr(selection, "cycle_length", 1)
    separation, warm = getattr(selection, "min_sep", 1), getattr(selection, "warm_start", True)
    match name:
        case "CyclicPoissonSampling":
            if cap is not None and cycle > 1:
                raise ValueError(
                    "selection must not truncate batches of a cyclic scheme: no scheme here has that "
                    "distribution"
                )
            if cycle > 1 and selection.partition_type != module.PartitionType.INDEPENDENT:
                raise ValueError(
                    "selection must have PartitionType.INDEPENDENT: with parts of equal size the other "
                    "examples determine an example's part, so no accounting that hides it holds"
                )
            if cap is None:
                return Poisson(n, p) if cycle == 1 else CyclicPoisson(n, cycle, p)
        case "BallsInBinsSampling":
            return BallsInBins(n, cycle)
        case "BMinSepSampling":
            if cap is None:
                return BMinSep(n, separation, p, warm)
        case _:
            if cycle != 1:
                raise ValueError("selection must have cycle_length 1: no scheme here allocates within a part")
            return BalancedMinSep(n, 1, selection.total_participations)
    if dataset_size is None:
        raise ValueError("dataset_size must be given for truncated batches")
    return TruncatedBMinSep(n, separation, p, cap, dataset_size, warm)


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
