"""Results of tool calls find their calls, in any number."""

from typing import Any

from onward.web.ollama_api.ollama_messages import to_chat
from onward.web.ollama_api.ollama_requests import OllamaFunction, OllamaMessage, OllamaToolCall


def calls(*given: tuple[str, str | None]) -> OllamaMessage:
    return OllamaMessage("assistant", tool_calls=[OllamaToolCall(OllamaFunction(name), id=one) for name, one in given])


def result(name: str | None = None, call_id: str | None = None) -> OllamaMessage:
    return OllamaMessage("tool", "done", tool_name=name, tool_call_id=call_id)


def owners(messages: list[OllamaMessage]) -> list[tuple[Any, Any]]:
    """The id and the name of the call of each result."""
    return [(one["tool_call_id"], one.get("name")) for one in to_chat(messages) if one["role"] == "tool"]


def test_a_result_belongs_to_the_first_call_of_its_id_and_name_without_a_result() -> None:
    asked = calls(("f", "a"), ("g", "b"), ("f", "c"), ("g", "b"))
    assert owners([asked, result("g"), result(), result(), result()]) == [
        ("b", "g"),
        ("a", "f"),
        ("c", "f"),
        ("b", "g"),
    ]
    assert owners([asked, result("f", "c"), result(None, "b"), result("g", "b"), result("f")]) == [
        ("c", "f"),
        ("b", "g"),
        ("b", "g"),
        ("a", "f"),
    ]
    assert owners([asked, result("g", "a"), result("h"), result(None, "a")]) == [
        ("a", "g"),
        ("000000001", "h"),
        ("a", "f"),
    ]


class CountedText(str):
    num_comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedText.num_comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_the_work_for_a_result_does_not_grow_with_the_number_of_calls() -> None:
    number = 300
    asked = calls(*((CountedText(f"f{index}"), None) for index in range(number)))
    unmatched = [result(CountedText("other")) for _ in range(number)]
    matched = [result(CountedText(f"f{index}")) for index in reversed(range(number))]
    CountedText.num_comparisons = 0
    names = [name for _, name in owners([asked, *unmatched, *matched])]
    assert names == ["other"] * number + [f"f{index}" for index in reversed(range(number))]
    assert CountedText.num_comparisons < 20 * number
