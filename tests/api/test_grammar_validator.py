"""What happens to a grammar before any work: it is compiled where that can do no harm, and given tokens are replayed."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from onward.api.requests.grammar_validator import GrammarValidator
from onward.api.requests.preprocessing_executors import GRAMMAR_LIMITS
from onward.api.requests.structured_outputs import RequestedGrammar
from onward.clock import SystemClock
from onward.errors import InvalidRequest, Overloaded
from onward.proto.reasoning_params import ReasoningParams
from onward.proto.sampling_params import Grammar
from onward.sim import vocabulary
from onward.sim.nodes import InlineExecutor
from onward.text.tokenizer import Tokenizer
from onward.web.fair_executor import FairExecutor

TEXT = vocabulary.model_text()
TOKENIZER = Tokenizer(TEXT.tokenizer or "")
WANTED = RequestedGrammar(Grammar("regex", "abc|abcde"), "guided_regex")


def gate(tokenizer: Tokenizer | None = TOKENIZER) -> GrammarValidator:
    return GrammarValidator(TEXT, tokenizer, vocabulary.grammars())


def queue(threads: Executor | None = None) -> FairExecutor:
    return FairExecutor(threads or InlineExecutor(), GRAMMAR_LIMITS, SystemClock(), "grammars")


def ends(given: Sequence[Sequence[int]], wanted: RequestedGrammar = WANTED, path: str = "generated_token_ids") -> Any:
    return asyncio.run(gate().validate(queue(), "", wanted, given, path))


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_given_tokens_complete_a_grammar_where_nothing_can_follow() -> None:
    assert ends([[], ids("ab"), ids("abc"), ids("abcde")]) == (None, None, None, len(ids("abcde")))


def test_given_tokens_that_the_grammar_does_not_allow_are_named() -> None:
    with pytest.raises(InvalidRequest) as refused:
        ends([ids("abx")])
    assert refused.value.param == "generated_token_ids[2]"
    with pytest.raises(InvalidRequest) as refused:
        ends([ids("a"), ids("x")])
    assert refused.value.param == "generated_token_ids[1][0]"


def test_a_grammar_that_cannot_be_used_is_refused_under_the_field_that_asks_for_it() -> None:
    wanted = RequestedGrammar(Grammar("json_schema", '{"contains": {}}'), "response_format.json_schema.schema")
    with pytest.raises(InvalidRequest, match="contains") as refused:
        ends([[]], wanted)
    assert (refused.value.param, refused.value.status) == ("response_format.json_schema.schema", 400)


def test_a_model_without_a_tokenizer_has_no_grammars() -> None:
    with pytest.raises(InvalidRequest) as refused:
        asyncio.run(gate(None).validate(queue(), "", WANTED, [[]], ""))
    assert refused.value.param == "guided_regex"


def test_grammars_that_wait_have_a_bound_for_each_caller() -> None:
    class Never(InlineExecutor):  # nothing is ever done
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            return Future()

    async def scenario() -> None:
        one, grammars = gate(), queue(Never())

        def ask(caller: str) -> "asyncio.Task[Any]":
            return asyncio.ensure_future(one.validate(grammars, caller, WANTED, [[]], ""))

        waiting = [ask("a") for _ in range(1 + GRAMMAR_LIMITS.waiting_per_caller)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await ask("a")
        another = ask("b")
        await asyncio.sleep(0)
        assert not another.done()
        for one_of_all in (*waiting, another):
            one_of_all.cancel()
        await asyncio.wait([*waiting, another])

    asyncio.run(scenario())


def test_a_grammar_that_has_passed_does_not_wait_again() -> None:
    class Counting(InlineExecutor):
        num = 0

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            self.num += 1
            return super().submit(fn, *args, **kwargs)

    async def scenario() -> int:
        threads = Counting()
        one, grammars = gate(), queue(threads)
        for _ in range(3):
            assert await one.validate(grammars, "", WANTED, [[], []], "") == (None, None)
        assert await one.validate(grammars, "", WANTED, [ids("abcde")], "") == (len(ids("abcde")),)
        return threads.num

    assert asyncio.run(scenario()) == 2


def test_thinking_is_no_part_of_what_the_grammar_is_about() -> None:
    begin, end = ids("x")[0], ids("b")[0]
    rule = ReasoningParams((begin,), (end,))
    given = [[begin], [begin, end, *ids("abc")], [begin, *ids("ac"), end, *ids("abcde")], ids("abcde")]
    found = asyncio.run(gate().validate(queue(), "", WANTED, given, "generated_token_ids", rule))
    assert found == (None, None, len(given[2]), len(given[3]))
    with pytest.raises(InvalidRequest) as refused:
        asyncio.run(gate().validate(queue(), "", WANTED, [[begin, end, *ids("ax")]], "generated_token_ids", rule))
    assert refused.value.param == "generated_token_ids[3]"
