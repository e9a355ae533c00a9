"""The real anthropic package against a real api process."""

import json
from typing import Any

import anthropic
import pytest
from anthropic.types import TextBlock, ThinkingBlock, ToolUseBlock

from onward.proto.engine import ErrorInfo
from tests.api.instance import Instance
from tests.api.messages.reading import MODEL, THINKING, TOOLS, check_error_body
from tests.api.responses.reading import speak_until
from tests.api.small_model import END_OF_THOUGHT
from tests.api.thinking_model import CALL, speak, tokens_of

HI: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}


def prompt_text(keeper: Instance, at: int = -1) -> str:
    return bytes(token for token in keeper.engine.submits[at].prompt_token_ids if token < 256).decode()


def test_a_message_is_created(keeper: Instance, client: anthropic.Anthropic) -> None:
    speak(keeper, tokens_of("hélló"))
    system: Any = [{"type": "text", "text": "be brief"}, {"type": "text", "text": "be kind"}]
    message = client.messages.create(**HI, system=system, metadata={"user_id": "me"}, extra_body={"top_k": 5})
    assert message.content == [TextBlock(type="text", text="hélló")]
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == (
        "assistant",
        MODEL,
        "end_turn",
        None,
    )
    assert message.usage.output_tokens == len("hélló".encode()) + 1
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (
        len(keeper.engine.submits[-1].prompt_token_ids) - 3,
        3,
    ), "the stand-in engine finds three tokens in its cache"
    assert prompt_text(keeper).startswith("system\nbe brief\nbe kind") and "user\nhi" in prompt_text(keeper)


def test_the_tokens_of_a_prompt_are_counted(keeper: Instance, client: anthropic.Anthropic) -> None:
    speak(keeper, tokens_of("x"))
    asked: Any = {"model": MODEL, "system": "be brief", "messages": HI["messages"], **TOOLS}
    client.messages.create(**asked, max_tokens=5)
    count = client.messages.count_tokens(**asked)
    assert count.input_tokens == len(keeper.engine.submits[-1].prompt_token_ids)


def test_the_stream_helper_builds_the_same_message(keeper: Instance, client: anthropic.Anthropic) -> None:
    speak(keeper, tokens_of("hm", END_OF_THOUGHT, "wörds ", CALL))
    asked: Any = HI | THINKING | TOOLS
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "wörds "
    thinking, words, call = final.content
    assert isinstance(thinking, ThinkingBlock) and thinking.thinking == "hm" and thinking.signature
    assert isinstance(words, TextBlock) and words.text == text
    assert isinstance(call, ToolUseBlock) and (call.name, call.input) == ("f", {"a": 1})
    assert final.stop_reason == "tool_use"
    whole = client.messages.create(**asked)
    assert [block.to_dict() | {"id": ""} for block in whole.content] == [
        block.to_dict() | {"id": ""} for block in final.content
    ]
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.output_tokens_details is not None and final.usage.output_tokens_details.thinking_tokens == 2


def test_thinking_can_be_left_out_and_its_block_sent_back(keeper: Instance, client: anthropic.Anthropic) -> None:
    speak(keeper, tokens_of("hm", END_OF_THOUGHT, "yes"))
    shown = client.messages.create(**HI, thinking={"type": "enabled"})  # type: ignore[typeddict-item]
    omitted = client.messages.create(**HI, thinking={"type": "adaptive", "display": "omitted"})
    (full, _), (block, words) = shown.content, omitted.content
    assert isinstance(full, ThinkingBlock) and isinstance(block, ThinkingBlock)
    assert (full.thinking, block.thinking, block.signature) == ("hm", "", full.signature)
    assert words == TextBlock(type="text", text="yes")
    with client.messages.stream(**HI, thinking={"type": "adaptive", "display": "omitted"}) as stream:
        assert not [event for event in stream if event.type == "thinking"]
        assert stream.get_final_message().content[0].to_dict() == block.to_dict()
    talk: Any = [*HI["messages"], {"role": "assistant", "content": omitted.content}, *HI["messages"]]
    client.messages.create(model=MODEL, max_tokens=5, messages=talk)
    assert "yes" in prompt_text(keeper) and "hm" not in prompt_text(keeper)


def test_a_call_is_answered_and_the_talk_goes_on(keeper: Instance, client: anthropic.Anthropic) -> None:
    speak(keeper, tokens_of("hm", END_OF_THOUGHT, CALL))
    asked: Any = HI | THINKING | TOOLS
    first = client.messages.create(**asked)
    call = first.content[-1]
    assert isinstance(call, ToolUseBlock)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    talk = [
        *HI["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    speak(keeper, tokens_of("fine"))
    second = client.messages.create(model=MODEL, max_tokens=50, messages=talk, **TOOLS)  # pyright: ignore[reportArgumentType]
    assert second.content == [TextBlock(type="text", text="fine")]
    text = prompt_text(keeper)
    assert text.index("user\nhi") < text.index("<tool_call>") < text.index("tool\nsunny") < text.index("and now?")


def test_an_answer_continues_the_assistant_s_last_message(keeper: Instance, client: anthropic.Anthropic) -> None:
    speak(keeper, tokens_of("B)"))
    talk: Any = [*HI["messages"], {"role": "assistant", "content": [{"type": "text", "text": "The answer is ("}]}]
    message = client.messages.create(model=MODEL, max_tokens=20, messages=talk)
    assert message.content == [TextBlock(type="text", text="B)")]
    assert prompt_text(keeper).endswith("assistant\nThe answer is (")


@pytest.mark.parametrize(("thinking", "is_open"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_is_switched_as_templates_know_it(
    keeper: Instance, client: anthropic.Anthropic, thinking: str, is_open: bool
) -> None:
    speak(keeper, tokens_of("x"))
    config: Any = {"type": thinking} | ({"budget_tokens": 1024} if thinking == "enabled" else {})
    client.messages.create(**HI, thinking=config)
    submit = keeper.engine.submits[-1]
    assert (submit.prompt_token_ids[-1] >= 256) == is_open, "the prompt ends with the tag"
    reasoning = submit.sampling_params.reasoning
    assert (None if reasoning is None else reasoning.budget) == (1024 if thinking == "enabled" else None)


def test_a_schema_forces_the_answer(keeper: Instance, client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    speak(keeper, tokens_of('{"a": 3}'))
    client.messages.create(**HI, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "max"})
    grammar = keeper.engine.submits[-1].sampling_params.grammar
    assert grammar is not None and json.loads(grammar.source) == schema


def test_the_stop_sequence_is_named(keeper: Instance, client: anthropic.Anthropic) -> None:
    speak(keeper, tokens_of("one two"))
    message = client.messages.create(**HI, stop_sequences=["x", " tw"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " tw")
    assert message.content == [TextBlock(type="text", text="one")]


def test_errors_are_those_of_the_package(keeper: Instance, client: anthropic.Anthropic) -> None:
    unknown: Any = HI | {"model": "other"}
    too_long: Any = HI | {"max_tokens": 10**6}
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**unknown, stream=True)
    assert caught.value.type == "not_found_error" and caught.value.request_id
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**too_long)
    body: Any = refused.value.body
    assert check_error_body(body)["param"] == "max_tokens"


def test_an_error_in_a_stream_has_what_resumes_it(keeper: Instance, client: anthropic.Anthropic) -> None:
    speak_until(keeper, 5, tokens_of("one two three"))
    stream = client.messages.create(**HI, stream=True, extra_body={"seed": 7})
    keeper.wait_until(lambda: keeper.engine.paused)
    keeper.lose_requests(1, ErrorInfo("crashed_worker", "the worker is down", 500, False))
    keeper.engine.paused = False
    with pytest.raises(anthropic.APIStatusError) as caught:
        list(stream)
    keeper.engine.refusal = None
    body: Any = caught.value.body
    error = check_error_body(body)
    assert (error["type"], error["code"]) == ("api_error", "crashed_worker")
    resume = body["partial"]["resume"]
    assert bytes(resume["generated_token_ids"]).decode() == "one two three"[: len(resume["generated_token_ids"])] != ""
    speak(keeper, tokens_of("one two three"))
    again = client.messages.create(**HI, extra_body=resume)
    assert again.content == [TextBlock(type="text", text="one two three")]


def test_an_error_of_a_whole_message_has_what_there_is_of_it(keeper: Instance, client: anthropic.Anthropic) -> None:
    speak(keeper, tokens_of("one two"))
    error = ErrorInfo("pd_preempted", "PD Error: out of blocks", 503, True)
    keeper.engine.give_up = lambda sampling, position: error if position == 4 else None
    message = client.messages.create(**HI)
    assert (message.stop_reason, message.content) == (None, [TextBlock(type="text", text="one ")])
    extra: Any = message.model_extra
    assert extra["error"]["code"] == "pd_preempted" and len(extra["resume"]["generated_token_ids"]) == 4
    with client.messages.stream(**HI) as stream:
        events = [event for event in stream if event.type == "message_delta"]
    assert events[0].delta.stop_reason is None
