"""Links of the site: what is no page of it (code, tests, folders) is shown in the repository."""

import re
from pathlib import PurePosixPath

REPOSITORY = "https://github.com/jaxacct/jaxacct/blob/main/"
PICTURES = "https://raw.githubusercontent.com/jaxacct/jaxacct/main/"
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        elif part not in (".", ".."):
            parts.append(part)
    return "/".join(parts)


def on_page_markdown(markdown: str, *, page, files, **_) -> str:
    """Replace links to files that are not on the site by their address in the repository, and the reverse."""
    folder = PurePosixPath(page.file.src_uri).parent
    if page.file.src_uri == "index.md":  # README has absolute links, which are right on PyPI
        markdown = markdown.replace(f"]({REPOSITORY}", "](").replace(f"]({PICTURES}", "](")

    def address(found: re.Match) -> str:
        target = _normal(folder / found[1])
        if target == "README.md":
            return f"]({'../' * len(folder.parts)}index.md{found[2] or ''})"
        if files.get_file_from_path(target) is not None:
            return found[0]
        return f"]({REPOSITORY}{target}{found[2] or ''})"

    return LINK.sub(address, markdown)
