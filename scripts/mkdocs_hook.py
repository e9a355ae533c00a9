"""Hook of MkDocs: adds the generated pages to the site, and leads links that leave `docs/` to copies on the site.

MkDocs puts this folder on the path while it loads the hook, so `docs_site` is found.
"""

from pathlib import Path
from typing import Any

from docs_site import flags_page, metrics_page, python_page, routes_page
from docs_site.links import PAGES_OF_THE_ROOT, linked_files, rewrite_links
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
ICON = ROOT / "onward" / "web" / "ui" / "static" / "icon.svg"
GENERATED = {
    "reference/flags.md": flags_page.render,
    "reference/routes.md": routes_page.render,
    "reference/metrics.md": metrics_page.render,
    "reference/python.md": python_page.render,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, render in GENERATED.items():
        files.append(File.generated(config, path, content=render()))
    for source, path in PAGES_OF_THE_ROOT.items():
        text = rewrite_links((ROOT / source).read_text(), source, path)
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, ICON.name, abs_src_path=str(ICON)))
    pages = [file for file in files.documentation_pages() if file.generated_by is None]
    for source, path in sorted(linked_files(ROOT, pages_of(pages)).items()):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / source)))
    return files


def pages_of(files: list[File]) -> list[str]:
    """Paths of pages from the root of the repository, beside those of the root itself."""
    return [*(f"docs/{file.src_uri}" for file in files), *PAGES_OF_THE_ROOT]


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    if page.file.generated_by is not None:
        return markdown
    return rewrite_links(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)
