"""Checks the names in `onward/`, as a part of `make lint`:

* No class name occurs twice. docs/glossary.md may list exceptions, each as one role on two sides.
* No module, class, function, parameter or attribute has a word of VAGUE in its name. Names from before this rule are in
  scripts/names_allowlist.txt, which may only shrink: a line whose name no longer occurs has to be removed.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOWLIST = ROOT / "scripts" / "names_allowlist.txt"
TWO_SIDES = "## One role on two sides"
VAGUE = frozenset(
    re.findall(
        r"\w+",
        """
        anew asked asks beside books carried carry chance door drawn errand fullness guess handover hear heard knob
        ledger lone nobody nudge place poster promise proven rim said say says seating shelf somebody story stuff
        surroundings tell teller telling tells thing things told undrawn visitor weather whoever wish
        """,
    )
)


def words_of(name: str) -> list[str]:
    """`HeldRequest`, `held_request` -> held, request."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


def names_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                yield node.attr
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def duplicates(trees: dict[Path, ast.Module], two_sides: set[str]) -> list[str]:
    places: dict[str, list[Path]] = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    return [
        f"{name} is defined in {', '.join(str(path.relative_to(ROOT)) for path in paths)}"
        for name, paths in sorted(places.items())
        if len(paths) > 1 and name not in two_sides
    ]


def two_sides_of(glossary: str) -> set[str]:
    _, _, section = glossary.partition(TWO_SIDES)
    return set(re.findall(r"^\| `(\w+)`", section.partition("\n## ")[0], re.MULTILINE))


def main() -> int:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "onward").rglob("*.py"))}
    found = {name for tree in trees.values() for name in names_in(tree)} | {path.stem for path in trees}
    vague = {name for name in found if VAGUE & set(words_of(name))}
    allowed = set(ALLOWLIST.read_text(encoding="utf-8").split())
    faults = duplicates(trees, two_sides_of((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")))
    faults += [f"{name}: {', '.join(sorted(VAGUE & set(words_of(name))))} is vague" for name in sorted(vague - allowed)]
    faults += [f"{name} is no longer there: remove it from {ALLOWLIST.name}" for name in sorted(allowed - vague)]
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
