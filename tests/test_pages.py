"""What README, CONTRIBUTING and docs say can be held against the code: links, flags, defaults, commands, files, modules,
metrics and routes. Figures and sentences cannot.
"""

import argparse
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from onward.cli.main import COMMANDS, module_of
from onward.config import RouterConfig, ServeConfig
from onward.obs.metric_names import DEPRECATED_NAMES
from tests.docs.built_site import pages_by_section

MAX_LINES_OF_ARCHITECTURE = 300
ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
OF_TODAY = [page for page in PAGES if page.name not in ("CHANGELOG.md", "decisions.md")]
"""Without those that tell of the past too."""
MIGRATION = ROOT / "docs" / "howto" / "migrate.md"
"""Has flags of other servers beside ours."""
PAGES_ON_THE_SITE = {ROOT / "docs" / path for paths in pages_by_section().values() for path in paths}
"""Some of them exist on the site only, since they are generated when it is built."""
FLAGS_OF_RAY = {"--address", "--disable-usage-stats", "--head", "--include-dashboard"}
FLAGS_OF_OTHERS = {"--randomly-seed", "--config", *FLAGS_OF_RAY} | {
    # docker, kubectl, helm, systemd, envoy
    *("--build", "--drain-time-s", "--from-file", "--gpus", "--index", "--mode", "--now", "--read-only", "--replicas"),
    *("--set", "--shm-size", "--target", "--tmpfs"),
    # make compat
    *("--checkout", "--only", "--suite"),
}
KNOB_TABLES = {"docs/router.md": RouterConfig, "docs/prefill-decode.md": ServeConfig}
WORDS = {"on": (True,), "off": (False,), "none": (None, "", ())}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def each(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=name_of)


def code_in(page: Path) -> list[str]:
    """Blocks, fenced or indented, line by line, and what stands between backticks."""
    text = page.read_text()
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^ {4}(\S.*)$", prose, re.MULTILINE)
    return [*(line for block in fenced for line in block.splitlines()), *indented, *re.findall(r"`([^`\n]+)`", prose)]


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """As GitHub makes them from headings."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles)


@each(PAGES)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            there = (page.parent / file).resolve() if file else page
            assert there.exists() or there in PAGES_ON_THE_SITE, target
            assert not anchor or anchor in anchors_of(there), target


@cache
def flags_of_commands() -> frozenset[str]:
    flags: set[str] = set()
    parsers: list[argparse.ArgumentParser] = []
    for command in COMMANDS:
        parsers.append(argparse.ArgumentParser())
        module_of(command).add_arguments(parsers[-1])
    for parser in parsers:
        for action in parser._actions:
            flags.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers.extend(action.choices.values())
    return frozenset(flags)


@cache
def flags_of_scripts() -> frozenset[str]:
    files = [*ROOT.glob("scripts/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    return frozenset(flag for file in files for flag in re.findall(r'"(--[a-z][a-z0-9-]*)"', file.read_text()))


@each(OF_TODAY)
def test_every_flag_that_a_page_names_is_one(page: Path) -> None:
    known = flags_of_commands() | flags_of_scripts() | FLAGS_OF_OTHERS
    text = page.read_text()
    if page == MIGRATION:
        # The first column of its tables has the flags of other servers, and the second one ours.
        text = "\n".join(line.split(" | ")[1] for line in text.splitlines() if line.startswith("| "))
    named = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)
    assert not {*named} - known


def rows_of(page: str) -> list[tuple[list[str], list[str]]]:
    """Returns the flags of each row of a table of flags, and the defaults."""
    table = page.partition("| flag | default | meaning |\n")[2].partition("\n\n")[0].splitlines()[1:]
    cells = [row.split(" | ") for row in table]
    return [(re.findall(r"--[a-z-]+", names), re.split(r", (?=`|\d)", default)) for names, default, *_ in cells]


def is_default(told: str, default: Any) -> bool:
    """Whether a page may say this of it. What is said in words alone is left to the reader."""
    if told in WORDS:
        return default in WORDS[told]
    quoted = re.fullmatch(r"`([^`-]*)`", told)
    if quoted is None and not re.fullmatch(r"[\d.,]+", told):
        return True
    value = quoted[1] if quoted is not None else told.replace(",", "")
    return value == (f"{default:g}" if isinstance(default, float) else str(default))


@pytest.mark.parametrize("page", KNOB_TABLES)
def test_defaults_are_what_the_tables_of_flags_say(page: str) -> None:
    config = KNOB_TABLES[page]()
    rows = rows_of((ROOT / page).read_text())
    assert len(rows) > 10
    for flags, told in rows:
        knobs = [flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags]
        defaults = told if len(told) == len(knobs) else told * len(knobs)
        for knob, default in zip(knobs, defaults, strict=True):
            assert is_default(default, getattr(config, knob)), knob


@each(OF_TODAY)
def test_every_command_that_a_page_names_is_one(page: Path) -> None:
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for code in code_in(page):
        for command in re.findall(r"^(?:\$ |\.venv/bin/)?onward ([a-z][a-z-]*)", code):
            assert command in COMMANDS, code
        for target in re.findall(r"^make ([a-z][a-z-]*)", code):
            assert target in targets, code


@each(OF_TODAY)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    for code in code_in(page):
        for path in re.findall(r"^((?:tests|onward|scripts|docs|benchmarks|\.ci)/[\w./-]*)(?!.*[*…])", code):
            assert (ROOT / path).exists(), path


@each(PAGES)
def test_every_module_of_benchmarks_that_a_page_names_is_there(page: Path) -> None:
    for code in code_in(page):
        for name in re.findall(r"(?<![\w./])benchmarks(?:\.\w+)+", code):
            path = ROOT.joinpath(*name.split("."))
            assert path.is_dir() or path.with_suffix(".py").exists(), name


def test_every_package_has_a_sentence_and_every_sentence_a_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert len(page.splitlines()) <= MAX_LINES_OF_ARCHITECTURE
    _, _, section = page.partition("## Packages")
    rows = re.findall(r"^\| (`[^|]*`) \| (\S[^|]*) \|$", section, re.MULTILINE)
    named = [name for names, _ in rows for name in re.findall(r"`([\w.]+)`", names)]
    named += [name for _, sentence in rows for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", sentence)]
    folder = ROOT / "onward"
    packages = {".".join(file.parent.relative_to(folder).parts) for file in folder.rglob("*.py")} - {""}
    modules = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    assert sorted(named) == sorted(packages | modules)


def test_every_metric_is_explained_and_no_other_one() -> None:
    sources = "\n".join(file.read_text() for file in (ROOT / "onward").rglob("*.py"))
    counted = {*re.findall(r'(?:counter|gauge|histogram|Family)\(\s*"(onward_\w+)"', sources)}
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert len(counted) > 40
    assert {*re.findall(r"\bonward_\w+", page)} == counted | {*DEPRECATED_NAMES}


def test_nobody_is_told_to_install_this_from_an_index() -> None:
    """It is in none, and another project may have the name there."""
    files = [*OF_TODAY, *(ROOT / "onward").rglob("*.py")]
    assert not [file for file in files if re.search(r"pip install [^\n`]*\bonward\b", file.read_text())]
