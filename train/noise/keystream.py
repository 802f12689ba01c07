"""Words of ChaCha20 from OpenSSL, eight times as fast as from a program of XLA on CPUs.

Python's own `ssl` and `hashlib` are made with the library (libcrypto), which is loaded by `ctypes`; where it
is not found, or does not compute what RFC 8439 says, `words` gives None, and whoever asked computes the same
words otherwise.
"""

import ctypes
import functools
import sys

import numpy as np

# Versions 3 and 1.1, which have the functions below. On a Mac a name without version ends the process.
_NAMES = {
    "linux": ("libcrypto.so.3", "libcrypto.so.1.1"),
    "darwin": ("libcrypto.3.dylib", "libcrypto.1.1.dylib"),
    "win32": ("libcrypto-3-x64.dll", "libcrypto-3.dll", "libcrypto-1_1-x64.dll"),
}
_AT_A_TIME = 2**17  # bytes; caches hold them
_ALIGNED = 64  # bytes, as XLA wants arrays that it does not copy


class Room:
    """Memory for words, asked of the system once: giving new pages every step takes a fifth of the time."""

    def __init__(self):
        self._all = np.empty(0, np.uint8)

    def of(self, size: int) -> np.ndarray:
        """(size,) uint8, the same memory every time."""
        if len(self._all) != size + _ALIGNED:
            self._all = np.empty(size + _ALIGNED, np.uint8)
        return self._all[-self._all.ctypes.data % _ALIGNED :][:size]


def words(key: np.ndarray, step: int, number: int, room: Room | None = None) -> np.ndarray | None:
    """(number,) uint64: the key stream from block 0 on with the nonce (step, 0, 0); None without OpenSSL.

    Args:
      key: (8,) uint32.
      step: 0 to 2^32 - 1.
      number: a multiple of 8, a block.
      room: where words stand until it is given again; of one thread. By default they are kept.
    """
    library = _library() if sys.byteorder == "little" else None
    return None if library is None else _words(library, key, (0, step, 0, 0), number, room)


def _words(
    library,
    key: np.ndarray,
    counter: tuple[int, int, int, int],
    number: int,
    room: Room | None = None,
) -> np.ndarray | None:
    size = 8 * number
    out = (room or Room()).of(size)
    zeros = np.zeros(min(size, _AT_A_TIME), np.uint8)
    key, iv = np.ascontiguousarray(key, np.uint32), np.array(counter, np.uint32)
    if key.shape != (8,):
        raise ValueError(f"key must be 8 words of 32 bits, had shape {key.shape}")
    context, written = library.EVP_CIPHER_CTX_new(), ctypes.c_int()
    if not context:
        return None

    def encrypted(at: int) -> bool:
        """Zeros, so that the key stream itself is written."""
        length = min(_AT_A_TIME, size - at)
        place = out.ctypes.data + at
        done = library.EVP_EncryptUpdate(context, place, ctypes.byref(written), zeros.ctypes.data, length)
        return done == 1 and written.value == length

    try:
        cipher = library.EVP_chacha20()
        done = library.EVP_EncryptInit_ex(context, cipher, None, key.ctypes.data, iv.ctypes.data)
        right = done == 1 and all(encrypted(at) for at in range(0, size, _AT_A_TIME))
    finally:
        library.EVP_CIPHER_CTX_free(context)
    return out.view(np.uint64) if right else None


@functools.cache
def _library():
    """The library with its functions' types, or None; computed words are looked at first."""
    for name in _NAMES.get(sys.platform, ()):
        try:
            library = ctypes.CDLL(name)
            pointer = ctypes.c_void_p
            for function, result, *arguments in (
                ("EVP_CIPHER_CTX_new", pointer),
                ("EVP_CIPHER_CTX_free", None, pointer),
                ("EVP_chacha20", pointer),
                ("EVP_EncryptInit_ex", ctypes.c_int, pointer, pointer, pointer, pointer, pointer),
                ("EVP_EncryptUpdate", ctypes.c_int, pointer, pointer, ctypes.POINTER(ctypes.c_int), pointer,
                 ctypes.c_int),
            ):  # fmt: skip
                getattr(library, function).restype = result
                getattr(library, function).argtypes = arguments
        except (OSError, AttributeError):
            continue
        if _is_right(library):
            return library
    return None


def _is_right(library) -> bool:
    """Whether it gives the block of RFC 8439, section 2.3.2, and of many blocks what it gives of each."""
    key = np.frombuffer(bytes(range(32)), np.uint32)
    block = _words(library, key, (1, 0x09000000, 0x4A000000, 0), 8)
    expected = (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    if block is None or block.tobytes().hex() != expected:
        return False
    # Of many it computes several at once, by other instructions; 29 are left of what it is given at a time.
    given, left = _AT_A_TIME // 64, 29
    many = _words(library, key, (0, 7, 0, 0), 8 * (given + left))
    for i in [*range(left), *range(given - left, given + left)]:
        one = _words(library, key, (i, 7, 0, 0), 8)
        if many is None or one is None or (many[8 * i : 8 * i + 8] != one).any():
            return False
    return True
