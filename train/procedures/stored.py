"""Numbers that are stored, checked where they are stored, and read from there."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import lax

State = TypeVar("State")


def stored(values: State, is_sound: Callable[[State], jax.Array], mend: Callable[[State], State]) -> State:
    """Return `values`, or `mend(values)` where they are not sound, as the state of a loop.

    Compilers may compute a number again for each use, and round it otherwise. The state of a loop is one
    buffer, which the loop's condition and all readers of its result read, whatever made its first value and
    whatever surrounds it: `jax.vmap`, a scan, constants. The loop goes while the state is not sound, so a
    compiler cannot leave it out without knowing the numbers (proofs/released_numbers.md, section 1).

    Args:
      values: pytree of arrays.
      is_sound: -> () bool; of sound values no turn is made.
      mend: returns sound values, and changes each array for some value that it may have: an array that a loop
        never changes is no part of its state to a compiler.
    """
    return lax.while_loop(lambda state: ~is_sound(state), mend, values)
