from typing import get_args

import pytest

from onward.config import ReasoningParser, ToolCallParser
from onward.text.reasoning import reasoning_formats
from onward.text.tool_calls.call_ids import tool_call_id
from onward.text.tool_calls.tool_call_formats import TOOL_CALL_FORMATS, detect_tool_call_format, select_tool_call_format


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('For each call write <tool_call>\n{"name": …}\n</tool_call>{{ tools }}', "hermes"),
        ("<tool_call>\n<function=name>\n<parameter=a>{{ tools }}", "json"),
        ("{{ '[TOOL_CALLS][' }}{{ tool_call.function|tojson }}", "mistral"),
        ("{{ '<｜tool▁calls▁begin｜>' + name + '\\n```json\\n' + arguments }}", "deepseek_v3"),
        ("{{ '<｜tool▁calls▁begin｜>' + name + '<｜tool▁sep｜>' + arguments }}", "deepseek_v31"),
        ("<|start_header_id|>{{ '{\"name\": ' }}{{ '\"parameters\": ' }}", "llama3_json"),
        ("{{ '<|python_tag|>' + name + '.call(' }}", "llama3_json"),
        ("<|header_start|>{{ '<|python_start|>' }}", "pythonic"),
        ("<|start_header_id|>Answer with [some_function(a=1)]. {{ parameters }}", "pythonic"),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", "json"),
        ("{{ messages[0].content }}", "json"),
    ],
)
def test_a_template_says_how_its_model_calls(template: str, name: str) -> None:
    assert detect_tool_call_format(template) == name
    assert name in TOOL_CALL_FORMATS


def test_a_calls_id_is_a_function_of_request_choice_and_index() -> None:
    ids = {tool_call_id(request, choice, index) for request in ("a", "b") for choice in (0, 1) for index in range(12)}
    assert len(ids) == 48
    assert tool_call_id("a", 1, 2) == tool_call_id("a", 1, 2) == "call_" + tool_call_id("a", 1, 2)[5:]
    assert all(len(one) == 29 and one[5:].isalnum() for one in ids)


def test_mistrals_ids_are_nine_letters_and_digits() -> None:
    ids = [tool_call_id("request", 0, index, "mistral") for index in range(50)]
    assert len(set(ids)) == 50
    assert all(len(one) == 9 and one.isalnum() for one in ids)


def test_flags_name_every_format_and_nothing_else() -> None:
    assert {*get_args(ToolCallParser)} == {"auto", "none", *TOOL_CALL_FORMATS}
    assert {*get_args(ReasoningParser)} == {"auto", "none", *reasoning_formats.REASONING_FORMATS}


def test_a_flag_chooses_a_format_or_none() -> None:
    template = "<tool_call>{{ tools }}</tool_call><think>"
    assert select_tool_call_format("auto", template) is TOOL_CALL_FORMATS["hermes"]
    assert select_tool_call_format("auto", None) is TOOL_CALL_FORMATS["json"]
    assert select_tool_call_format("mistral", template) is TOOL_CALL_FORMATS["mistral"]
    assert select_tool_call_format("none", template) is None
    assert reasoning_formats.select_reasoning_format("auto", template) is reasoning_formats.REASONING_FORMATS["think"]
    assert reasoning_formats.select_reasoning_format("auto", None) is None
    assert reasoning_formats.select_reasoning_format("qwen3", None) is reasoning_formats.REASONING_FORMATS["qwen3"]
    assert reasoning_formats.select_reasoning_format("none", template) is None
