"""What the pages and the table of sabotages promise to be tested is tested."""

import re
from pathlib import Path

from tests.sabotage import TABLE

ROOT = Path(__file__).resolve().parents[2]
SHORT_NAMES = {
    "stages": "tests/conformance/test_stages.py",
    "events": "tests/conformance/test_events.py",
    "failures": "tests/failures/test_steps_and_preemption.py",
    "kv": "tests/failures/test_kv_between_machines.py",
}


def is_there(path: str, name: str) -> bool:
    return f"\ndef {name}(" in (ROOT / path).read_text()


def test_every_test_that_the_origins_name_is_there() -> None:
    page = (ROOT / "docs" / "origins.md").read_text()
    named = re.findall(r"(tests/\w+/\w+\.py|stages|events|failures|kv)::(\w+)", page)
    assert len(named) > 30
    missing = [(path, name) for path, name in named if not is_there(SHORT_NAMES.get(path, path), name)]
    assert not missing


def test_every_failure_up_to_f37_has_a_test_and_a_sabotage() -> None:
    tests = (ROOT / SHORT_NAMES["failures"]).read_text() + (ROOT / SHORT_NAMES["kv"]).read_text()
    broken = " ".join(sabotage.breaks for sabotage in TABLE)
    for number in [*range(1, 19), *range(20, 38)]:
        assert f"\ndef test_f{number:02d}_" in tests
        assert f"F{number:02d}" in broken


def test_every_test_that_a_sabotage_names_is_there() -> None:
    for sabotage in TABLE:
        for test in sabotage.tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).is_file() if not name else is_there(path, name.partition("[")[0]), test
