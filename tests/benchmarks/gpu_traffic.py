"""What the program compiled for a GPU moves through its memory, without having the GPU.

    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 PYTHONPATH=. python tests/benchmarks/gpu_traffic.py

Needs the `cuda` extra, whose XLA compiles for a described Hopper chip. Three programs for plain draws:
signals by FFT and the recurrence as a scan over blocks; signals as windows; and the recurrence as one kernel.
The last column is the rate if all of it ran at the full bandwidth of an H200: a ceiling, no measurement.
Windows count as if every participation that is possible took place.
"""

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jaxacct.cli.commands.bench import SETTINGS
from jaxacct.kernels import gpu_recurrence, randomness
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals import base as proposals
from jaxacct.schemes import BMinSep
from jaxacct.strategies import BandedToeplitz
from tests.benchmarks.memory_traffic import bytes_moved

BANDWIDTH = 4.8e12  # bytes a second, the vendor's figure for an H200
BLOCKS = 8

# The vendor's figures for a Hopper chip (SXM), in the form XLA takes them.
CHIP = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
runtime_version { major: 13 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


def compiled_text(draw, sigma_shape, device, windows: bool, kernel: bool) -> str:
    """The program of `draw(keys, sigma)` for `BLOCKS` keys."""

    def from_words(key_words, sigma):
        return draw(jax.random.wrap_key_data(key_words, impl="threefry2x32"), sigma)

    words = jax.ShapeDtypeStruct((BLOCKS, 2), jnp.uint32)
    sigma = jax.ShapeDtypeStruct(sigma_shape, jnp.float32)
    with (
        mock.patch.object(jax, "default_backend", lambda: "gpu"),
        mock.patch.object(proposals, "few_windows", lambda *_: windows),
        mock.patch.object(gpu_recurrence, "_works", lambda: kernel),
    ):
        program = jax.jit(from_words, in_shardings=(device, device), out_shardings=device)
        return program.lower(words, sigma).compile().as_text()


def plain_draws(mechanism: Mechanism):
    proposal = proposals.plain(mechanism, "remove")

    def draw(keys, sigma):
        options = mechanism.scheme, mechanism.strategy, sigma, (), jnp.dtype(jnp.float32)
        return jax.vmap(lambda key: proposal.draw_block(key, *options))(keys)

    return draw


def main() -> None:
    import jax_plugins.xla_cuda13  # noqa: F401  (finds the CUDA libraries that pip brought)

    topology = topologies.get_topology_desc(platform="cuda", target_config=CHIP, topology="1x1x1")
    device = SingleDeviceSharding(topology.devices[0])
    mechanisms = []
    for n, b, size, batch, sigma, _ in SETTINGS:
        scheme = BMinSep.from_batch_size(dataset_size=size, batch_size=batch, iterations=n, min_separation=b)
        mechanisms.append(Mechanism(scheme, BandedToeplitz.square_root(b), sigma))
    print("| n | b | program | kB a sample | passes over n float32 | ceiling, million samples/s |")
    print("|---|---|---|---|---|---|")
    names = {(False, False): "FFT, scan", (True, False): "windows, scan", (True, True): "windows, kernel"}
    for mechanism, how in itertools.product(mechanisms, names):
        n, b = mechanism.scheme.iterations, mechanism.strategy.bands
        text = compiled_text(plain_draws(mechanism), (), device, *how)
        assert ("triton" in text) == how[1]
        moved = bytes_moved(text) / (BLOCKS * randomness.BLOCK_SIZE)
        passes, rate = moved / (4 * n), BANDWIDTH / moved / 1e6
        print(f"| {n} | {b} | {names[how]} | {moved / 1000:.0f} | {passes:.1f} | {rate:.1f} |")


if __name__ == "__main__":
    main()
