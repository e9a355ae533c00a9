import json
from typing import Any

import pytest

from onward.errors import InvalidRequest
from onward.text.chat_template import ChatTemplate
from onward.text.tool_messages import (
    template_joins_arguments,
    template_reads_tools,
    with_template_arguments,
    with_tools_system_message,
)

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def asking(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}]


def test_a_template_that_writes_arguments_as_json_gets_the_object() -> None:
    source = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    messages = with_template_arguments(asking('{"city":  "Paris"}'), as_text=template_joins_arguments(source))
    assert ChatTemplate(source).render(messages, created_s=0) == '{"city": "Paris"}'


@pytest.mark.parametrize(
    "source",
    [
        "{% for c in messages[0]['tool_calls'] %}{{ 'x' + c['function']['arguments'] + 'y' }}{% endfor %}",
        "{% for c in messages[0].tool_calls %}{{- 'x' ~ c.function.arguments ~ 'y' -}}{% endfor %}",
    ],
)
def test_a_template_that_joins_arguments_to_text_gets_text(source: str) -> None:
    messages = with_template_arguments(asking('{"a":1}'), as_text=template_joins_arguments(source))
    assert ChatTemplate(source).render(messages, created_s=0) == 'x{"a": 1}y'


@pytest.mark.parametrize("arguments", [None, "", "{}"])
def test_a_call_without_arguments_has_an_empty_object(arguments: str | None) -> None:
    [message] = with_template_arguments(asking(arguments), as_text=False)
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ["{", "[]", "1", '"a"', 7])
def test_arguments_that_are_no_object_are_refused_by_path(arguments: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        with_template_arguments([{"role": "user", "content": "hi"}, *asking(arguments)], as_text=False)
    assert refused.value.param == "messages[1].tool_calls[0].function.arguments"


def test_a_template_that_has_not_heard_of_tools_has_them_told_in_words() -> None:
    assert not template_reads_tools("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert template_reads_tools("{% if tools %}{{ tools | tojson }}{% endif %}")
    told = with_tools_system_message([{"role": "user", "content": "hi"}], [TOOL])
    assert [message["role"] for message in told] == ["system", "user"]
    assert json.dumps(TOOL["function"]) in told[0]["content"]
    parts = [{"type": "text", "text": "Be kind."}]
    told = with_tools_system_message([{"role": "system", "content": parts}, {"role": "user", "content": "hi"}], [TOOL])
    assert [message["role"] for message in told] == ["system", "user"]
    assert told[0]["content"].startswith("Be kind.\n\n")


@pytest.mark.parametrize("calls", [None, []])
def test_a_message_without_calls_has_no_such_field(calls: list[Any] | None) -> None:
    message = {"role": "assistant", "content": "hi", "tool_calls": calls}
    assert with_template_arguments([message], as_text=False) == [{"role": "assistant", "content": "hi"}]
