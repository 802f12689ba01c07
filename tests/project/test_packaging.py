"""What an installation holds, and what it does not; tests/README.md says how the wheel itself is built."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jaxacct

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OPTIONAL = ("flax", "optax", "orbax", "sklearn", "pyarrow")  # come with jaxacct[train]


def run(*arguments, folder, cwd):
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment, cwd=cwd
    )


def test_training_is_installed_under_the_package(as_installed, tmp_path):
    """`import train` would take a common name from everyone who installs jaxacct."""
    done = run("-m", "jaxacct", "attribution", "--help", folder=as_installed, cwd=tmp_path)
    assert "jaxacct attribution" in done.stdout, done.stderr
    done = run("-c", "import train", folder=as_installed, cwd=tmp_path)
    assert "ModuleNotFoundError" in done.stderr
    packages = PROJECT["tool"]["setuptools"]
    assert packages["package-dir"]["jaxacct.train"] == "train"
    assert {name.split(".")[0] for name in packages["packages"]} == {"jaxacct"}


def test_every_package_is_listed():
    """The list is written out, as `train` lives outside of `jaxacct`; a new folder must join it."""
    folders = {path.parent.relative_to(ROOT) for path in ROOT.glob("jaxacct/**/*.py")}
    names = {".".join(folder.parts) for folder in folders}
    names |= {
        ".".join(("jaxacct", *path.parent.relative_to(ROOT).parts)) for path in ROOT.glob("train/**/*.py")
    }
    assert names <= set(PROJECT["tool"]["setuptools"]["packages"])
    for name in PROJECT["tool"]["setuptools"]["packages"]:
        folder = ROOT / name.removeprefix("jaxacct." if name.startswith("jaxacct.train") else "").replace(
            ".", "/"
        )
        assert folder.is_dir(), name


def test_pages_and_styles_are_listed():
    data = PROJECT["tool"]["setuptools"]["package-data"]
    listed = {
        path
        for name, patterns in data.items()
        for pattern in patterns
        for path in (ROOT / name.replace(".", "/")).glob(pattern)
    }
    for suffix in ("*.md", "*.css", "*.pyi", "py.typed"):
        assert {*(ROOT / "jaxacct").rglob(suffix)} <= listed, suffix


def test_training_imports_itself_relatively():
    for path in (ROOT / "train").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) train\b", path.read_text(encoding="utf-8"), re.M), path


def test_accounting_needs_nothing_of_training():
    """`pip install jaxacct` brings no training library, so the accountant may import none."""
    imports = re.compile(rf"^\s*(from|import) ({'|'.join(OPTIONAL)})\b", re.M)
    for path in (ROOT / "jaxacct").rglob("*.py"):
        assert not imports.search(path.read_text(encoding="utf-8")), path


def test_the_version_is_written_once():
    assert "version" in PROJECT["project"]["dynamic"] and "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "jaxacct.common.version.VERSION"}
    changelog = (ROOT / "jaxacct" / "guides" / "changelog.md").read_text(encoding="utf-8")
    assert f"## {jaxacct.__version__}" in changelog


def test_the_lowest_versions_are_the_declared_ones():
    """`.ci/lowest.txt` pins exactly the lower bounds of what is installed for use, training and tests."""
    extras = PROJECT["project"]["optional-dependencies"]
    declared = {}
    used = (*extras["train"], *extras["data"], *extras["test"])
    for requirement in [*PROJECT["project"]["dependencies"], *used]:
        name, bound = re.match(r"([a-z\-]+)(?:\[[^\]]*\])?(?:>=([\d.]+))?", requirement).groups()
        if bound:
            declared[name] = bound
    pinned = dict(
        line.split("==") for line in (ROOT / ".ci" / "lowest.txt").read_text().splitlines() if "==" in line
    )
    assert set(declared) <= set(pinned)
    for name, bound in declared.items():
        assert pinned[name] == bound or pinned[name].startswith(f"{bound}."), name
