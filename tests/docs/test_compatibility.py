"""docs/compatibility.md has the results of the versions that `make compat` installs."""

import ast
import re
from pathlib import Path

import msgspec
import pytest

from scripts.compat.clients import BASE_CHECKS, CLIENTS, ClientChecks, Runtime
from scripts.compat.javascript_types import TYPES
from scripts.compat.page import BEGIN, END, PAGE, table
from scripts.compat.results import CheckResult, Outcome, Reason, Target, count, read_results
from scripts.compat.run_client import CHECKS, run_client
from scripts.compat.suites import SUITES, read_report

RESULTS = read_results()
PINNED = re.compile(r"^@?[\w./-]+(?:\[[\w,]+\])?(?:==|@)\d[\w.]*$")


def test_the_page_has_the_table_as_it_is_generated() -> None:
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown.strip() == table(RESULTS), "make compat writes it"


@pytest.mark.parametrize("client", [*CLIENTS, TYPES], ids=lambda client: client.name)
def test_results_are_of_the_pinned_version_and_of_both_targets(client: ClientChecks) -> None:
    [result] = [one for one in RESULTS.suites if one.name == client.name]
    assert result.version == client.version
    assert set(result.targets) == set(Target)


@pytest.mark.parametrize("client", [*CLIENTS, TYPES], ids=lambda client: client.name)
def test_all_packages_of_a_client_are_pinned(client: ClientChecks) -> None:
    assert [one for one in client.packages if not PINNED.match(one)] == []


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_script_reports_every_base_check(client: ClientChecks) -> None:
    text = (CHECKS / client.script).read_text()
    named = set(re.findall(r'check\((?:prefix \+ )?"([\w ,]+)"', text))
    for lacked in re.findall(r"(?:client_lacks|clientLacks)\(([^)]*)\)", text):
        named |= set(ast.literal_eval(f"[{lacked}]"))
    assert named >= BASE_CHECKS


def test_a_script_that_ends_early_fails_all_that_it_has_not_reported(tmp_path: Path) -> None:
    script = tmp_path / "early.py"
    script.write_text("raise SystemExit(3)")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/usr/bin/env")
    client = ClientChecks("early", Runtime.PYTHON, ("early==1",), str(script))
    results = run_client(client, tmp_path, "http://127.0.0.1:1", "smollm2-135m-instruct", tmp_path / "log")
    assert {one.name for one in results} == {"script", *BASE_CHECKS}
    assert all(one.outcome is Outcome.FAILED for one in results)


def test_a_reason_must_be_on_the_list() -> None:
    fields = b'{"name": "images", "outcome": "not_applicable", "reason": "%s"}'
    assert msgspec.json.decode(fields % Reason.MEDIA.value.encode(), type=CheckResult).reason is Reason.MEDIA
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(fields % b"too hard", type=CheckResult)


def test_counts_name_what_failed_and_why_checks_do_not_apply() -> None:
    counts = count(
        [
            CheckResult("a", Outcome.PASSED),
            CheckResult("b", Outcome.FAILED, detail="no"),
            CheckResult("c", Outcome.NOT_APPLICABLE, Reason.MEDIA),
            CheckResult("d", Outcome.NOT_APPLICABLE, Reason.MEDIA),
        ]
    )
    assert (counts.passed, counts.failed, counts.not_applicable) == (1, ["b"], {Reason.MEDIA: 2})
    assert counts.summary() == "1 passed, 1 failed, 2 not applicable"


REPORT = """<testsuites><testsuite>
<testcase classname="unit.test_a" name="test_plain[x]"/>
<testcase classname="unit.test_a.TestB" name="test_wrong"><failure message="assert 404 == 200"/></testcase>
<testcase classname="unit.test_lora" name="test_adapter"><failure message="assert 404 == 200"/></testcase>
<testcase classname="unit.test_lora" name="test_works_all_the_same"/>
<testcase classname="unit.test_a" name="test_slow"><skipped message="skipping slow test"/></testcase>
<testcase classname="" name="unit.test_broken"><error message="collection failure"/></testcase>
</testsuite></testsuites>"""


def test_a_report_of_another_suite_is_read() -> None:
    """A test that is named as not applicable and passes has passed; a file that cannot be read has failed."""
    results = [(one.name, one.outcome, one.reason) for one in read_report(SUITES["llama.cpp"], REPORT)]
    assert results == [
        ("unit/test_a.py::test_plain[x]", Outcome.PASSED, None),
        ("unit/test_a.py::TestB::test_wrong", Outcome.FAILED, None),
        ("unit/test_lora.py::test_adapter", Outcome.NOT_APPLICABLE, Reason.EXCLUDED),
        ("unit/test_lora.py::test_works_all_the_same", Outcome.PASSED, None),
        ("unit/test_a.py::test_slow", Outcome.NOT_APPLICABLE, Reason.SUITE_SKIPS),
        ("unit/test_broken.py", Outcome.FAILED, None),
    ]
