"""Frozen dataclasses from plain JSON values, the type of every leaf checked; and two records compared."""

import dataclasses
import functools
import itertools
import math
import operator
import sys
import types
import typing
from typing import Any


def exact(value: float) -> str:
    """All digits, as 0.0010000001 is not 0.001; without a trailing .0."""
    return repr(float(value)).removesuffix(".0")


_LARGEST = sys.float_info.max


def read(kind, value, name: str) -> Any:
    """`value` as a `kind`: bool, int, float, str, None, tuple, dict by text, dataclass, or a union with None.

    Numbers are finite, texts are printable, an int may stand for a float, and nothing else stands for
    anything else. A dataclass must have all of its fields and no others.

    Args:
      name: of the value, for the error.

    Raises:
      ValueError: in one line, with the name of the leaf.
    """
    origin, parts = _parts(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in parts:
            return None
        return read(next(part for part in parts if part is not type(None)), value, name)
    if kind is float:
        if type(value) not in (int, float) or not -_LARGEST <= value <= _LARGEST:  # false for NaN
            raise ValueError(f"{name} must be a finite number, was {value!r:.80}")
        return float(value)
    if kind is str and isinstance(value, str):
        if not value.isprintable():  # it could pass for other lines of what is shown
            raise ValueError(f"{name} must be printable text in one line, was {value!r:.80}")
        return str(value)
    if kind in (bool, int, str):
        if type(value) is not kind:
            raise ValueError(f"{name} must be of type {kind.__name__}, was {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a list, was {value!r}")
        if len(parts) == 2 and parts[1] is Ellipsis:
            if parts[0] is int and _integers(value):
                return tuple(value)
            if parts[0] == tuple[int, int] and _pairs(value):  # a histogram at once, not number by number
                return tuple(map(tuple, value))
            return tuple(read(parts[0], item, f"{name}[{i}]") for i, item in enumerate(value))
        if len(value) != len(parts):
            raise ValueError(f"{name} must have {len(parts)} entries, had {len(value)}")
        return tuple(
            read(part, item, f"{name}[{i}]") for i, (part, item) in enumerate(zip(parts, value, strict=True))
        )
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be an object, was {value!r}")
        return {
            read(str, key, f"{name} key"): read(parts[1], item, f"{name}.{key}")
            for key, item in value.items()
        }
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, name)
    raise TypeError(f"{name}: values of type {kind} cannot be read")


@functools.cache
def _parts(kind) -> tuple[Any, tuple]:
    return typing.get_origin(kind), typing.get_args(kind)


def _integers(values) -> bool:
    """Whether all are integers, and none a bool."""
    return set(map(type, values)) <= {int}


def _pairs(values) -> bool:
    """Whether all are pairs of integers."""
    return (
        set(map(type, values)) <= {list, tuple}
        and set(map(len, values)) <= {2}
        and _integers(itertools.chain.from_iterable(values))
    )


def _dataclass(kind, value, name: str):
    wanted = _field_types(kind)
    check_fields(value, wanted, name)
    return kind(**{field: read(of, value[field], f"{name}.{field}") for field, of in wanted.items()})


@functools.cache
def _field_types(kind) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def check_fields(data, names, name: str) -> None:
    """Check that `data` is an object with exactly the fields `names`; ValueError in one line otherwise."""
    if not isinstance(data, dict):
        raise ValueError(f"{name} must be an object, was {data!r:.80}")
    missing, unknown = sorted(set(names) - set(data)), sorted(set(data) - set(names), key=str)
    if unknown or missing:
        what = f"lacks {missing[0]}" if missing else f"has the unknown field {unknown[0]!r:.80}"
        raise ValueError(f"{name} {what}")


def as_read(value):
    """Plain values as JSON gives them back."""
    if isinstance(value, dict):
        return {key: as_read(item) for key, item in value.items()}
    return [as_read(item) for item in value] if isinstance(value, list | tuple) else value


def differences(stored, expected, name: str = "") -> list[str]:
    """Where two records differ, one line a leaf; numbers may differ by 1e-9 of themselves.

    The allowance is for the mathematical functions of another machine. NaN differs from everything.
    """
    if dataclasses.is_dataclass(stored) and type(stored) is type(expected):
        names = [field.name for field in dataclasses.fields(stored)]
        pairs = {field: (getattr(stored, field), getattr(expected, field)) for field in names}
    elif isinstance(stored, dict) and isinstance(expected, dict) and set(stored) == set(expected):
        pairs = {key: (stored[key], expected[key]) for key in stored}
    elif isinstance(stored, list | tuple) and isinstance(expected, list | tuple):
        if len(stored) != len(expected):
            return [f"{name} has {len(stored)} entries for {len(expected)}"]
        if (
            _pairs(stored)
            and _pairs(expected)
            and all(map(operator.eq, map(tuple, stored), map(tuple, expected)))
        ):
            return []  # histograms at once
        pairs = {str(i): pair for i, pair in enumerate(zip(stored, expected, strict=True))}
    else:
        return [] if _same(stored, expected) else [f"{name} is {stored!r} where {expected!r} follows"]
    return [line for key, pair in pairs.items() for line in differences(*pair, f"{name}.{key}".lstrip("."))]


def _same(stored, expected) -> bool:
    if isinstance(stored, float) and isinstance(expected, float | int) and not isinstance(expected, bool):
        return math.isclose(stored, expected, rel_tol=1e-9, abs_tol=0.0)
    if isinstance(expected, float) and type(stored) is int:
        return math.isclose(stored, expected, rel_tol=1e-9, abs_tol=0.0)
    if isinstance(stored, str) and isinstance(expected, str):  # an enumeration's member is its text
        return str(stored) == str(expected)
    return type(stored) is type(expected) and stored == expected
