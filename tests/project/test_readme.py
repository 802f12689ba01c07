"""What README says can be done is done: its script runs, its links lead somewhere, it is short."""

import re
from pathlib import Path

import pytest

from tests.train.plans import plan

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "tests/README.md", *sorted((ROOT / "jaxacct").rglob("*.md"))]


REPOSITORY = re.compile(
    r"https://(github\.com/jaxacct/jaxacct/blob|raw\.githubusercontent\.com/jaxacct/jaxacct)/main/"
)


def test_it_is_short():
    assert len(README.splitlines()) <= 150


def test_every_link_leads_somewhere():
    links = [
        (page, link) for page in PAGES for link in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8"))
    ]
    for page, target in links:
        if REPOSITORY.match(target):
            assert (ROOT / REPOSITORY.sub("", target)).exists(), target
        elif not target.startswith("http"):
            assert page.name != "README.md" or page.parent != ROOT, f"{target} leads nowhere on PyPI"
            assert (page.parent / target).exists(), (page, target)


@pytest.mark.usefixtures("default_promotion")
def test_the_training_script_ends_with_a_model(tmp_path, monkeypatch, capsys):
    """Under a plan of a few steps, in this process, where `train` stands for `jaxacct.train`."""
    script = next(b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "load_model" in b)
    plan("poisson", dataset_size=1440, iterations=5, rate=0.05).save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    exec(compile(script.replace("jaxacct.train", "train"), "README.md", "exec"), {"__name__": "readme"})
    said = capsys.readouterr().out
    assert "differentially private" in said
    assert float(re.search(r"accuracy ([\d.]+)", said)[1]) <= 1
