"""Grammars that would cost minutes, gigabytes or the process are refused, and do not delay other requests."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from onward.grammar.grammar_checker import TOO_LARGE, GrammarChecker
from onward.grammar.grammar_errors import InvalidGrammar
from onward.proto.sampling_params import Grammar
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
def process() -> Iterator[GrammarChecker]:
    process = GrammarChecker(vocabulary.model_text().tokenizer or "")
    yield process
    process.close()


def problem(process: GrammarChecker, grammar: Grammar) -> str | None:
    try:
        process.check(grammar)
    except InvalidGrammar as refused:
        return str(refused)
    return None


@pytest.mark.parametrize("grammar", [HUGE, DEEP], ids=["huge", "deep"])
def test_what_is_too_much_ends_the_child_and_nobody_else(process: GrammarChecker, grammar: Grammar) -> None:
    assert problem(process, FINE) is None
    [first] = process.pids
    refused = problem(process, grammar)
    assert refused is not None
    assert refused == TOO_LARGE or "compile" in refused
    [second] = process.pids
    assert second != first, "the next one is there already: no other caller waits for its start"
    assert problem(process, Grammar("regex", "abc")) is None
    assert problem(process, grammar) == refused
    assert process.pids == [second], "its end is remembered"


def test_what_is_wrong_is_told_and_the_child_goes_on(process: GrammarChecker) -> None:
    assert problem(process, FINE) is None
    [child] = process.pids
    assert problem(process, Grammar("json_schema", json.dumps({"unevaluatedItems": False}))) is not None
    assert "contains" in (problem(process, Grammar("json_schema", '{"contains": {}}')) or "")
    assert process.pids == [child]


def test_a_child_that_somebody_kills_says_nothing_about_the_grammar(process: GrammarChecker) -> None:
    assert problem(process, FINE) is None
    [child] = process.pids
    os.kill(child, signal.SIGKILL)
    assert problem(process, Grammar("regex", "abc")) is None


def test_the_child_goes_when_its_owner_closes(process: GrammarChecker) -> None:
    assert problem(process, FINE) is None
    [child] = process.pids
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_grammar_that_takes_long_does_not_delay_another() -> None:
    processes = GrammarChecker(vocabulary.model_text().tokenizer or "", 2)
    try:
        assert problem(processes, FINE) is None
        [child] = processes.pids
        os.kill(child, signal.SIGSTOP)  # as one that takes long, for as long as it takes here
        os.waitid(os.P_PID, child, os.WSTOPPED)
        with ThreadPoolExecutor(1) as threads:
            slow = threads.submit(problem, processes, Grammar("regex", "slow"))
            while processes._idle.qsize() == 2:
                os.sched_yield()
            assert problem(processes, Grammar("regex", "quick")) is None
            assert not slow.done()
            assert len(processes.pids) == 2
            os.kill(child, signal.SIGCONT)
            assert slow.result() is None
    finally:
        processes.close()
