"""The documentation site builds in strict mode, is complete, and loads nothing from another origin."""

import json
import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import onward.client
import onward.llm
from onward.api.openapi import BODIES, SUMMARIES
from onward.obs.metric_names import DEPRECATED_NAMES, VLLM_NAMES
from onward.web.ui.static_files import NAMES, PAGE_PATH
from tests.docs.built_site import ROOT, BuiltSite, build_site, pages_by_section
from tests.test_pages import flags_of_commands

SOURCES = [file.read_text() for file in (ROOT / "onward").rglob("*.py")]
CONTRIBUTING = "Contributing"
INTERNAL_TERMS = re.compile(r"\b(anchors|the bar|goals?)\b", re.IGNORECASE)


def test_every_command_and_flag_is_on_the_site(site: BuiltSite) -> None:
    shown = {word.partition(" ")[0] for word in site.code_of("reference/flags.html")}
    assert not flags_of_commands() - shown - {"-h", "--help"}


def test_every_route_is_on_the_site(site: BuiltSite) -> None:
    constants = {path for text in SOURCES for path in re.findall(r'^\w*PATH = "(/[\w/]+)"$', text, re.MULTILINE)}
    paths = {*SUMMARIES, *BODIES, *constants, *(f"{PAGE_PATH}/{name}" for name in NAMES)}
    assert {"/internal/attempt", "/internal/status", "/ui/demo/worker", "/v1/messages"} <= (
        shown := site.code_of("reference/routes.html")
    )
    # `/v1/traces` belongs to the collector of traces.
    assert not paths - shown - {"/v1/traces"}


def test_every_field_of_a_body_is_on_the_site(site: BuiltSite) -> None:
    fields = {name for struct in BODIES.values() for name in struct.__struct_encode_fields__}
    assert not fields - site.code_of("reference/routes.html") - {"onward_context"}


def test_every_metric_is_on_the_site(site: BuiltSite) -> None:
    registered = re.compile(r'(?:counter|gauge|histogram|Family)\(\s*"(onward_\w+)"')
    names = {name for text in SOURCES for name in registered.findall(text)}
    names |= {*DEPRECATED_NAMES, *(name for name, _ in VLLM_NAMES)}
    assert len(names) > 80
    assert not names - site.code_of("reference/metrics.html")


def test_the_python_api_is_on_the_site(site: BuiltSite) -> None:
    page = site.pages["reference/python.html"]
    assert {name.lower() for name in [*onward.client.__all__, *onward.llm.__all__]} <= page.ids
    assert "deadline_s: float = 3600.0" in page.code, "fields have their types and defaults"


def test_every_environment_variable_is_on_the_site(site: BuiltSite) -> None:
    names = {name for text in SOURCES for name in re.findall(r'"((?:ONWARD|HF|OTEL)_[A-Z_]+)"', text)}
    assert {"ONWARD_CACHE", "ONWARD_SIMD", "ONWARD_API_KEY"} <= names
    shown = site.code_of("reference/environment.html") | site.code_of("observability.html")
    assert not {name for name in names if name not in shown and name != "HUGGINGFACE_HUB_CACHE"}


def test_every_link_on_the_site_leads_somewhere(site: BuiltSite) -> None:
    broken = []
    for name, page in site.pages.items():
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            if "://" in target or name == "404.html":
                continue
            path = (page.path.parent / target).resolve() if target else page.path
            other = site.pages.get(str(path.relative_to(site.folder)))
            if not path.is_file() or (other is not None and anchor and anchor not in other.ids):
                broken.append(f"{name}: {link}")
    assert not broken


def test_no_page_loads_anything_from_another_origin(site: BuiltSite) -> None:
    loaded = {address for page in site.pages.values() for address in page.loaded}
    assert loaded and not {address for address in loaded if "//" in address}
    for file in site.folder.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import\s*)[\"']?(?:https?:)?//", file.read_text()), file


def test_the_search_index_has_flags_routes_and_headings(site: BuiltSite) -> None:
    index = json.loads((site.folder / "search" / "search_index.json").read_text())
    found = {entry["location"]: entry["title"] + entry["text"] for entry in index["docs"]}
    assert "--adopt" in found["reference/flags.html#onward-serve"]
    assert "/v1/messages/count_tokens" in found["reference/routes.html#for-clients-and-operators"]
    assert found["howto/stuck-stream.html"]


def test_every_page_is_in_the_navigation_and_contributors_have_their_own_section() -> None:
    sections = pages_by_section()
    listed = [path for paths in sections.values() for path in paths]
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed)) and written <= set(listed)
    assert {"architecture.md", "decisions.md", "simulation.md", "failure-contract.md"} <= set(sections[CONTRIBUTING])


def test_pages_for_users_have_no_terms_of_the_project_itself() -> None:
    pages = [path for title, paths in pages_by_section().items() if title != CONTRIBUTING for path in paths]
    texts = {path: (ROOT / "docs" / path).read_text() for path in pages if (ROOT / "docs" / path).exists()}
    assert len(texts) > 25
    assert not {path: INTERNAL_TERMS.findall(text) for path, text in texts.items() if INTERNAL_TERMS.search(text)}


def test_commands_for_users_are_in_blocks_that_are_run_or_marked() -> None:
    """Commands in other places are tests and measurements of Onward itself."""
    typed = re.compile(
        r"^ {4,}(?:\$ )?(?:\.venv/bin/)?(?:onward|make|curl|docker|kubectl|pip|pytest|python3? -m|scripts/)\b.*",
        re.MULTILINE,
    )
    for title, paths in pages_by_section().items():
        for page in (ROOT / "docs" / path for path in paths if title != CONTRIBUTING):
            if page.exists():
                prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
                assert not typed.findall(prose), page


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("scripts", "onward", "mkdocs.yml"):
        (tmp_path / name).symlink_to(ROOT / name)
    targets = ("no-such-page.md", "index.md#no-such-section")
    with (tmp_path / "docs" / "features.md").open("a") as page:
        page.writelines(f"\n[broken]({target})\n" for target in targets)
    built = build_site(tmp_path / "site", root=tmp_path)
    assert built.returncode != 0
    assert not [target for target in targets if f"'{target}'" not in built.stderr]
