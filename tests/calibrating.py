"""`jaxacct.calibrate` with all numbers side by side, for tables of calls."""

import dataclasses

import pytest

import jaxacct
from jaxacct import CalibrationOptions
from jaxacct.cli import main as cli
from jaxacct.cli.commands import calibrate as command
from jaxacct.cli.problem import TargetOptions
from jaxacct.recommendation import result

STEERING = {field.name for field in dataclasses.fields(CalibrationOptions)}
WORDS = {field.name for field in dataclasses.fields(TargetOptions)}


def target_of(**words):
    """The target that words of the command line give."""
    return TargetOptions(**words).target()


def calibrate(scheme, strategy, **given):
    """`jaxacct.calibrate` where a target and what steers its search are keywords."""
    steering = {name: given.pop(name) for name in STEERING & set(given)}
    words = {name: given.pop(name) for name in WORDS & set(given)}
    return jaxacct.calibrate(
        scheme, strategy, target=target_of(**words), options=CalibrationOptions(**steering), **given
    )


class EnoughError(Exception):
    """What is calibrated is known."""


def asked_of(monkeypatch):
    """A function of words after `jaxacct calibrate`: (scheme, strategy, options) that it calibrates."""
    seen: list[tuple] = []

    def stop(scheme, strategy, **options):
        seen.append((scheme, strategy, options))
        raise EnoughError

    for module in (command, result):
        monkeypatch.setattr(module, "calibrate", stop)

    def asked(*words):
        with pytest.raises(EnoughError):
            cli.run(["calibrate", *words])
        return seen.pop()

    return asked
