"""Standard normals that leave no holes: ChaCha20 words from a 256-bit key, Box-Muller in float64.

Noise on a coarse grid reveals sums (proofs/released_numbers.md), so a pair of normals is made
from 128 random bits: 96 for the radius, 53 for the angle, of which the last 21 serve both. Within radius 10.2
neighbouring radii are less than 2^-20 apart; a pair lies beyond it with probability 2^-75. No value is beyond
`LARGEST`.

The words are those of RFC 8439, so a normal depends on the key, the step and its number only, and the key is
out of reach of any search.
"""

import functools
import hashlib
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels.programs import outside_of_traces

from . import chacha, gpu_keystream

LARGEST = math.sqrt(2 * 97 * math.log(2))  # radius of the smallest uniform, half of 2^-96: 11.6
ARRANGEMENT = 7  # another number wherever normals of the same key go to other places, or have other last bits
_PAIRS = 4  # a block of 16 words
# Encrypted, so that the key stream itself is written; caches hold as many bytes.
_ZEROS = memoryview(bytes(2**17))
# Bound the memory for words, which CPUs are fast on where caches hold it.
_BLOCKS_AT_ONCE = {"cpu": 2**13, "others": 2**18}


def fresh_key() -> np.ndarray:
    """Return (8,) uint32 from the operating system's generator: 256 secret bits."""
    return np.frombuffer(os.urandom(32), np.uint32)


def key_of_run(given, params) -> jax.Array:
    """Return the noise key of one run, (8,) uint32: `given`, or a fresh one where it is None.

    Args:
      given: a key that the caller uses for this run alone, or None.
      params: pytree of the arrays that the run begins with.

    Raises:
      ValueError: for None where JAX traces a program. The key would be a constant of that program, and all
        runs that it begins would have the same noise.
      RuntimeError: on a device whose float64 is not exact.
    """
    _refuse_inexact(jax.default_backend())
    if given is None:
        leaves = [*jax.tree.leaves(params), jnp.zeros(())]
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise ValueError(
                "init must be called outside of jax.jit, jax.vmap and the like: it draws the key of a run, "
                "which all runs of a traced program would share"
            )
        given = fresh_key()
    words = jnp.array(given, jnp.uint32)  # of its own, as steps donate their state
    if words.shape != (8,):
        raise ValueError(f"key must be 8 words of 32 bits, got shape {words.shape}")
    return words


def next_key(words, text: str) -> np.ndarray:
    """Return the noise key, (8,) uint32, after the key `words` and a text: a function of both, one way."""
    digest = hashlib.blake2b(text.encode(), key=np.asarray(words, np.uint32).tobytes(), digest_size=32)
    return np.frombuffer(digest.digest(), np.uint32)


def with_next_key(state, text: str):
    """Return the state of a run, or its noise, whose key is the one after its own and a text (`next_key`)."""
    noise = getattr(state, "noise", state)
    key = next_key(noise.key, text)
    to = noise.key.sharding if getattr(noise.key, "committed", False) else None
    after = noise._replace(key=jax.device_put(key, to))
    return after if noise is state else state._replace(noise=after)


def sine_error() -> float:
    """Return the largest error of a compiled sine or cosine on the default device: exact ones have 1e-15."""
    angles = np.arange(257, dtype=np.uint64) * np.uint64(2**64 // 256 - 1)
    turns = 2 * np.pi * (angles * 2.0**-64)
    with jax.enable_x64(True):
        found = jax.jit(_sine_cosine)(angles)
    return float(np.abs(np.array(found) - [np.sin(turns), np.cos(turns)]).max())


@functools.cache
def _refuse_inexact(backend: str) -> None:
    """Raise RuntimeError where sines of the backend are not those of float64.

    Without XLA's optimizations (jaxlib 0.11.2 on an H200) they lose their last 32 bits.
    """
    if backend == "cpu":
        return
    if not outside_of_traces(sine_error) < 1e-13:
        raise RuntimeError(
            f"noise must be computed with XLA's optimizations on a {backend}: without them sines have less "
            "than the precision of float64 (jax_disable_most_optimizations, XLA_FLAGS)"
        )


def _places(shapes) -> tuple[list[slice], int]:
    """Return where the normals of each array of these shapes are, and their number with gaps.

    Each array begins with a block of its own: so it is aligned in memory, and no part of another's block.
    """
    sizes = [math.prod(shape) for shape in shapes]
    begins = list(itertools.accumulate((2 * _PAIRS * -(-size // (2 * _PAIRS)) for size in sizes), initial=0))
    return [slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=False)], begins[-1]


def number_of(shapes) -> int:
    """Return how many normals are drawn for arrays of these shapes, gaps between them included."""
    return _places(shapes)[1]


def split(drawn, shapes) -> list[jax.Array]:
    """Return (`number_of(shapes)`,) float64 normals of one step as one array for each shape."""
    places, _ = _places(shapes)
    with jax.enable_x64(True):
        return [drawn[place].reshape(shape) for place, shape in zip(places, shapes, strict=True)]


class Cut(NamedTuple):
    """The numbers of one array that a device has: of each axis one of several equal parts.

    Attributes:
      whole: shape of the array.
      shape: of the part.
      begin: () integers, one an axis and a multiple of the part's size there; perhaps computed in a program.
    """

    whole: tuple[int, ...]
    shape: tuple[int, ...]
    begin: tuple[Any, ...]

    @classmethod
    def of(cls, array: "tuple[int, ...] | Cut") -> "Cut":
        """Return what a device has of an array: of a shape, all."""
        return array if isinstance(array, Cut) else cls(array, array, (0,) * len(array))

    def runs(self) -> tuple[int, int, int]:
        """Return the axis from which on numbers are neighbours in memory, how many runs, and their length."""
        axis = max((at for at, size in enumerate(self.whole) if self.shape[at] < size), default=0)
        return axis, math.prod(self.shape[:axis]), math.prod(self.shape[axis:])

    def starts(self) -> jax.Array:
        """Return (runs,) int64: the place in the array where each run begins, a multiple of its length."""
        axis, _, _ = self.runs()
        found = jnp.zeros(1, jnp.int64)
        for at, begin in enumerate(self.begin):
            begin = jnp.asarray(begin, jnp.int64)
            places = begin + jnp.arange(self.shape[at] if at < axis else 1, dtype=jnp.int64)
            found = (found[:, None] + places[None] * math.prod(self.whole[at + 1 :])).reshape(-1)
        return found


def normals_of(key, step, arrays: Sequence[tuple[int, ...] | Cut], only=None) -> list[jax.Array]:
    """Return independent standard normals for one step, float64, of each array or part; jittable.

    A part has the normals that the array has there, and needs few others (none where runs are whole blocks).

    Args:
      key: (8,) uint32.
      step: () integer.
      arrays: static shapes, or what a device has of them: all of the step.
      only: numbers of those whose normals are drawn; by default all.
    """
    only = range(len(arrays)) if only is None else only
    if len(only) == len(arrays) and not any(isinstance(array, Cut) for array in arrays):
        return split(standard_normals(key, step, number_of(arrays)), arrays)
    if not only:
        return []
    cuts = [Cut.of(array) for array in arrays]
    places, size = _places([cut.whole for cut in cuts])
    _blocks(size)
    block, numbers, planned = 2 * _PAIRS, [], []
    with jax.enable_x64(True):
        for place, cut in ((places[i], cuts[i]) for i in only):
            _, runs, length = cut.runs()
            # A run begins at a multiple of its length, and at most so far into its first block.
            before = 0 if cut.whole == cut.shape else block - math.gcd(block, length)
            each, starts = -(-(before + length) // block), place.start + cut.starts()
            numbers.append((starts[:, None] // block + jnp.arange(each)[None]).reshape(-1))
            planned.append((cut, each, before, starts % block))
        drawn = _of_blocks(key, step, jnp.concatenate(numbers).astype(jnp.uint32))
        at, found = 0, []
        for cut, each, before, skipped in planned:
            _, runs, length = cut.runs()
            rows = drawn[block * at :][: block * runs * each].reshape(runs, block * each)
            at += runs * each
            if before:
                rows = jax.vmap(functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=length))(
                    rows, skipped
                )
            found.append(rows[:, :length].reshape(cut.shape))
    return found


@functools.partial(jax.jit, static_argnames="size")
def standard_normals(key, step, size: int) -> jax.Array:
    """Return (size,) float64: independent standard normals for one step; jittable with any `jax_enable_x64`.

    Normals 2i and 2i + 1 are made of words 4i to 4i + 3 of the step's key stream.

    Args:
      key: (8,) uint32.
      step: () integer.
      size: static.
    """
    return _of_blocks(key, step, jnp.arange(_blocks(size), dtype=jnp.uint32), size)


def _of_blocks(key, step, numbers, size: int | None = None) -> jax.Array:
    """Return the normals of (n,) uint32 blocks of the step's key stream one after the other, float64.

    With `size`, the first so many of these 8 n.
    """
    size = 2 * _PAIRS * numbers.size if size is None else size

    def by_program(key, step, numbers):
        at_once = min(numbers.size, _BLOCKS_AT_ONCE["cpu" if jax.default_backend() == "cpu" else "others"])

        def some_words(counter):
            return _apart(chacha.blocks(key, (counter, step, 0, 0)).T)[0]

        numbers = jnp.pad(numbers, (0, -numbers.size % at_once)).reshape(-1, at_once)
        words = jax.lax.map(some_words, numbers)
        with jax.enable_x64(True):
            # Two words of 32 bits each, the first is the low one.
            return _of_words(jax.lax.bitcast_convert_type(words.reshape(-1, 2, 2), jnp.uint64), size)

    def by_kernel(key, step, numbers):
        words = gpu_keystream.words(key, step, numbers)
        with jax.enable_x64(True):
            # Neighbouring threads compute the same pair of neighbouring blocks, whose words are neighbours.
            words = words.reshape(_PAIRS, 2, 2, -1).astype(jnp.uint64)
            x, y = (words[:, i, 0] | words[:, i, 1] << 32 for i in (0, 1))
            return jnp.stack(_apart(*_box_muller(x, y))).transpose(2, 1, 0).reshape(-1)[:size]

    if not gpu_keystream.serves():
        return by_program(key, step, numbers)
    # A machine with a GPU may still run this on its CPU.
    return jax.lax.platform_dependent(key, step, numbers, cuda=by_kernel, default=by_program)


@functools.partial(jax.jit, static_argnames="size")
def _of_words(words, size: int) -> jax.Array:
    """Return (size,) float64 normals of (pairs, 2) uint64, pairs of words of the key stream."""
    with jax.enable_x64(True):
        words = words[: -(-size // 2)]
        return jnp.stack(_apart(*_box_muller(words[:, 0], words[:, 1])), axis=1).reshape(-1)[:size]


def normals_on_host(key: bytes, step: int, size: int) -> jax.Array:
    """Return `standard_normals` not within a program: the same numbers, perhaps but for last bits.

    The key stream is that of the `cryptography` package, which takes a CPU a ninth of the time of XLA's.

    Args:
      key: 32 bytes, the eight words of the key in the order of memory.
      step: from 0.
      size: number of normals.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    nonce = np.array([0, step, 0, 0], "<u4").tobytes()
    encryptor = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
    room = np.empty(64 * _blocks(size) + 64, np.uint8)
    words = room[-room.ctypes.data % 64 :][: 64 * _blocks(size)]  # as XLA aligns arrays: it reads them there
    stream = words.data
    for at in range(0, len(stream), len(_ZEROS)):
        part = stream[at : at + len(_ZEROS)]
        if encryptor.update_into(_ZEROS[: len(part)], part) != len(part):
            raise RuntimeError("the cryptography package must write as many bytes of ChaCha20 as it is given")
    with jax.enable_x64(True):
        return _of_words(jax.device_put(words.view("<u8").reshape(-1, 2), may_alias=True), size)


def _blocks(size: int) -> int:
    blocks = max(1, -(-size // (2 * _PAIRS)))
    if blocks > 2**32:
        raise ValueError(f"size must be at most {2**32 * 2 * _PAIRS} normals a step, got {size}")
    return blocks


def _apart(*arrays):
    """Kept from fusing: XLA would compute shared parts again for every use, ten times slower."""
    return jax.lax.optimization_barrier(arrays)


def _box_muller(x, y) -> tuple[jax.Array, jax.Array]:
    """Return pairs of float64 normals of two uint64 each.

    The radius has the bits of x, the last 11 of y, and those 21 of y that are the last of the angle's 53.
    """
    with jax.enable_x64(True):
        more = ((y << 53) | ((y << 32) >> 11)) & np.uint64(2**64 - 2**32)
        beyond = more.astype(jnp.float64) * 2.0**-128 + 2.0**-97
        radius = jnp.sqrt(jnp.maximum(0.0, -2 * _log(x.astype(jnp.float64) * 2.0**-64 + beyond)))
        sine, cosine = _sine_cosine((y >> 11) << 11)
        return radius * cosine, radius * sine


def _log(x):
    """Natural log of float64 in (0, 1], to 1e-15 (1 + |log x|); XLA's own is scalar on CPUs.

    x = m 2^k with m in [sqrt(1/2), sqrt(2)); log m = 2 artanh((m - 1) / (m + 1)), by its series.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int64)
    exponent = (bits - int(np.float64(np.sqrt(0.5)).view(np.int64))) >> 52
    mantissa = jax.lax.bitcast_convert_type(bits - (exponent << 52), jnp.float64)
    s = (mantissa - 1) / (mantissa + 1)
    series = _horner(s * s, [1 / n for n in range(1, 21, 2)])
    return 2 * s * series + exponent.astype(jnp.float64) * math.log(2)


def _sine_cosine(angle):
    """Of uint64 in 2^-64 turns, to 1e-15: Taylor series within an eighth of a turn, then quadrants."""
    quadrant = (angle + 2**61) >> 62
    rest = jax.lax.bitcast_convert_type(angle - (quadrant << 62), jnp.int64)
    t = rest.astype(jnp.float64) * (math.pi / 2 * 2.0**-62)
    sine = t * _horner(t * t, [(-1) ** i / math.factorial(2 * i + 1) for i in range(8)])
    cosine = _horner(t * t, [(-1) ** i / math.factorial(2 * i) for i in range(9)])
    swap = (quadrant & 1) == 1
    sine, cosine = jnp.where(swap, cosine, sine), jnp.where(swap, sine, cosine)
    return _negated(sine, quadrant), _negated(cosine, quadrant + 1)


def _negated(x, quadrant):
    """-x where bit 1 of the quadrant is set; by bits, which CPUs do for several numbers at a time."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint64) ^ ((quadrant >> 1) << 63)
    return jax.lax.bitcast_convert_type(bits, jnp.float64)


def _horner(x, coefficients):
    total = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total
