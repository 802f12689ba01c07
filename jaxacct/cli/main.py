r"""Certified noise for differentially private training: calibrate a run, verify its plan, train under it.

With --json, standard output carries one JSON object and nothing else. Exit codes: 0 done and certified,
1 not certified, 2 bad input, 130 interrupted, 141 output closed by its reader. Bad input is one line on
standard error. With NO_COLOR set, nothing has colours.

    jaxacct recommend --dataset-size 50k --batch-size 200 \
        --iterations 1000 --epsilon 8 --delta 1e-5
    jaxacct calibrate --dataset-size 50k --batch-size 200 \
        --iterations 1000 --epsilon 8 --delta 1e-5 --out plan.json
    jaxacct show plan.json
"""

import os
import sys

from cyclopts import App

from jaxacct.cli.interrupted import leave
from jaxacct.cli.output import complain
from jaxacct.cli.usage import new_app, parse
from jaxacct.common.compilation_cache import keep_compiled_programs
from jaxacct.common.version import VERSION

OUTPUT_CLOSED = 141  # what a shell reports for a process that was ended by SIGPIPE

# A command's module is imported when the command is chosen, so that `--help` loads none of them.
COMMANDS = {
    "recommend": "Rank schemes, separations, bands and matrices by error at estimated noise; certify none.",
    "calibrate": "Find and certify the noise multiplier of a run, or certify the one given.",
    "verify": "Verify a plan again with fresh randomness.",
    "estimate": "Estimate delta at an epsilon, or epsilon at a delta. An estimate is not a guarantee.",
    "spent": "Print what the first steps of a run, or a list of events, have spent at most.",
    "show": "Print a plan after checking it.",
    "check": "Check a plan by the second implementation, with samples of its own.",
    "check-run": "Check that the model, the card and the plan of a run belong together.",
    "train": "Train a model under a plan.",
    "audit": "Attack a training run with canaries: a lower bound on its epsilon.",
    "attribution": "Prepare the graph of users and examples of an attribution plan.",
    "report": "Write a page for a privacy reviewer: statement, budget, evidence, risk, pictures.",
    "tradeoff": "Plans of generalised DP-SGD and of last iterates.",
}


TRAINING = {  # commands of the extra `train`
    "train": "jaxacct.train.command:train",
    "audit": "jaxacct.train.audit.command:run",
    "attribution": "jaxacct.train.batches.attribution:prepare",
}
HOMES = {"check-run": "jaxacct.cli.commands.check:of_run", "tradeoff": "jaxacct.cli.commands.tradeoff:app"}
HOMES |= TRAINING  # of commands that are not `command` in the module of their name


def app_for(chosen: str | None) -> App:
    """Return the command line; the help of the `chosen` command is its docstring, of the others one line."""
    app = new_app("jaxacct", __doc__, version=f"jaxacct {VERSION}")
    app.register_install_completion_command()
    for name, line in COMMANDS.items():
        where = HOMES.get(name, f"jaxacct.cli.commands.{name}:command")
        app.command(where, name=name, help=None if name == chosen else line)
    return app


def _not_certified() -> tuple[type[Exception], ...]:
    """Return the errors for which exit code 1 says "not certified"; imported only once there is an error."""
    from jaxacct.calibration.calibrate import NotCertifiedError
    from jaxacct.statistics.hockey_stick import NonFiniteLossError

    return NotCertifiedError, NonFiniteLossError


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exits with the codes in the module's docstring."""
    arguments = sys.argv[1:] if argv is None else argv
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as with `>&-`: what is printed goes nowhere
            setattr(sys, name, open(os.devnull, "w"))
    try:
        code = run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # As with `| head`. What is still buffered goes nowhere, or Python would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = OUTPUT_CLOSED
    raise SystemExit(code)


def run(arguments: list[str]) -> int:
    """Return the exit code of a command."""
    keep_compiled_programs()
    try:
        return parse(app_for(arguments[0] if arguments else None), arguments)() or 0
    except SystemExit:  # by which rich leaves where the reader of --help has closed the output
        return OUTPUT_CLOSED
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        leave(
            "jaxacct: interrupted; the same command goes on where the folder of its run or checkpoints ends"
        )
    except _not_certified() as error:
        complain(f"not certified: {error}")
        return 1
    except ImportError as error:
        if not TRAINING.keys() & set(arguments[:1]):
            raise
        complain(f"training needs `pip install 'jaxacct[train]'`: {error}")
    except (ValueError, NotImplementedError) as error:
        complain(str(error))
    except OSError as error:
        complain(": ".join(str(part) for part in (error.strerror or error, error.filename) if part))
    except MemoryError:
        complain("out of memory: iterations or samples must be smaller for this machine")
    return 2
