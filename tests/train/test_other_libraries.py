"""The page on models of other libraries: each block trains, where its library is installed."""

import re
from pathlib import Path

import numpy as np
import pytest

import jaxacct
from tests.train.plans import plan

PAGE = (Path(jaxacct.__file__).parent / "guides/libraries.md").read_text(encoding="utf-8")
FIRST, *BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LIBRARIES = {re.search(r"(?:import|from) (\w+)", block)[1]: block for block in BLOCKS}


def test_every_hint_has_a_block():
    from train.arguments import _HINTS

    assert LIBRARIES.keys() == _HINTS.keys() - {"torch"}


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_block_trains(library, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    plan("poisson", dataset_size=40, iterations=2).save("plan.json")
    text = (FIRST + LIBRARIES[library]).replace("jaxacct.train", "train")
    names = {"__name__": "page"}
    exec(compile(text, "libraries.md", "exec"), names)
    assert all(np.isfinite(leaf).all() for leaf in names["jax"].tree.leaves(names["params"]))
