"""Links of pages that leave `docs/`, which is all that the site is built from.

README, CONTRIBUTING and CHANGELOG are pages of the site under other names. Every other file of the repository that a page
links to is copied to `source/`.
"""

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

PAGES_OF_THE_ROOT = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
README = "README.md"
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def rewrite_links(text: str, source: str, path: str) -> str:
    """Returns the page with links that are valid on the site. `source` is the page's path in the repository, and `path`
    the one on the site."""

    def rewritten(match: re.Match[str]) -> str:
        target, hash_sign, anchor = match[2].partition("#")
        if not target or "://" in target:
            return match[0]
        file = _resolve(source, target)
        there = _path_on_site(file)
        # The README has other sections than the page that stands for it.
        rest = "" if file == README else hash_sign + anchor
        return match[1] + posixpath.relpath(there, posixpath.dirname(path) or ".") + rest + match[3]

    return _LINK.sub(rewritten, text)


def linked_files(root: Path, pages: Iterable[str]) -> dict[str, str]:
    """Maps files outside `docs/` that pages link to, to their paths on the site."""
    found: dict[str, str] = {}
    for page in pages:
        for match in _LINK.finditer((root / page).read_text()):
            target = match[2].partition("#")[0]
            if target and "://" not in target:
                file = _resolve(page, target)
                if (there := _path_on_site(file)).startswith("source/"):
                    found[file] = there
    return found


def _resolve(source: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _path_on_site(file: str) -> str:
    if file == README:
        return "index.md"
    if file in PAGES_OF_THE_ROOT:
        return PAGES_OF_THE_ROOT[file]
    return file.removeprefix("docs/") if file.startswith("docs/") else f"source/{file}"
