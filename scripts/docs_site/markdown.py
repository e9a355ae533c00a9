"""Markdown that the generated pages have in common."""

from collections.abc import Iterable, Sequence

NOTE = "This page is generated from the code of version {version} when the site is built."


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_row(columns), "|" + "---|" * len(columns), *(_row(row) for row in rows)]
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def sentence(text: str) -> str:
    """A help text as a sentence, and without HTML in it. A text that begins with a value (`auto: …`) keeps its case."""
    text = text.replace("<", "&lt;")
    return text if text.partition(" ")[0].endswith(":") else text[:1].upper() + text[1:]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"
