"""The page of results is what its records say."""

import json
import re

import pytest

from tests.benchmarks import pictures, results


def test_the_page_is_made_of_the_records():
    assert results.PAGE.read_text(encoding="utf-8") == results.page(), "python -m tests.benchmarks.results"


def test_every_record_says_where_it_comes_from():
    for entry in results.records():
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", entry["date"]), entry["question"]
        assert re.fullmatch(r"[0-9a-f]{7,40}", entry["commit"]), entry["question"]
        assert entry["command"] and entry["machine"] and entry["rows"], entry["question"]
        for picture in entry.get("picture", "").split():
            assert (results.PAGE.parent / picture).is_file(), picture


def test_pictures_are_drawn_from_the_records(tmp_path, monkeypatch):
    assert pictures.DRAWN.keys() == pictures.CAPTIONS.keys()
    assert all((pictures.FIGURES / f"{name}.png").is_file() for name in pictures.DRAWN)
    monkeypatch.setattr(pictures, "FIGURES", tmp_path)
    pictures.write({entry["name"]: entry for entry in results.records()})
    assert len(list(tmp_path.glob("*.png"))) == len(pictures.DRAWN)


def test_a_record_without_a_field_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    results.record("one", question="?", order=10, columns=["a"], rows=[[1]])
    assert results.records()[0]["rows"] == [["1"]]
    entry = json.loads((tmp_path / "one.json").read_text())
    (tmp_path / "one.json").write_text(json.dumps(entry | {"rows": [[1, 2]]}))
    with pytest.raises(ValueError, match="row of another length"):
        results.records()
    del entry["machine"]
    (tmp_path / "one.json").write_text(json.dumps(entry))
    with pytest.raises(ValueError, match="lacks machine"):
        results.records()
