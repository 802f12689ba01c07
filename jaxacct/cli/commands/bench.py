"""`jaxacct bench`: how fast this machine draws privacy losses."""

import resource
import time

import jax

from jaxacct.cli.output import show
from jaxacct.cli.usage import Integer
from jaxacct.common import validate
from jaxacct.common.progress import watch
from jaxacct.kernels import randomness
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals import base, registry
from jaxacct.schemes import BMinSep
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.strategies import BandedToeplitz

# (iterations, bands and separation, data set size, batch size, noise multiplier, epsilon)
SETTINGS = ((7200, 256, 14_745_600, 1793, 0.47, 10.0), (1024, 16, 51_200, 200, 1.0, 4.0))


def command(*, samples: Integer = 8192, json: bool = False) -> int:
    """Measure draws of the privacy loss per second on this machine.

    For example:

        jaxacct bench

    Args:
      samples: samples for each setting, after a first pass that compiles.
      json: print one JSON object.
    """
    validate.positive_integer("samples", samples)
    with watch():
        rates = measure(samples)
    if json:
        show(rates, True)
        return 0
    for row in rates["settings"]:
        rate = f"{row['samples_per_second']:,.0f} samples/s"
        extra = f" (compile {row.get('compile_seconds', 0):.1f} s)"
        print(f"n={row['iterations']} b={row['bands']} {row['proposal']}: {rate}{extra}")
    print(f"{rates['device']}, peak memory {rates['peak_memory_mb']:.0f} MB")
    return 0


def measure(samples: int) -> dict:
    """Return samples per second of plain and two-replica draws, compile time and peak memory."""
    rows, spec = [], base.ProposalSpec("replicas", (2,))
    for n, b, size, batch, sigma, epsilon in SETTINGS:
        scheme = BMinSep.from_batch_size(dataset_size=size, batch_size=batch, iterations=n, min_separation=b)
        mechanism = Mechanism(scheme, BandedToeplitz.square_root(b), sigma)
        for proposal in (
            base.plain(mechanism, Direction.REMOVE),
            registry.build(base.Setting(mechanism, epsilon, Direction.REMOVE, None), spec),
        ):
            rows.append(
                {"iterations": n, "bands": b, "noise_multiplier": sigma, "proposal": proposal.name}
                | _time(proposal, samples)
            )
    return {
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "jax": jax.__version__,
        "settings": rows,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "peak_device_memory_mb": _device_memory(),
    }


def _device_memory() -> float | None:
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return None if peak is None else peak / 2**20


def _time(proposal, samples: int) -> dict:
    stream = randomness.fresh_key()
    blocks = -(-samples // randomness.BLOCK_SIZE)

    def run(count):
        started = time.perf_counter()
        drawn = sum(d.loss.size for d in base.draw_in_batches(proposal, stream, 0, count))
        return drawn, time.perf_counter() - started

    _, first = run(base.blocks_at_once(proposal.mechanism))
    drawn, seconds = min((run(blocks) for _ in range(3)), key=lambda pair: pair[1])
    return {
        "samples_per_second": drawn / seconds,
        "compile_seconds": max(0.0, first - seconds * base.blocks_at_once(proposal.mechanism) / blocks),
    }
