"""Checks that changes since a commit touch only docstrings and comments of Python files:

    python scripts/check_prose_commit.py BASE [PATH ...]

A docstring is any bare string statement, so the description below a field counts as one too.
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def syntax_of(source: str) -> str:
    """Returns the syntax tree without bare strings, positions and comments."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                setattr(node, field, [statement for statement in statements if not _is_bare_string(statement)])
    return ast.dump(tree)


def _is_bare_string(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def changed_code(base: str, paths: list[str]) -> list[str]:
    """Returns the Python files whose code differs from the one in `base`, added and removed files included."""
    found: list[str] = []
    for line in _git("diff", "--name-status", "--no-renames", base, "--", *(paths or ["*.py"])).splitlines():
        status, path = line.split("\t")
        if not path.endswith(".py"):
            continue
        if status != "M" or syntax_of(_git("show", f"{base}:{path}")) != syntax_of((ROOT / path).read_text()):
            found.append(path)
    return found


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    found = changed_code(sys.argv[1], sys.argv[2:])
    for path in found:
        print(f"{path}: its code has changed, not only its prose")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
