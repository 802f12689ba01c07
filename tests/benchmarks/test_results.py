"""The page of results has no number that its records lack."""

import json
import re

from tests.benchmarks import pictures, results

NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:e-[0-9]+)?")


def unknown_numbers(page: str) -> set[tuple[str, str]]:
    """Return (title of a section, number) that no record named by the section has."""
    found = set()
    known = {
        entry["name"]: json.dumps(entry, ensure_ascii=False, separators=(" ", " "))
        for entry in results.records()
    }
    for section in page.partition(results.LIST)[0].split("\n## ")[1:]:
        names = re.findall(r"\(results/(\w+)\.json\)", section)
        there = set(NUMBER.findall(" ".join(known[name] for name in names).replace(",", "")))
        text = re.sub(r"\]\([^)]*\)|!\[.*", "", section.partition("Records: ")[0])
        numbers = NUMBER.findall(text.replace(",", ""))
        found |= {(section.splitlines()[0], number) for number in numbers if number not in there}
    return found


def test_the_page_is_short_and_lists_every_record():
    page = results.PAGE.read_text(encoding="utf-8")
    assert len(page.split()) <= 2500
    assert page == results.listed(page), "python -m tests.benchmarks.results"


def test_every_number_is_in_a_record_that_its_section_names():
    page = results.PAGE.read_text(encoding="utf-8")
    assert not unknown_numbers(page)
    title = "How much noise does a run need, by sampler?"
    assert unknown_numbers(page.replace("0.4789 / 114.8", "0.4798 / 114.8")) == {(title, "0.4798")}


def test_the_site_shows_every_record():
    page = results.tables()
    for entry in results.records():
        assert f"### {entry['question']} {{#{entry['name']}}}" in page
        assert entry["command"] in page and all(str(row[0]) in page for row in entry["rows"])


def test_every_record_says_where_it_comes_from():
    for entry in results.records():
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", entry["date"]), entry["question"]
        assert re.fullmatch(r"[0-9a-f]{7,40}", entry["commit"]), entry["question"]
        assert entry["command"] and entry["machine"] and entry["rows"], entry["question"]
        for picture in entry.get("picture", "").split():
            assert (results.PAGE.parent / picture).is_file(), picture


def test_pictures_are_drawn_from_the_records(tmp_path, monkeypatch):
    page = results.PAGE.read_text(encoding="utf-8")
    for name in pictures.DRAWN:
        assert f"(figures/{name}.png)" in page and (pictures.FIGURES / f"{name}.png").is_file(), name
    monkeypatch.setattr(pictures, "FIGURES", tmp_path)
    pictures.write({entry["name"]: entry for entry in results.records()})
    assert len(list(tmp_path.glob("*.png"))) == len(pictures.DRAWN)
