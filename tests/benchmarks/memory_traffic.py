"""Bytes that a compiled XLA program reads and writes, counted from its text.

Every instruction outside fusions reads its operands from memory and writes its result there; a loop counts
with its number of turns. XLA's own `cost_analysis` counts a loop once, and reports nothing on a GPU.
"""

import math
import re

_WIDTH = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_WIDTH |= {"s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16}
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "iota"}
# These access only a part of their first operand, in place.
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is written

_HEADER = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"  (?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)")
_NAME = re.compile(r"%([\w.\-]+)")


def bytes_moved(text: str) -> float:
    """Return the bytes that one run of a program reads and writes, from its HLO (`compiled.as_text()`)."""
    computations, entry = _parse(text)
    return _computation(computations, computations.get(entry, []))


def _parse(text: str):
    """Return {computation: [(name, type, operation, operands, attributes)]} and the name of the entry."""
    computations: dict[str, list] = {}
    current, entry = [], ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif found := _INSTRUCTION.match(line):
            name, type_, operation, operands, attributes = found.groups()
            current.append((name, type_, operation, _NAME.findall(operands), attributes))
    return computations, entry


def _size(type_: str) -> int:
    """Return the bytes of an array or a tuple of arrays."""
    total = 0
    for element, shape in re.findall(r"(\w+)\[([\d,]*)\]", type_):
        total += _WIDTH.get(element, 0) * math.prod(int(d) for d in shape.split(",") if d)
    return total


def _computation(computations, instructions) -> float:
    sizes, total = {}, 0.0
    for result, type_, operation, operands, attributes in instructions:
        sizes[result] = _size(type_)
        called = re.search(r"(?:calls|to_apply|body)=%([\w.\-]+)", attributes)
        inner = computations[called[1]] if called else []
        if operation == "while":
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', attributes)
            total += (int(trips[1]) if trips else 1) * _computation(computations, inner)
        elif operation == "call":
            total += _computation(computations, inner)
        elif operation == "fusion":
            total += _fusion(inner, sizes[result])
        elif operation in _IN_PLACE:
            total += 2 * sizes[operands[_IN_PLACE[operation]]]
        elif operation not in _FREE:
            total += sizes[result] + sum(sizes.get(o, 0) for o in operands)
    return total


def _fusion(body, result: int) -> float:
    """Return the result and the operands in full, except for slices and partial writes."""
    sizes, users = {}, {}
    for name, type_, operation, arguments, _ in body:
        sizes[name] = _size(type_)
        for argument in arguments:
            users.setdefault(argument, []).append((name, operation, arguments))
    total = float(result)
    for name, type_, operation, arguments, _ in body:
        if operation == "parameter":
            total += _read(name, sizes, users)
        elif operation in _IN_PLACE:
            total -= _size(type_) - sizes[arguments[_IN_PLACE[operation]]]
    return total


def _read(parameter: str, sizes, users) -> float:
    seen = users.get(parameter, [])
    if len(seen) == 1 and seen[0][1] == "bitcast":
        return _read(seen[0][0], sizes, users)
    parts = []
    for name, operation, arguments in seen:
        if operation in ("slice", "dynamic-slice") and arguments[0] == parameter:
            parts.append(sizes[name])
        elif operation in _IN_PLACE and arguments[0] == parameter:
            parts.append(sizes[arguments[_IN_PLACE[operation]]] if operation == "scatter" else 0)
        else:
            return sizes[parameter]
    return float(min(sum(parts), sizes[parameter]))
