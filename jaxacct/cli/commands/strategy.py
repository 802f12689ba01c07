"""`jaxacct strategy`."""

from typing import Any

from jaxacct.cli import output
from jaxacct.cli.problem import coefficients
from jaxacct.cli.usage import Integer, Number
from jaxacct.common import validate
from jaxacct.common.progress import watch
from jaxacct.common.records import exact
from jaxacct.schemes import BMinSep
from jaxacct.strategies import OPTIMISED, by_name, prefix_sum_error, workload_error, workload_named


def command(
    *,
    iterations: Integer,
    bands: Integer | None = None,
    min_separation: Integer | None = None,
    strategy: str = "optimal",
    noise_multiplier: Number = 1.0,
    workload: str = "prefix-sum",
    out: str | None = None,
    plot: str | None = None,
    force: bool = False,
    json: bool = False,
) -> int:
    r"""Make a strategy matrix, print its prefix-sum error, write its coefficients.

    For example:

        jaxacct strategy --iterations 1000 --bands 16
        jaxacct strategy --iterations 1000 --bands 16 --workload momentum:0.9 \
            --out coefficients.txt

    Args:
      iterations: number of training steps.
      bands: bands of the matrix, unless they are in a file.
      min_separation: steps between participations, for optimal (the number of bands by default),
        optimal-inverse and buffered (by default one participation).
      strategy: optimal, square-root, bisr, optimal-inverse, buffered, or a file of coefficients.
      noise_multiplier: for the error.
      workload: what the error is of and an optimized matrix is made for: prefix-sum, or momentum:0.9,
        weight-decay:1e-4, learning-rate:0.1, cosine or linear, warmup:100, with commas between.
      out: write the coefficients to this file, one a line.
      plot: write pictures of the matrix, its inverse and the accumulated noise to this PNG.
      force: let --out replace a file that does not hold coefficients.
      json: print one JSON object.
    """
    validate.positive_number("noise_multiplier", noise_multiplier)
    validate.positive_integer("iterations", iterations)
    made_for = workload_named(workload, iterations)
    one_participation = strategy in ("optimal-inverse", "buffered")  # where no separation is given
    if strategy != "optimal" and not one_participation:
        output.refuse(f"together with strategy {strategy}", min_separation=min_separation)
    matrix = coefficients(strategy, bands)
    if matrix is None:
        if bands is None:
            raise ValueError("bands must be given, or a file of coefficients as strategy")
        validate.positive_integer("bands", bands)
    if out is not None and (one_participation or strategy == "bisr"):
        raise ValueError(f"out must not be given for {strategy}: it is made again from its bands")
    output.check_out(out, output.COEFFICIENTS, force)
    output.check_plot(plot, out)
    with watch():
        if matrix is None:
            assert bands is not None
            default = iterations if one_participation else bands
            scheme = BMinSep(iterations, default if min_separation is None else min_separation, 1.0)
            options = {"workload": made_for} if strategy in OPTIMISED else {}
            matrix = by_name(strategy, bands, scheme, **options)
        at: dict[str, Any] = dict(iterations=iterations, noise_multiplier=noise_multiplier)
        errors: dict[str, Any] = {"prefix_sum_error": prefix_sum_error(matrix, **at)}
        scale = {"given_norm": matrix.given_norm}
        if workload != "prefix-sum":
            errors |= {
                "workload": workload,
                "workload_error": workload_error(matrix, workload=made_for, **at),
            }
    if json:
        output.show({"coefficients": matrix.array.tolist()} | scale | errors, True)
    else:
        error = f"mean squared prefix-sum error {errors['prefix_sum_error']:.6g}"
        print(f"{matrix.bands} bands, {error} over {iterations} steps")
        if matrix.given_norm != 1:
            print(f"C has column norm 1: divided by {exact(matrix.given_norm)}")
        if workload != "prefix-sum":
            print(f"mean squared error of the iterates of {workload}: {errors['workload_error']:.6g}")
        if not out:
            print(" ".join(f"{c:.6g}" for c in matrix.array))
    if out:
        matrix.save(out)
    output.draw(plot, "strategy_matrices", matrix, iterations)
    return 0
