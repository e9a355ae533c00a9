from typing import get_args

import pytest

from onward.config import ReasoningParser, ToolCallParser
from onward.text.reasoning import tags
from onward.text.tool_calls.formats import FORMATS, chosen, detect
from onward.text.tool_calls.ids import tool_call_id


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
    assert detect(template) == name
    assert name in FORMATS


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
    assert {*get_args(ToolCallParser)} == {"auto", "none", *FORMATS}
    assert {*get_args(ReasoningParser)} == {"auto", "none", *tags.FORMATS}


def test_a_flag_chooses_a_format_or_none() -> None:
    template = "<tool_call>{{ tools }}</tool_call><think>"
    assert chosen("auto", template) is FORMATS["hermes"]
    assert chosen("auto", None) is FORMATS["json"]
    assert chosen("mistral", template) is FORMATS["mistral"]
    assert chosen("none", template) is None
    assert tags.chosen("auto", template) is tags.FORMATS["think"]
    assert tags.chosen("auto", None) is None
    assert tags.chosen("qwen3", None) is tags.FORMATS["qwen3"]
    assert tags.chosen("none", template) is None
