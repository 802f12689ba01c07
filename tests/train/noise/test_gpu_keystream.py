"""The GPU's kernel of the key stream: by Pallas' interpreter without a GPU, and as it is where one is."""

import functools

import jax
import numpy as np
import pytest

from tests.gpus import lowered
from train.noise import chacha, gpu_keystream, normals

KEY = np.arange(8, dtype=np.uint32) * 0x9E3779B9
HAS_GPU = jax.default_backend() == "gpu"
words = functools.partial(gpu_keystream.words, interpret=not HAS_GPU)


@pytest.mark.parametrize(("number", "step"), [(1, 2**31 - 1), (129, 0)])
def test_words_are_those_of_the_program(number, step):
    """Of any blocks: parts of arrays have others than the first."""
    numbers = 2**32 - 1 - 3 * np.arange(number, dtype=np.uint32)
    ours = np.asarray(words(KEY, np.int32(step), numbers))
    expected = jax.jit(chacha.blocks)(KEY, (numbers, step, 0, 0))
    np.testing.assert_array_equal(ours, expected)


def test_the_kernel_compiles_for_a_gpu():
    text = lowered(gpu_keystream.words, KEY, np.int32(3), np.arange(1000, dtype=np.uint32))
    assert "chacha20" in text and "triton" in text


def test_normals_are_those_of_other_devices(monkeypatch):
    """A machine with a GPU may use its CPU, too."""

    def drawn() -> np.ndarray:
        program = jax.jit(lambda key: normals.standard_normals.__wrapped__(key, 5, 1001))
        with jax.default_device(jax.devices("cpu")[0]):
            on_cpu = program(KEY)
        np.testing.assert_allclose(program(KEY), on_cpu, rtol=0, atol=1e-14)
        return np.asarray(on_cpu)

    expected = drawn()
    monkeypatch.setattr(gpu_keystream, "serves", lambda: True)
    monkeypatch.setattr(gpu_keystream, "words", words)
    if not HAS_GPU:
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cuda, default: cuda(*args))
    np.testing.assert_allclose(drawn(), expected, rtol=0, atol=1e-14)


def test_the_probe_compares_with_the_program(monkeypatch):
    """While another program is traced, too; one wrong bit, and no GPU, are refused."""
    probe = gpu_keystream._works.__wrapped__
    assert probe() == HAS_GPU
    monkeypatch.setattr(gpu_keystream, "words", words)
    seen = []
    jax.jit(lambda x: (seen.append(probe()), x)[1])(1.0)
    assert seen == [True]
    wrong = jax.jit(lambda *given: words(*given).at[15, -1].add(1))
    monkeypatch.setattr(gpu_keystream, "words", wrong)
    assert not probe()


def test_a_gpu_is_served(monkeypatch):
    monkeypatch.setattr(gpu_keystream, "_works", lambda: True)
    for backend in ("cpu", "gpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert gpu_keystream.serves() == (backend == "gpu")
