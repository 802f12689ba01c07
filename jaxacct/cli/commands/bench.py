"""`jaxacct bench`."""

from jaxacct.cli import bench
from jaxacct.cli.output import show
from jaxacct.cli.usage import Integer
from jaxacct.common import validate
from jaxacct.common.progress import watch


def command(*, samples: Integer = 8192, json: bool = False) -> int:
    """Measure draws of the privacy loss per second on this machine.

    Args:
      samples: samples for each setting, after a first pass that compiles.
      json: print one JSON object.
    """
    validate.positive_integer("samples", samples)
    with watch():
        found = bench.measure(samples)
    if json:
        show(found, True)
        return 0
    for row in found["settings"]:
        rate = f"{row['samples_per_second']:,.0f} samples/s"
        extra = f" (compile {row.get('compile_seconds', 0):.1f} s)"
        if "noise_multipliers" in row:
            ratio = row["ratio_to_one_noise_multiplier"]
            extra = f", {row['noise_multipliers']} noise multipliers in {ratio:.1f} times the time of one"
        print(f"n={row['iterations']} b={row['bands']} {row['proposal']}: {rate}{extra}")
    print(f"{found['device']}, peak memory {found['peak_memory_mb']:.0f} MB")
    return 0
