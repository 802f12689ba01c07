"""Structure of the code: one-way imports, no code tests the type of a scheme or strategy, proofs resolve."""

import ast
import functools
import re
from pathlib import Path

import pytest

from jaxacct.schemes import SCHEMES
from jaxacct.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "jaxacct").rglob("*.py")) + sorted((ROOT / "train").rglob("*.py"))

# From the ground up; a room may use those before it. Rooms that are not named must not close a circle either.
ORDER = (
    "common kernels statistics strategies schemes mechanisms likelihood proposals accountants "
    "core verification estimates calibration recommendation report cli"
).split()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def trees():
    """Of every file once, and forgotten afterwards."""
    yield
    parsed.cache_clear()


@functools.cache
def modules() -> dict[str, set[str]]:
    """Modules of both packages, each with those that it imports, at its top or inside its functions.

    `jaxacct` itself is left out: it imports its public names when they are first used.
    """
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SOURCES
    }
    del paths["jaxacct"]
    found = {}
    for name, path in paths.items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        used = set()
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) + 1 - node.level] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                used |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        # A package is imported with its modules; what counts is the module that is asked for.
        modules_of = {one for one in used if any(other.startswith(f"{one}.") for other in used & set(paths))}
        found[name] = (used & set(paths)) - modules_of - {name}
    return found


def circles(used: dict[str, set[str]]) -> set[str]:
    """Return the modules on or between circles, by taking away those that import or serve nothing else."""
    left = {name: set(others) for name, others in used.items()}
    while free := {
        name for name in left if not left[name] or not any(name in others for others in left.values())
    }:
        left = {name: others - free for name, others in left.items() if name not in free}
    return set(left)


def room(module: str) -> str:
    """The folder below `jaxacct`, or the module that lies there itself; `train` is one room."""
    return module.split(".")[0 if module.startswith("train") else 1]


def test_no_arrow_goes_up():
    rooms: dict[str, set[str]] = {}
    for module, used in modules().items():
        rooms.setdefault(room(module), set()).update(set(map(room, used)) - {room(module)})
    assert set(ORDER) <= set(rooms)
    for name, used in rooms.items():
        after = ORDER[ORDER.index(name) + 1 :] if name in ORDER else ()
        upwards = [other for other in used if other in after]
        assert not upwards, f"{name} imports {upwards}, which come after it"
    assert not circles(rooms), "these import each other in a circle"


def test_no_modules_import_each_other_in_a_circle():
    used = modules()
    assert len(used) > 150
    assert not circles(used)
    # A circle is seen.
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"b", "c"}


TYPES = {kind.__name__ for kind in (*SCHEMES.values(), *STRATEGIES.values())}
TYPES |= {"Scheme", "Strategy", "Stationary"}
ASKED = {"scheme", "strategy"}


def type_tests(tree) -> int:
    """How often a scheme or strategy is asked for its type: `isinstance`, `issubclass`, `type`, `match`."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id not in ("isinstance", "issubclass", "type"):
                continue
            arguments = [inner for argument in node.args for inner in ast.walk(argument)]
            names = {n.id for n in arguments if isinstance(n, ast.Name)}
            names |= {n.attr for n in arguments if isinstance(n, ast.Attribute)}
            if node.func.id != "type" and names & TYPES:
                count += 1
            elif node.func.id == "type" and len(node.args) == 1 and names & ASKED:
                count += 1
        elif isinstance(node, ast.MatchClass) and getattr(node.cls, "id", None) in TYPES:
            count += 1
    return count


def test_nothing_asks_for_the_type_of_a_scheme_or_strategy():
    for path in SOURCES:
        where = str(path.relative_to(ROOT))
        if not where.startswith(("jaxacct/schemes/", "jaxacct/strategies/")):
            found = type_tests(parsed(path))
            assert not found, f"{where}: ask a method of the scheme instead"


def test_no_public_name_hides_a_module():
    """What a folder re-exports is never the module of that name by chance."""
    inits = [ROOT / "train" / "__init__.pyi", *(ROOT / "jaxacct").rglob("__init__.py")]
    for init in [*inits, *(ROOT / "jaxacct").rglob("__init__.pyi")]:
        modules = {path.stem for path in init.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
        names = set()
        for node in ast.walk(parsed(init)):
            if isinstance(node, ast.ImportFrom) and node.module != "jaxacct":  # which is the module itself
                names |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
        assert not names & modules, f"{init.relative_to(ROOT)} hides {names & modules}"


NAMES_OF_DIRECTIONS = {"remove", "add"}


def direction_strings(tree) -> int:
    """How often something is compared with the name of a direction, or looked up by it."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [inner for side in (node.left, *node.comparators) for inner in ast.walk(side)]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        elif isinstance(node, ast.Subscript):
            sides = [node.slice]
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "index"
        ):
            sides = list(ast.walk(node.func.value))
        else:
            continue
        constants = {side.value for side in sides if isinstance(side, ast.Constant)}
        count += bool(constants & NAMES_OF_DIRECTIONS)
    return count


def test_directions_are_members_and_not_strings():
    """`Direction` says what a direction is; a misspelt string would pass for the other."""
    for path in SOURCES:
        where = str(path.relative_to(ROOT))
        if where != "jaxacct/statistics/hockey_stick.py":
            found = direction_strings(parsed(path))
            assert not found, f"{where}: ask for a member of statistics.hockey_stick.Direction instead"


def references():
    """(file, page, section or theorem or None) of every reference to a page of proofs."""
    texts = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), ROOT / "README.md"]
    texts += sorted((ROOT / "jaxacct").rglob("*.md"))
    pattern = re.compile(r"proofs/(\w+\.md)\)?(?:[,:]?\s+(sections?|theorems?|lemmas?)\s+([\d.]+))?")
    for path in texts:
        for page, kind, number in pattern.findall(re.sub(r"\s+#?\s*", " ", path.read_text(encoding="utf-8"))):
            yield path.relative_to(ROOT), page, kind.rstrip("s"), number.rstrip(".")


def test_every_reference_to_a_proof_resolves():
    found = list(references())
    assert len(found) > 20
    for path, page, kind, number in found:
        full = ROOT / "jaxacct" / "proofs" / page
        assert full.exists(), f"{path}: there is no {page}"
        text = full.read_text(encoding="utf-8")
        if kind == "section":
            assert re.search(rf"^#+ {re.escape(number)}[. ]", text, re.MULTILINE), f"{path}: {page} {number}"
        elif kind:
            where = f"{path}: {page} {kind} {number}"
            assert re.search(rf"{kind} {re.escape(number)}\b", text, re.IGNORECASE), where
