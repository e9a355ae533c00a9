"""`rescore_from`: logprobs of an earlier answer's tokens, told before those of the new ones, once."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from onward.proto.engine import ErrorInfo
from tests.api.instance import Instance
from tests.api.reader import PATHS, ask, request

OUTPUT = list("né 😀 ends".encode())
LENGTH = len(OUTPUT)
STREAMING = pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
EVERY_PATH = pytest.mark.parametrize("path", PATHS)


def scored(path: str, streaming: bool, **fields: Any) -> dict[str, Any]:
    asked = {"logprobs": True, "top_logprobs": 2} if "chat" in path else {"logprobs": 2}
    return request(path, streaming, max_tokens=LENGTH, seed=7, **asked) | fields


@EVERY_PATH
@STREAMING
def test_logprobs_are_told_from_any_position_on(instance: Instance, path: str, streaming: bool) -> None:
    instance.engine.choose = lambda prompt, sampling, tokens: OUTPUT[len(tokens)]
    whole = ask(instance.url, path, scored(path, streaming))
    plain = ask(instance.url, path, scored(path, streaming, generated_token_ids=OUTPUT[:6]))
    for start in range(7):
        body = scored(path, streaming, generated_token_ids=OUTPUT[:6], rescore_from=start)
        answer = ask(instance.url, path, body)
        assert answer.logprobs == [whole.logprobs[0][start:]]
        assert (answer.texts, answer.usage) == (plain.texts, whole.usage), "their text is not repeated"
        assert answer.choices[0].token_ids == plain.choices[0].token_ids
        assert instance.engine.submits[-1].rescore_from == (None if start == 6 else start)


@EVERY_PATH
@STREAMING
def test_each_choice_has_its_own_position(instance: Instance, path: str, streaming: bool) -> None:
    whole = ask(instance.url, path, scored(path, True, n=3))
    given = [whole.choices[index].token_ids[: 3 + index] for index in range(3)]
    for starts in ([0, 2, 5], 2):
        answer = ask(instance.url, path, scored(path, streaming, n=3, generated_token_ids=given, rescore_from=starts))
        each = starts if isinstance(starts, list) else [starts] * 3
        assert answer.logprobs == [told[start:] for told, start in zip(whole.logprobs, each, strict=True)]


@STREAMING
def test_an_engine_that_dies_is_asked_again_only_for_what_was_not_delivered(
    instance: Instance, streaming: bool
) -> None:
    path = "/v1/generate"
    instance.engine.choose = lambda prompt, sampling, tokens: OUTPUT[len(tokens)]
    whole = ask(instance.url, path, scored(path, streaming))
    instance.engine.paused = True

    def pause_in_the_middle(prompt: Any, sampling: Any, tokens: Any) -> int:
        instance.engine.paused = len(tokens) == 9
        return OUTPUT[len(tokens)]

    body = scored(path, streaming, generated_token_ids=OUTPUT[:6], rescore_from=2)
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask, instance.url, path, body)
        instance.wait_until(lambda: bool(instance.engine.running))
        instance.restart_engine(lambda engine: setattr(engine, "choose", pause_in_the_middle))
        instance.wait_until(lambda: instance.engine.paused)
        again = instance.engine.submits[-1].rescore_from
        instance.restart_engine(lambda engine: setattr(engine, "choose", lambda _, __, tokens: OUTPUT[len(tokens)]))
        answer = asking.result(20)
    assert (again, instance.engine.submits[-1].rescore_from) == (2, None)
    assert answer.logprobs == [whole.logprobs[0][2:]]


@STREAMING
def test_what_was_given_up_before_it_was_scored_is_asked_for_again(instance: Instance, streaming: bool) -> None:
    path = "/v1/generate"
    instance.engine.choose = lambda prompt, sampling, tokens: OUTPUT[len(tokens)]
    whole = ask(instance.url, path, scored(path, streaming))
    error = ErrorInfo("pd_preempted", "PD Error: x", 503, True, stage="decode")
    body = scored(path, streaming, generated_token_ids=OUTPUT[:6], rescore_from=2)
    told: list[Any] = []
    for cut, owed in ((6, 2), (8, 8), (None, None)):
        instance.engine.give_up = lambda sampling, position, cut=cut: error if position == cut else None
        answer = ask(instance.url, path, body)
        told += answer.logprobs[0]
        if owed is not None:
            assert answer.resume is not None and answer.resume["rescore_from"] == [owed]
            body |= answer.resume
    assert told == whole.logprobs[0][2:]
