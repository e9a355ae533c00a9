"""What the pages and the table of sabotages promise to be tested is tested."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.sabotage.table import TABLE

ROOT = Path(__file__).resolve().parents[2]
SHORT_NAMES = {
    "stages": "tests/conformance/test_stages.py",
    "events": "tests/conformance/test_events.py",
    "failures": "tests/failures/test_steps_and_preemption.py",
    "kv": "tests/failures/test_kv_between_machines.py",
    "crashes": "tests/e2e/test_pd_crashes.py",
    "limits": "tests/e2e/test_pd_limits.py",
    "grammars": "tests/failures/test_grammars.py",
    "serving": "tests/e2e/test_pd_serving.py",
    "router": "tests/e2e/test_router.py",
    "chaos": "tests/e2e/test_chaos.py",
    "app": "tests/router/test_app.py",
    "core": "tests/router/test_core.py",
    "stream": "tests/router/test_client_stream.py",
    "crowded": "tests/router/test_crowded.py",
    "rows": "tests/router/test_failures.py",
    "replicas": "tests/router/test_replicas.py",
    "attempts": "tests/api/test_attempts.py",
    "detached": "tests/api/test_detached.py",
    "draining": "tests/api/test_draining.py",
    "registering": "tests/api/test_router_registration.py",
    "access": "tests/e2e/test_access.py",
    "rights": "tests/api/test_roles.py",
    "reach": "tests/router/test_roles.py",
    "admission": "tests/engine/test_admission.py",
    "stored": "tests/api/responses/test_stored.py",
    "cuts": "tests/api/responses/test_cuts.py",
    "carried": "tests/api/responses/test_behind_router.py",
    "aborted": "tests/api/responses/test_aborted.py",
    "routed": "tests/api/responses/test_aborted_behind_router.py",
    "hostile": "tests/models/test_hostile_files.py",
}
REFERENCE = re.compile(r"…(_\w+)|(tests/[\w/]+\.py|…|\b[a-z]+(?=::))(?:::(\w+(?:::\w+)?))?")
"""A file with a test, a class or nothing; `…` is the file named last, or the beginning of the test named last."""
NAMED_ROWS = {
    (*range(1, 19), *range(20, 38)): ("failures", "kv"),
    (40, 41, *range(43, 52)): ("rows", "replicas", "attempts"),
    (42,): ("grammars",),
}


@cache
def names_in(path: str) -> frozenset[str]:
    """Functions, classes, and methods as `Class::method`."""
    names: set[str] = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return frozenset(names)


def is_there(path: str, name: str) -> bool:
    path = SHORT_NAMES.get(path, path)
    return (ROOT / path).is_file() and (not name or name in names_in(path))


def named_in(cell: str) -> list[tuple[str, str]]:
    """The tests that a cell of a table names, each as file and name; of a whole file without a name."""
    named: list[tuple[str, str]] = []
    path = name = ""
    for ending, file, own_name in REFERENCE.findall(cell):
        if ending:
            [name] = [one for one in names_in(path) if one.endswith(ending)] or [ending]
        elif file == "…":
            in_class = name.partition("::")[0] + "::" if "::" in name and "::" not in own_name else ""
            name = in_class + own_name
        else:
            path, name = SHORT_NAMES.get(file) or file, own_name
        named.append((path, name))
    return named


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def test_every_test_that_the_origins_name_is_there() -> None:
    page = (ROOT / "docs" / "origins.md").read_text()
    named = re.findall(r"(tests/\w+/\w+\.py|" + "|".join(SHORT_NAMES) + r")::(\w+)", page)
    assert len(named) > 30
    assert not [(path, name) for path, name in named if not is_there(path, name)]


def test_every_line_of_the_origins_says_what_where_and_which_test() -> None:
    lines = (ROOT / "docs" / "origins.md").read_text().splitlines()
    rows = [cells_of(line) for line in lines if line.startswith("| ") and not line.startswith("| what went wrong")]
    assert len(rows) > 40
    for row in rows:
        assert len(row) == 3 and all(row), f"a cell is empty: {row}"
        named = named_in(row[2])
        assert [name for _, name in named if name], f"no test is named for: {row[0]}"
        assert not [one for one in named if not is_there(*one)], row[0]


def test_every_line_of_the_failure_contract_names_tests_that_are_there() -> None:
    lines = (ROOT / "docs" / "failure-contract.md").read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| ") and not line.startswith("| fault ")]
    assert len(rows) > 80
    for fault, *_, tests, _ in rows:
        named = named_in(tests)
        assert named, f"no test is named for: {fault}"
        assert not [one for one in named if not is_there(*one)], fault


def test_every_failure_has_a_test_and_a_sabotage_that_this_test_notices() -> None:
    for numbers, files in NAMED_ROWS.items():
        names = [name for file in files for name in names_in(SHORT_NAMES[file])]
        for number in numbers:
            own = f"test_f{number:02d}_"
            assert [name for name in names if name.rpartition("::")[2].startswith(own)], own
            broken = [sabotage for sabotage in TABLE if f"F{number:02d}" in sabotage.breaks]
            assert [test for sabotage in broken for test in sabotage.tests if own in test], own


def test_every_test_that_a_sabotage_names_is_there() -> None:
    for sabotage in TABLE:
        for test in sabotage.tests:
            path, _, name = test.partition("[")[0].partition("::")
            assert is_there(path, name), test


def test_each_sabotage_has_a_name_of_its_own() -> None:
    names = [sabotage.name for sabotage in TABLE]
    assert len(names) == len(set(names))
