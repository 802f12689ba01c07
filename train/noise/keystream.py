"""Key stream of ChaCha20 on the host, by the `cryptography` package: eight times as fast as a program of XLA.

The words are those that `train.noise.chacha` computes inside a program.
"""

import numpy as np

_ZEROS = bytes(2**17)  # encrypted, so that the key stream itself is written; caches hold as many bytes
_ALIGNMENT = 64  # bytes, as XLA wants arrays that it does not copy


class Room:
    """Memory for words, asked of the system once: giving new pages every step takes a fifth of the time."""

    def __init__(self):
        self._all = np.empty(0, np.uint8)

    def of(self, size: int) -> np.ndarray:
        """Return (size,) uint8, the same memory every time."""
        if len(self._all) != size + _ALIGNMENT:
            self._all = np.empty(size + _ALIGNMENT, np.uint8)
        return self._all[-self._all.ctypes.data % _ALIGNMENT :][:size]


def words(key: np.ndarray, step: int, number: int, room: Room | None = None) -> np.ndarray:
    """Return the key stream with the nonce (step, 0, 0), (number,) uint64.

    Args:
      key: (8,) uint32.
      step: 0 to 2^32 - 1.
      number: of words of 64 bits, at most 2^35 (2^32 blocks).
      room: where words stand until it is given again; of one thread. By default they are kept.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    key = np.ascontiguousarray(key, "<u4")
    if key.shape != (8,):
        raise ValueError(f"key must be 8 words of 32 bits, got shape {key.shape}")
    out = (room or Room()).of(8 * number)
    algorithm = algorithms.ChaCha20(key.tobytes(), np.array([0, step, 0, 0], "<u4").tobytes())
    encryptor = Cipher(algorithm, mode=None).encryptor()
    place = out.data
    for at in range(0, out.size, len(_ZEROS)):
        part = place[at : at + len(_ZEROS)]
        if encryptor.update_into(memoryview(_ZEROS)[: len(part)], part) != len(part):
            raise RuntimeError("ChaCha20 of the cryptography package wrote too few bytes")
    return out.view("<u8")
