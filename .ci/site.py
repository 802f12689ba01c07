"""Check a built site: dead links, formulas that nothing renders, and pictures of other hosts.

python .ci/site.py build/site     # prints each flaw; exits with 1 where there is one
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

FORMULA = re.compile(r"\$\$[^$]*\$\$|\$[^$\s][^$\n]*\$|\\\(|\\\[|\\(?:frac|sqrt|sum|mathbb|text|mu)\b")
SILENT = {"script", "style", "pre", "code", "title"}
"""Elements whose text is no prose."""


class Page(HTMLParser):
    """Links, sources, anchors and prose of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.sources: list[str] = []
        self.anchors = {""}
        self.prose = ""
        self._silent = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given.get("id"), given.get("name")}
        self._silent += tag in SILENT
        if tag == "a" and given.get("href") is not None:
            self.links.append(given["href"])
        if tag in ("img", "script", "source", "iframe") and "src" in given:
            self.sources.append(given["src"] or "")

    def handle_endtag(self, tag):
        self._silent -= tag in SILENT

    def handle_data(self, data):
        if not self._silent:
            self.prose += data


def flaws(site: Path) -> list[str]:
    """Return one line for every flaw of a site."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name, root = path.relative_to(site.resolve()), path.parent
        # The page of a wrong address is shown anywhere, so its links begin at the site's own.
        for link in page.links if name.name != "404.html" else []:
            target, anchor = urldefrag(link)
            if re.match(r"[a-z]+:|//", target):
                continue
            file = (root / unquote(target)).resolve() if target else path
            file = file / "index.html" if file.is_dir() else file
            if not file.exists():
                found.append(f"{name}: {link} leads nowhere")
            elif file in pages and unquote(anchor) not in pages[file].anchors:
                found.append(f"{name}: {link} has no such place")
        foreign = [source for source in page.sources if not source or re.match(r"https?:|//", source)]
        found += [f"{name}: {source or 'an empty address'} is loaded" for source in foreign]
        found += [f"{name}: {text[:60]!r} is not rendered" for text in FORMULA.findall(page.prose)]
    return found


if __name__ == "__main__":
    seen = flaws(Path(sys.argv[1]))
    print("\n".join(seen) or f"{sys.argv[1]}: every link leads somewhere")
    sys.exit(bool(seen))
