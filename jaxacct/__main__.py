"""Entry point of `python -m jaxacct` and of the command `jaxacct`; imports follow the Ctrl-C handler."""

import os


def main() -> None:
    """Run the command line."""
    # Before NumPy is loaded. What BLAS sees here is small, and its threads take ten times as long for that as
    # one does; whatever is large is drawn by XLA, which has threads of its own.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # XLA logs 4 kB for every cached program whose compiler had preferences, such as "prefer-no-gather" on
    # Intel processors. Its errors are exceptions as well.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        from jaxacct.cli import main as cli

        cli.main()
    except KeyboardInterrupt:
        from jaxacct.cli.interrupted import leave

        leave("jaxacct: interrupted")


if __name__ == "__main__":
    main()
