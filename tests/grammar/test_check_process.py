"""Grammars that would cost minutes, gigabytes or the process are refused, and cost nobody else anything."""

import json
import os
import signal
from collections.abc import Iterator

import pytest

from onward.grammar.check_process import TOO_LARGE, CheckProcess
from onward.grammar.faults import GrammarRefused
from onward.proto.sampling import Grammar
from onward.sim import vocabulary

FINE = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
HUGE = Grammar(
    "json_schema", '{"type": "integer", "multipleOf": 9999991, "minimum": -123456789012, "maximum": 98765432109876}'
)
"""A minute and two gigabytes, where nothing limits it."""
DEEP = Grammar(
    "grammar",
    "start: r0\n" + "\n".join(f'r{i}: "a{i}" r{i + 1}? | r{max(0, i - 1)}' for i in range(3000)) + '\nr3000: "z"',
)
"""Ends a process by its stack."""


@pytest.fixture
def process() -> Iterator[CheckProcess]:
    process = CheckProcess(vocabulary.text().tokenizer or "")
    yield process
    process.close()


def problem(process: CheckProcess, grammar: Grammar) -> str | None:
    try:
        process.check(grammar)
    except GrammarRefused as refused:
        return str(refused)
    return None


@pytest.mark.parametrize("grammar", [HUGE, DEEP], ids=["huge", "deep"])
def test_what_is_too_much_ends_the_child_and_nobody_else(process: CheckProcess, grammar: Grammar) -> None:
    assert problem(process, FINE) is None
    first = process.pid
    refused = problem(process, grammar)
    assert refused is not None
    assert refused == TOO_LARGE or "compile" in refused
    assert process.pid is None
    assert problem(process, Grammar("regex", "abc")) is None
    second = process.pid
    assert second not in (None, first)
    assert problem(process, grammar) == refused
    assert process.pid == second, "its end is remembered"


def test_what_is_wrong_is_told_and_the_child_goes_on(process: CheckProcess) -> None:
    assert problem(process, FINE) is None
    child = process.pid
    assert problem(process, Grammar("json_schema", json.dumps({"unevaluatedItems": False}))) is not None
    assert "contains" in (problem(process, Grammar("json_schema", '{"contains": {}}')) or "")
    assert process.pid == child


def test_a_child_that_somebody_kills_says_nothing_about_the_grammar(process: CheckProcess) -> None:
    assert problem(process, FINE) is None
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert problem(process, Grammar("regex", "abc")) is None


def test_the_child_goes_when_its_owner_closes(process: CheckProcess) -> None:
    assert problem(process, FINE) is None
    child = process.pid
    assert child is not None
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
