"""`python -m jaxacct`, and the command `jaxacct`: nothing is imported before Ctrl-C can be answered."""

import gc
import os


def main() -> None:
    """Run the command line."""
    # Before NumPy is loaded. What BLAS sees here is small, and its threads take ten times as long for that as
    # one does; whatever is large is drawn by XLA, which has threads of its own.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(100_000, 50, 100)  # looking for cycles is a tenth of what importing and tracing takes
    try:
        from jaxacct import cli

        cli.main()
    except KeyboardInterrupt:
        from jaxacct._interrupted import leave

        leave("jaxacct: interrupted")
    except SystemExit as stop:
        from jaxacct._interrupted import end

        end(stop)


if __name__ == "__main__":
    main()
