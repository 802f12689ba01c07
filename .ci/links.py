"""Links of README on PyPI and of the site: what is elsewhere is shown in the repository.

    python .ci/links.py README.md     # makes its relative links absolute, in place

The address of the repository is `project.urls.Source` of pyproject.toml, and in no other file of the build.
"""

import re
import sys
import tomllib
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")


def address(target: str) -> str:
    """Return where the repository shows a file, or has a picture."""
    return f"{SOURCE}/{'raw' if target.endswith('.png') else 'blob'}/main/{target}"


def absolute(markdown: str) -> str:
    """Return a page of the root with absolute links."""
    return LINK.sub(lambda found: f"]({address(found[1])}{found[2] or ''})", markdown)


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        elif part not in (".", ".."):
            parts.append(part)
    return "/".join(parts)


def on_config(config, **_):
    """Tell the theme where the repository is."""
    config.repo_url, config.repo_name = SOURCE, SOURCE.partition(".com/")[2]
    return config


def on_page_markdown(markdown: str, *, page, files, **_) -> str:
    """Replace links to files that are not on the site by their address in the repository."""
    folder = PurePosixPath(page.file.src_uri).parent

    def found_at(found: re.Match) -> str:
        target = _normal(folder / found[1])
        if target == "README.md":
            return f"]({'../' * len(folder.parts)}index.md{found[2] or ''})"
        if files.get_file_from_path(target) is not None:
            return found[0]
        return f"]({address(target)}{found[2] or ''})"

    return LINK.sub(found_at, markdown)


def on_page_content(html: str, *, page, files, **_) -> str:
    """Complete the page of a notebook, whose links are those of its file and which loads from elsewhere."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    folder = PurePosixPath(page.file.src_uri).parent

    def found_at(found: re.Match) -> str:
        file = files.get_file_from_path(_normal(folder / found[1]))
        return found[0] if file is None else f'href="{file.url_relative_to(page.file)}'

    html = re.sub(r'href="([\w./-]+\.(?:ipynb|md))', found_at, html)
    html = re.sub(r"<img[^>]*colab-badge[^>]*>", "Open in Colab", html)
    return re.sub(r'<script[^>]*\ssrc=""[^>]*>\s*</script>', "", html)  # no notebook has a formula to render


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(absolute(path.read_text(encoding="utf-8")), encoding="utf-8")
