"""Public names of a package that the first use of each loads: its stub lists them for type checkers, too."""

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any


def homes_of(init: str) -> dict[str, str]:
    """Return {public name: its module} by the stub beside an `__init__.py`, whose path is `init`.

    Names are those that it imports under their own name, where the module is none of `jaxacct` itself.
    """
    stub = ast.parse(Path(init).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module != "jaxacct"]
    return {
        alias.name: "." * node.level + str(node.module)
        for node in imports
        for alias in node.names
        if alias.asname in (None, alias.name)
    }


def lazy(
    package: str, init: str, modules: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package with the stub of `homes_of`.

    Of `modules`, {name: module}, the modules themselves are attributes, too.
    """
    homes = homes_of(init)

    def load(name: str) -> Any:
        if name in homes:
            value = getattr(importlib.import_module(homes[name], package), name)
        elif name in modules:
            value = importlib.import_module(modules[name])
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted(
            {*homes, *modules, *(name for name in vars(sys.modules[package]) if name.startswith("__"))}
        )

    return load, names, sorted(homes)
