"""The documentation site, built in strict mode, and what its pages have."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "mkdocs.yml"


def build_site(folder: Path, root: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """`make docs`, into a folder."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@dataclass
class BuiltPage(HTMLParser):
    """A page: its links, the ids of its elements, what it loads, and the text of its article."""

    path: Path
    links: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    loaded: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._is_code = False
        self.feed(self.path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") not in ("prev", "next", "canonical"):
            self.loaded.append(values["href"])
        if "src" in values:
            self.loaded.append(values["src"])
        if tag == "code":
            self._is_code = True
            self.code.append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_code = self._is_code and tag != "code"

    def handle_data(self, data: str) -> None:
        if self._is_code:
            self.code[-1] += data


class BuiltSite:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def pages(self) -> dict[str, BuiltPage]:
        return {str(path.relative_to(self.folder)): BuiltPage(path) for path in self.folder.rglob("*.html")}

    def code_of(self, page: str) -> set[str]:
        return set(self.pages[page].code)


class _ConfigLoader(yaml.SafeLoader):
    """Reads mkdocs.yml without making the Python objects that it names."""


_ConfigLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def pages_by_section() -> dict[str, list[str]]:
    """Paths of the pages in `docs/`, generated ones too, by the sections of the navigation."""
    config = yaml.load(CONFIG.read_text(), _ConfigLoader)
    return {title: list(_paths(entry)) for section in config["nav"] for title, entry in section.items()}


def _paths(entry: Any) -> "list[str]":
    match entry:
        case str():
            return [entry]
        case list():
            return [path for one in entry for path in _paths(one)]
        case _:
            return [path for one in entry.values() for path in _paths(one)]
