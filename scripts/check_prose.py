"""Checks prose as a part of `make lint`: docstrings and comments of all Python files, messages of `onward/` (errors, logs,
help texts), README, CONTRIBUTING and docs.

* No word of BANNED_WORDS, and no docstring begins with one of BANNED_OPENINGS.
* No sentence has more than MAX_WORDS words. Code and tables do not count.

scripts/prose_allowlist.txt has the number of findings that a file may still have. It may only shrink: a file with fewer
findings than its line allows is an error too.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOWLIST = ROOT / "scripts" / "prose_allowlist.txt"
BANNED_WORDS = re.compile(r"\b(whoever|whosoever|nobody|somebody|carried on)\b", re.IGNORECASE)
BANNED_OPENINGS = re.compile(r"(Of|Who|Whoever|Whose|Those|Nobody|Somebody)\b")
MAX_WORDS = 35
CODE = ("onward", "tests", "benchmarks", "scripts")
PAGES_OF_THE_PAST = frozenset({"CHANGELOG.md"})
_NOT_PROSE = re.compile(r"^\s{4,}|^\s*[|#<]|\S {2,}\S|──|->")
"""Indented code, tables, headings, HTML, and lines of diagrams."""
_MARKERS = re.compile(r"^(noqa|type:|fmt:|pyright:|ruff:)")


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of prose: a docstring, a block of comments, a message, or a paragraph of a page."""

    line: int
    text: str
    is_docstring: bool = False


def findings_in(passage: Passage) -> Iterator[str]:
    for match in BANNED_WORDS.finditer(passage.text):
        yield f'"{match.group()}": name the subject'
    if passage.is_docstring and (match := BANNED_OPENINGS.match(passage.text)):
        yield f'begins with "{match.group()}": begin with what it is or does'
    for sentence in sentences_of(passage.text):
        if (count := len(sentence.split())) > MAX_WORDS:
            yield f'{count} words in one sentence: "{" ".join(sentence.split()[:6])} ..."'


def sentences_of(text: str) -> Iterator[str]:
    """Sentences of paragraphs and list items. Indented blocks, tables and fenced code are not prose."""
    text = re.sub(r"^( *)(```|~~~).*?^\1\2", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"``.*?``|`[^`]*`", "code", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for paragraph in re.split(r"\n\s*\n", text):
        prose = [line for line in paragraph.splitlines() if not _NOT_PROSE.search(line)]
        for item in re.split(r"^\s*(?:[*+-]|\d+\.)\s+", "\n".join(prose), flags=re.MULTILINE):
            yield from re.split(r"(?<=[.!?:])[\"')*_]*\s+", item.strip())


def passages_of_module(source: str) -> Iterator[Passage]:
    """Docstrings, descriptions below fields, and comments; neighbouring lines of comments are one passage."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Passage(node.lineno, _dedent(node.value.value), is_docstring=True)
    block: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or _MARKERS.match(token.string.lstrip("#! ")):
            continue
        line = token.start[0]
        if block and line != last + 1:
            yield Passage(begin, "\n".join(block))
            block = []
        begin = begin if block else line
        block.append(token.string.lstrip("#").strip())
        last = line
    if block:
        yield Passage(begin, "\n".join(block))


def messages_of_module(source: str) -> Iterator[Passage]:
    """Strings in code: errors, log lines, help texts. An expression in an f-string counts as one word. Docstrings and
    constants of the module, which are data, are left out."""
    tree = ast.parse(source)
    constants = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)} | set(map(id, constants))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            left_out |= set(map(id, node.values))
            yield Passage(node.lineno, "".join(_text_of(part) for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield Passage(node.lineno, node.value)


def _text_of(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "x"


def _dedent(docstring: str) -> str:
    """Removes the indentation that continuation lines share, so that indented examples can be told apart."""
    first, *rest = docstring.split("\n")
    margin = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
    return "\n".join([first.strip(), *(line[margin:] for line in rest)])


def passages_of_page(source: str) -> Iterator[Passage]:
    yield Passage(1, source)


def findings_of(path: Path) -> list[str]:
    source = path.read_text()
    name = path.relative_to(ROOT)
    passages = [*(passages_of_module(source) if path.suffix == ".py" else passages_of_page(source))]
    if path.is_relative_to(ROOT / "onward") and path.suffix == ".py":
        passages += messages_of_module(source)
    return [f"{name}:{passage.line}: {finding}" for passage in passages for finding in findings_in(passage)]


def read_allowlist() -> dict[str, int]:
    lines = (line.split() for line in ALLOWLIST.read_text().splitlines() if line and not line.startswith("#"))
    return {path: int(count) for path, count in lines}


def main() -> int:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    modules = (file for folder in CODE for file in (ROOT / folder).rglob("*.py"))
    files = [*modules, *(page for page in pages if page.name not in PAGES_OF_THE_PAST)]
    found = {str(path.relative_to(ROOT)): findings for path in sorted(files) if (findings := findings_of(path))}
    if "--write" in sys.argv:
        print("".join(f"{path} {len(findings)}\n" for path, findings in found.items()), end="")
        return 0
    allowed, errors = read_allowlist(), list[str]()
    for path, findings in found.items():
        if len(findings) > allowed.get(path, 0):
            errors.extend(findings)
    for path, count in allowed.items():
        if (now := len(found.get(path, ()))) < count:
            errors.append(f"scripts/prose_allowlist.txt: {path} has {now} findings now, not {count}; change the line")
    print("\n".join(errors), end="\n" if errors else "")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
