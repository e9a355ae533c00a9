import functools
from typing import Any

from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion_chunk import ChoiceDelta

from onward.api.endpoints.chat import delta_fields, message_fields
from onward.text.message_parser import MessageParser
from onward.text.reasoning.reasoning_formats import REASONING_FORMATS as REASONING
from onward.text.tool_calls.call_ids import tool_call_id
from onward.text.tool_calls.tool_call_formats import TOOL_CALL_FORMATS

TEXT = (
    "<think>\nhm</think>\n\nI look.\n"
    '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "g"}</tool_call>'
)
ids = functools.partial(tool_call_id, "request", 0)


def new_stream() -> MessageParser:
    return MessageParser(REASONING["qwen3"].parser(False), TOOL_CALL_FORMATS["hermes"].parser(()))


def chunks(size: int) -> list[dict[str, Any]]:
    stream = new_stream()
    told = [stream.push(TEXT[place : place + size]) for place in range(0, len(TEXT), size)]
    return [delta_fields(events, ids) for events in [*told, stream.finish()]]


def test_a_whole_message_is_one_that_the_openai_package_knows() -> None:
    stream = new_stream()
    fields = message_fields(stream.push(TEXT) + stream.finish(), ids)
    message = ChatCompletionMessage.model_validate(fields, strict=True)
    assert message.content == "I look.\n"
    assert fields["reasoning_content"] == "hm"
    assert [call.model_dump() for call in message.tool_calls or []] == [
        {"id": ids(0), "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": ids(1), "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]


def test_deltas_of_any_size_add_up_to_the_message() -> None:
    for size in (1, 2, 7, len(TEXT)):
        content, reasoning, calls = "", "", dict[int, dict[str, str]]()
        for fields in chunks(size):
            delta = ChoiceDelta.model_validate(fields, strict=True)
            content += delta.content or ""
            reasoning += fields.get("reasoning_content", "")
            for call in delta.tool_calls or []:
                assert call.function is not None
                if call.id is not None:
                    assert (call.index, call.type) == (len(calls), "function")
                    calls[call.index] = {"id": call.id, "name": call.function.name or "", "arguments": ""}
                calls[call.index]["arguments"] += call.function.arguments or ""
        assert (content, reasoning) == ("I look.\n", "hm")
        assert calls == {
            0: {"id": ids(0), "name": "f", "arguments": '{"a": 1}'},
            1: {"id": ids(1), "name": "g", "arguments": "{}"},
        }


def test_marks_alone_say_nothing() -> None:
    stream = new_stream()
    assert delta_fields(stream.push("<think>\n"), ids) == {}


def test_a_message_of_calls_only_has_no_content_and_one_of_nothing_has_empty_content() -> None:
    stream = MessageParser(None, TOOL_CALL_FORMATS["mistral"].parser(()))
    assert message_fields(stream.push("[TOOL_CALLS]f{}"), ids)["content"] is None
    assert message_fields([], ids) == {"role": "assistant", "content": "", "refusal": None}
