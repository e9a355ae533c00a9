"""Deliberate bugs are put where shipping code looks: not at a re-export or a name that nothing reads any more.

`make sabotage` shows, more slowly, that each is noticed.
"""

import ast
import inspect
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from onward.cli import serve, start_summary
from onward.engine.scheduling.scheduler import Scheduler
from tests.sabotage.patches import Patches, Sabotage
from tests.sabotage.sim.search import Row
from tests.sabotage.sim.table import TABLE as SIM_TABLE
from tests.sabotage.table import TABLE

PACKAGE = Path(__file__).resolve().parents[2] / "onward"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def attributes() -> frozenset[str]:
    """Every name that the package reads from an object."""
    nodes = (node for path in PACKAGE.rglob("*.py") for node in ast.walk(tree_of(path)))
    return frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load))


@cache
def names_of(path: Path) -> frozenset[str]:
    """Every name that a module reads from its globals or from the builtins."""
    nodes = ast.walk(tree_of(path))
    return frozenset(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))


@cache
def names_by_module() -> frozenset[tuple[str, str]]:
    """Every `module.name` that the package reads when it runs, as the last part of the module's name and the name. Imports
    at the top of a file do not count: they have taken what was there before the bug.
    """
    found: set[tuple[str, str]] = set()
    for path in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(tree_of(path)))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom | ast.Import)]
        modules = {a.asname or a.name: a.name.rpartition(".")[2] for node in imports for a in node.names}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                found.add((modules[node.value.id], node.attr))
        for node in imports:
            if isinstance(node, ast.ImportFrom) and node.col_offset:
                found |= {((node.module or "").rpartition(".")[2], alias.name) for alias in node.names}
    return frozenset(found)


def is_read(owner: object, name: str) -> bool:
    """Whether shipping code looks up this name where the bug was put."""
    if isinstance(owner, ModuleType):
        inside = owner.__name__.startswith("onward.") and name in names_of(Path(inspect.getfile(owner)))
        return inside or (owner.__name__.rpartition(".")[2], name) in names_by_module()
    assert isinstance(owner, type)
    inherited = any(name in vars(base) for base in owner.__mro__[1:] if not base.__module__.startswith("onward"))
    return name in attributes() or inherited or name.startswith("__")


def unread_places(row: Sabotage | Row) -> list[tuple[object, str]]:
    """Places of a bug that nothing reads. A function may be replaced where it is defined too if it is where it is used."""
    patches = Patches()
    try:
        row.apply(patches)
        read = {name for owner, name in patches.places if is_read(owner, name)}
        return [(owner, name) for owner, name in patches.places if name not in read]
    finally:
        patches.undo()


@pytest.mark.parametrize("sabotage", TABLE, ids=lambda one: one.name)
def test_a_deliberate_bug_is_put_where_shipping_code_looks(sabotage: Sabotage) -> None:
    assert not unread_places(sabotage)


def test_bugs_for_the_simulator_are_put_where_shipping_code_looks() -> None:
    assert not [(row.name, place) for row in SIM_TABLE for place in unread_places(row)]


def test_a_place_that_nothing_reads_is_found() -> None:
    assert is_read(serve, "pool_warning") and is_read(Scheduler, "plan")
    assert not is_read(start_summary, "pool_warning"), "imported by name at the top of its only user"
    assert not is_read(serve, "SERVE_FLAGS") and not is_read(Scheduler, "no_such_method")
