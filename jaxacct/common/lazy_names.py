"""Public names of a package that the first use of each loads: its stub lists them for type checkers, too."""

import ast
from pathlib import Path


def homes_of(init: str) -> dict[str, str]:
    """Return {public name: its module} by the stub beside an `__init__.py`, whose path is `init`.

    Names are those of lines `from module import name as name`, where the module is none of `jaxacct` itself.
    """
    stub = ast.parse(Path(init).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module != "jaxacct"]
    return {
        alias.name: str(node.module) for node in imports for alias in node.names if alias.asname == alias.name
    }
