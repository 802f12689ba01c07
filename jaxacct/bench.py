"""How fast this machine draws privacy losses."""

import resource
import time

import jax

from jaxacct import proposals, randomness, sampling
from jaxacct.mechanism import Mechanism
from jaxacct.replicas import replica_proposal
from jaxacct.schemes import BMinSep
from jaxacct.toeplitz import BandedToeplitz

# (iterations, bands and separation, data set size, batch size, noise multiplier, epsilon)
SETTINGS = ((7200, 256, 14_745_600, 1793, 0.47, 10.0), (1024, 16, 51_200, 200, 1.0, 4.0))


def measure(samples: int) -> dict:
    """Samples per second of plain and two-replica draws in both settings, compile time and peak memory."""
    rows = []
    for n, b, size, batch, sigma, epsilon in SETTINGS:
        scheme = BMinSep.from_batch_size(dataset_size=size, batch_size=batch, iterations=n, min_separation=b)
        mechanism = Mechanism(scheme, BandedToeplitz.square_root(b), sigma)
        for proposal in (
            proposals.plain(mechanism, "remove"),
            replica_proposal(mechanism, 2, epsilon),
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
    }


def _time(proposal, samples: int) -> dict:
    stream = randomness.fresh_key()
    blocks = -(-samples // randomness.BLOCK_SIZE)

    def run(count):
        started = time.perf_counter()
        drawn = sum(d.loss.size for d in sampling.draw_in_batches(proposal, stream, 0, count))
        return drawn, time.perf_counter() - started

    _, first = run(sampling.blocks_at_once(proposal.mechanism))
    drawn, seconds = min((run(blocks) for _ in range(3)), key=lambda pair: pair[1])
    return {
        "samples_per_second": drawn / seconds,
        "compile_seconds": max(0.0, first - seconds * sampling.blocks_at_once(proposal.mechanism) / blocks),
    }
