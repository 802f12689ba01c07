"""Frozen dataclasses from plain JSON values, the type of every leaf checked; and two records compared."""

import math
from typing import Any

import msgspec


def exact(value: float) -> str:
    """Return all digits, as 0.0010000001 is not 0.001; without a trailing .0."""
    return repr(float(value)).removesuffix(".0")


def read(kind, value, name: str) -> Any:
    """Return plain JSON values as a `kind` (of msgspec), the type of every leaf checked strictly.

    Numbers are finite, texts are printable, an int is accepted for a float, and no other conversion is made.
    A dataclass must have all of its fields and no others. ValueError in one line that names the leaf.
    """
    try:
        record = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        raise ValueError(f"{name}{path.rstrip('`')}: {what}") from None
    _check(value, msgspec.to_builtins(record), name)
    return record


def _check(value, read_as, name: str) -> None:
    """Refuse values that msgspec accepts: other fields, non-finite numbers, text of several lines."""
    if isinstance(value, dict):
        missing, unknown = sorted(read_as.keys() - value.keys()), sorted(value.keys() - read_as.keys())
        if missing or unknown:
            what = f"lacks {missing[0]}" if missing else f"has the unknown field {unknown[0]!r:.80}"
            raise ValueError(f"{name} {what}")
        for key, item in value.items():
            _check(key, key, f"{name} key")
            _check(item, read_as[key], f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for place, pair in enumerate(zip(value, read_as, strict=True)):
            _check(*pair, f"{name}[{place}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    elif isinstance(value, str) and not value.isprintable():  # it could imitate other lines of the output
        raise ValueError(f"{name} must be printable text in one line, got {value!r:.80}")


def differences(stored, expected, name: str = "") -> list[str]:
    """Return where two JSON values differ, one line per leaf; numbers may differ by a relative 1e-9.

    The allowance is for the mathematical functions of another machine. NaN differs from everything.
    """
    if isinstance(stored, dict) and isinstance(expected, dict) and set(stored) == set(expected):
        pairs = {key: (stored[key], expected[key]) for key in stored}
    elif isinstance(stored, list | tuple) and isinstance(expected, list | tuple):
        if len(stored) != len(expected):
            return [f"{name} has {len(stored)} entries for {len(expected)}"]
        pairs = {str(i): pair for i, pair in enumerate(zip(stored, expected, strict=True))}
    else:
        return [] if _same(stored, expected) else [f"{name} is {stored!r} where {expected!r} follows"]
    return [line for key, pair in pairs.items() for line in differences(*pair, f"{name}.{key}".lstrip("."))]


def _same(stored, expected) -> bool:
    numbers = {type(stored), type(expected)}
    if numbers <= {int, float} and numbers != {int}:
        return math.isclose(stored, expected, rel_tol=1e-9, abs_tol=0.0)
    # An enumeration's member is its text.
    return (isinstance(stored, str) or type(stored) is type(expected)) and stored == expected
