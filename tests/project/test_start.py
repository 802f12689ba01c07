"""What starting costs: modules that a command does not need are not loaded; compiled programs are kept."""

import ast
import importlib
import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import jaxacct
from jaxacct.cli import interrupted as _interrupted
from jaxacct.common.compilation_cache import keep_compiled_programs
from jaxacct.common.lazy_names import homes_of
from tests.train.runs import plan_of

HEAVY = {*"jax chex numpy scipy dp_accounting orbax flax optax grain cyclopts rich".split()}


ROOT = Path(__file__).parents[2]


def printed_by(program: str, *arguments, cwd=ROOT, environment=None) -> str:
    """What a program prints in a fresh interpreter."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    options = dict(capture_output=True, text=True, check=True, cwd=cwd, env=environment)
    return subprocess.run(command, **options).stdout


def loaded_by(program: str, *arguments) -> set[str]:
    """Modules in a fresh interpreter at the end of `program`."""
    ending = "\nimport json, sys\nprint('\\n' + json.dumps(list(sys.modules)))"
    return set(json.loads(printed_by(program + ending, *arguments).splitlines()[-1]))


def test_modules_of_the_package_are_attributes_of_it(as_installed, tmp_path):
    """Where jaxacct is installed, `jaxacct.train` and its commands too; `dir` loads none of them.

    `import train` would take a common name from everyone who installs jaxacct.
    """
    program = """if True:
        import importlib.util, jaxacct, sys
        from jaxacct.__main__ import main
        assert {"plot", "risk", "train", "interoperation"} < set(dir(jaxacct))
        assert not {"jaxacct.report", "numpy"} & set(sys.modules)
        assert importlib.util.find_spec("train") is None
        names = jaxacct.train.fit, jaxacct.risk.advantage, jaxacct.plot.profile
        print(*(name.__module__ for name in names), jaxacct.interoperation.scheme_of)
        sys.argv[1:] = "attribution", "--help"
        main()
    """
    environment = os.environ | {"PYTHONPATH": str(as_installed)}
    said = printed_by(program, cwd=tmp_path, environment=environment)
    assert said.startswith("jaxacct.train.training jaxacct.report.risk jaxacct.report.plots <function")
    assert "jaxacct attribution" in said


HELP = "from jaxacct.cli import main as cli\ntry:\n cli.main(['--help'])\nexcept SystemExit: pass"


@pytest.mark.parametrize(("program", "needed"), [("import jaxacct", ()), (HELP, ("cyclopts", "rich"))])
def test_the_package_and_its_help_load_nothing_heavy(program, needed):
    assert not loaded_by(program).intersection(HEAVY.difference(needed))


@pytest.mark.parametrize("given", [None, "2"])
def test_commands_set_what_libraries_read_once_before_these_are_there(given):
    """One thread of BLAS, and no lines of XLA about its own cache; what the user sets stays."""
    program = """if True:
        import os, sys
        from jaxacct import __main__
        from jaxacct.cli import main as cli
        names = "OPENBLAS_NUM_THREADS", "TF_CPP_MIN_LOG_LEVEL"
        cli.main = lambda: print({"numpy", "jaxlib"} & sys.modules.keys(), *map(os.environ.get, names))
        __main__.main()
    """
    ours = {"OPENBLAS_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {} if given is None else dict.fromkeys(ours, given)
    said = printed_by(program, environment=environment)
    assert said.split() == ["set()", *(ours.values() if given is None else [given] * 2)]


def test_a_closed_output_keeps_the_exit_code(monkeypatch):
    """`jaxacct calibrate ... >&-`, as services run it: Python has None for what is closed."""
    command = f"{shlex.quote(sys.executable)} -m jaxacct --version >&- 2>&-"
    assert subprocess.run(command, shell=True, cwd=ROOT).returncode == 0
    codes: list[int] = []
    monkeypatch.setattr(_interrupted.os, "_exit", codes.append)
    monkeypatch.setattr(_interrupted.sys, "stderr", None)
    _interrupted.leave("interrupted")
    monkeypatch.undo()
    assert codes == [130]


def test_showing_a_plan_and_choosing_one_load_no_statistics(tmp_path):
    """Half of `jaxacct show` was imports of what it never called, and a sixth of README's job."""
    scheme = jaxacct.BMinSep(12, 3, 0.1)
    mechanism = jaxacct.Mechanism(scheme, jaxacct.BandedToeplitz.square_root(3), 50.0)
    plan = plan_of(mechanism, 100, 20.0)
    plan.save(tmp_path / "plan.json")
    program = (
        "import sys\nfrom jaxacct import recommend, Mechanism\nfrom jaxacct.cli import main as cli\n"
        "from jaxacct.accountants import analytic\n"
        "try:\n cli.main(['show', sys.argv[1]])\nexcept SystemExit: pass\n"
        "best = recommend(dataset_size=80, batch_size=10, iterations=12, epsilon=4.0, delta=1e-2).chosen\n"
        "assert best.strategy.bands > 1\n"
        "analytic.bound_by(None, Mechanism(best.scheme, best.strategy, 1.0), 4.0)"
    )
    loaded = loaded_by(program, tmp_path / "plan.json")
    assert "jaxacct.core.plan" in loaded
    unneeded = {"scipy.stats", "scipy.signal", "dp_accounting", "orbax", "flax", "optax", "grain"}
    assert not loaded & unneeded
    assert "jax.experimental.pallas" not in loaded


def test_public_names_are_in_one_agreement():
    """Imports of the stub, which type checkers read, are the public names, and all of them are there."""
    stub = ast.parse(Path(jaxacct.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = {
        (alias.asname or alias.name).lstrip("_").replace("plots", "plot"): (node.module, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = "jaxacct", "jaxacct.report"
    modules = {name: f"{home}.{inner}" for name, (home, inner) in imports.items() if home in homes}
    # Training is no part of the checkout's package: it is there where it is installed.
    assert modules | {"train": "jaxacct.train"} == jaxacct._MODULES
    imports = {name: module for name, (module, _) in imports.items() if name not in modules}
    assert imports == homes_of(jaxacct.__file__)
    for name in jaxacct.__all__:
        assert getattr(jaxacct, name) is getattr(sys.modules[imports[name]], name)
    for name, module in modules.items():
        assert getattr(jaxacct, name) is sys.modules[module]
    public = {name for name in dir(jaxacct) if not name.startswith("__")}
    assert public == {*jaxacct.__all__, *jaxacct._MODULES}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jaxacct.nothing  # noqa: B018


@pytest.mark.parametrize("package", ["accountants.tradeoff", "individual", "interoperation"])
def test_names_of_a_lazy_package_are_those_of_its_stub(package):
    module = importlib.import_module(f"jaxacct.{package}")
    stub = ast.parse(Path(module.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    assert ast.literal_eval(stub.body[-1].value) == module.__all__
    assert all(hasattr(module, name) for name in module.__all__) and set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """One without a cache, whose homes are folders of the test."""
    of_jax = "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    for name in (*of_jax, "JAXACCT_NO_CACHE"):
        monkeypatch.setenv(name, "")  # remembered, so that what is set below is undone
        monkeypatch.delenv(name)
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delitem(sys.modules, "jax")
    return os.environ


def test_compiled_programs_go_to_a_private_folder(environment):
    folder = keep_compiled_programs()
    assert folder is not None and folder.is_dir()
    assert environment["JAX_COMPILATION_CACHE_DIR"] == str(folder)
    if os.name == "posix":
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("chosen", [("JAX_COMPILATION_CACHE_DIR", "mine"), ("JAXACCT_NO_CACHE", "1")])
def test_a_cache_chosen_or_refused_stays_so(chosen, environment, tmp_path, monkeypatch):
    monkeypatch.setenv(*chosen)
    before = dict(environment)
    assert keep_compiled_programs() is None
    assert dict(environment) == before
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the folder is chosen by XDG on Linux")
def test_no_folder_no_cache(environment, tmp_path, monkeypatch):
    """A read-only home is no reason to fail; a file in the way stands for one."""
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert keep_compiled_programs() is None


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="users exist on POSIX")
def test_a_folder_of_another_user_is_not_run_from(environment, tmp_path, monkeypatch):
    """The attack: programs that another user put there would run as ours."""
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert keep_compiled_programs() is None
    assert "JAX_COMPILATION_CACHE_DIR" not in environment
