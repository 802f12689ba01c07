"""Words and keys of the counter-based generator Threefry-2x32-20, for use inside kernels.

All have the bits of `jax.random`. `two_words` has the twenty rounds unrolled, so that XLA computes them where
they are used; JAX runs them as a loop on a CPU, over arrays in memory: 25 of 65 microseconds a sample at
n = 7200. The others keep JAX's loop: unrolled, they are recomputed for every use, and some programs no longer
finish compiling.

Keys are JAX keys of the implementation "threefry2x32", or `Branch`es of trees of them: splitting keys was
half of a program's random loops, and a loop takes 25 milliseconds to lower and compile.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def two_words(key, shape):
    """Return two independent arrays of `shape` of uniform uint32 words, as `jax.extend.random.threefry_2x32`.

    Both words of a counter are used, where `bits_32` keeps one of them.
    """
    first, second = _words_of(key)
    size = math.prod(shape)
    counters = jnp.arange(2 * size, dtype=jnp.uint32)
    return _rounds(first, second, counters[:size].reshape(shape), counters[size:].reshape(shape))


@jax.jit  # traced once per shape, not once per program: a third of a program's tracing time otherwise
def _rounds(first, second, x, y):
    """Return the words of the counters (x, y) under the key of two words; all shapes broadcast."""
    keys = (first, second, first ^ second ^ jnp.uint32(0x1BD11BDA))
    x, y = jnp.broadcast_arrays(x + keys[0], y + keys[1])

    def shaped(number):
        return jnp.broadcast_to(number, x.shape)

    # By `lax`, as operators of arrays take five times as long to trace.
    shifts = [[(shaped(np.uint32(r)), shaped(np.uint32(32 - r))) for r in four] for four in _ROTATIONS]
    for injection in range(5):
        for left, right in shifts[injection % 2]:
            x = lax.add(x, y)
            y = lax.bitwise_or(lax.shift_left(y, left), lax.shift_right_logical(y, right))
            y = lax.bitwise_xor(y, x)
        x = lax.add(x, shaped(keys[(injection + 1) % 3]))
        y = lax.add(y, shaped(keys[(injection + 2) % 3] + jnp.uint32(injection + 1)))
    return x, y


def bits_32_of(keys, size: int):
    """Return (number of keys, size) uint32: the draws of `bits_32` with each of the keys, all at once.

    Inside a loop over steps every step would run JAX's loop over the rounds on a few hundred numbers: half of
    the time of drawing batch sizes.
    """
    # Where it is off, `jax.random.bits` counts in another way.
    if not _splits_are_foldings():
        return jax.vmap(lambda key: bits_32(key, (size,)))(keys)
    words = jax.random.key_data(keys)
    x, y = _rounds(words[:, :1], words[:, 1:], jnp.uint32(0), jnp.arange(size, dtype=jnp.uint32)[None])
    return x ^ y


def bits_32(key, shape):
    """Return uniform uint32 words of `shape`: the bits of `jax.random.bits`, drawn flat.

    XLA compiles the rounds of threefry over one long axis in half the time it takes over several.
    """
    return jax.random.bits(whole(key), (math.prod(shape),), jnp.uint32).reshape(shape)


def bits_32_at_once(key, shape):
    """Return the words of `bits_32` by unrolled rounds: a quarter of the time for many, on a CPU.

    For words that are used once, and not in a loop (see above).
    """
    return bits_32_of(whole(key)[None], math.prod(shape))[0].reshape(shape)


def bits_32_at(key, size: int, places):
    """Return uint32 of the shape of `places`: these words of `bits_32(key, (size,))`, without the others."""
    if not _splits_are_foldings():
        return bits_32(key, (size,))[places]
    first, second = _words_of(key)
    x, y = _rounds(first, second, jnp.uint32(0), places.astype(jnp.uint32))
    return x ^ y


# Keys split off each key of a tree, level by level; a block's draws seldom need more.
_WIDTHS = (3, 3, 2, 2, 2)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=["level", "leaf"])
@dataclasses.dataclass(frozen=True)
class Branch:
    """Key whose descendants are tabulated: `split` and `fold_in` only look them up.

    Attributes:
      words: (levels, leaves, 2) uint32: the key at each level on the way to each leaf of the tree.
      level: how often it was split off; 0 is the key that the tree was made of.
      leaf: the first leaf below it.
    """

    words: jax.Array
    level: int
    leaf: int

    @property
    def children(self) -> int:
        """Number of keys of `split` that are tabulated."""
        return (*_WIDTHS, 0)[self.level]

    def child(self, number: int) -> "Branch":
        """Return the key that `fold_in` has for this number, below `children`."""
        leaves = math.prod(_WIDTHS[self.level + 1 :])
        return Branch(self.words, self.level + 1, self.leaf + number * leaves)


def trees(keys):
    """Return the (number of keys,) trees of JAX keys as one `Branch`, computed once for a whole program.

    The keys themselves where JAX splits differently.
    """
    return _trees(keys) if _splits_are_foldings() else keys


@jax.jit
def _trees(keys):
    leaves = np.arange(math.prod(_WIDTHS))
    below = np.cumprod((*_WIDTHS, 1)[::-1])[-2::-1]
    numbers = leaves // below[:, None] % np.array(_WIDTHS)[:, None]

    def level(above, numbers):
        found = jax.vmap(jax.vmap(jax.random.fold_in), (0, None))(above, numbers)
        return found, jax.random.key_data(found)

    roots = jnp.broadcast_to(keys[:, None], (*keys.shape, leaves.size))
    words = lax.scan(level, roots, jnp.asarray(numbers, jnp.uint32))[1]
    words = jnp.concatenate([jax.random.key_data(roots)[None], words])
    return Branch(words.swapaxes(0, 1), 0, 0)


def _splits_are_foldings() -> bool:
    """Return whether the keys of `jax.random.split` are those of `fold_in` with 0, 1, .."""
    return jax.config.jax_threefry_partitionable  # pyrefly: ignore[missing-attribute]


def _words_of(key):
    """Return (2,) uint32: the words of a key."""
    if isinstance(key, Branch):
        return key.words[key.level, key.leaf]
    return jax.random.key_data(key)


def whole(key):
    """Return the JAX key of one that may be a `Branch`."""
    if isinstance(key, Branch):
        return jax.random.wrap_key_data(_words_of(key), impl="threefry2x32")
    return key


def split(key, num: int = 2):
    """Return `num` keys as a sequence: those of `jax.random.split`, looked up where tabulated."""
    if isinstance(key, Branch) and num <= key.children:
        return tuple(map(key.child, range(num)))
    return jax.random.split(whole(key), num)


def split_array(key, num: int):
    """Return (num,) JAX keys, those of `split`, as one array."""
    return jax.random.split(whole(key), num)


def fold_in(key, number):
    """Return the key of `jax.random.fold_in`, for a number below 2^32."""
    if isinstance(key, Branch) and isinstance(number, int) and 0 <= number < key.children:
        return key.child(number)
    return jax.random.fold_in(whole(key), number)
