"""`jaxacct.calibrate` with all numbers side by side, for tables of calls."""

import dataclasses

import jaxacct
from jaxacct import CalibrationOptions
from jaxacct.cli.problem import TargetOptions

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
