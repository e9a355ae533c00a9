from typing import Any

import msgspec
import pytest

from onward.errors import InvalidRequest
from onward.proto.model import ModelText
from onward.text.gguf_tokenizer import build_tokenizer
from onward.text.prompt_tokens import ChatMessage, ContentPart, PromptTokens, Rendering, text_hash
from onward.text.tool_messages import with_tools_in_words

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}{% if m.name is defined %} {{ m.name }}{% endif %}]"
    "{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="session")
def model_text(byte_level_metadata: dict[str, Any]) -> ModelText:
    return ModelText(build_tokenizer(byte_level_metadata).to_str(), TEMPLATE, "<|begin|>", "<|end|>")


def test_a_chat_is_the_rendered_template_and_what_was_not_sent_is_not_there(model_text: ModelText) -> None:
    tokens = PromptTokens(model_text)
    assert tokens.tokenizer is not None
    messages = [
        ChatMessage("user", "the fox", name="Ann"),
        ChatMessage("assistant", [ContentPart("text", "jumps"), ContentPart("text", "over")]),
    ]
    rendered = "<|begin|>[user Ann]the fox[assistant]jumps\nover"
    assert tokens.of_chat(messages, 0) == tokens.tokenizer.encode_chat(rendered)


def test_a_template_that_does_not_know_tools_gets_them_in_words(model_text: ModelText) -> None:
    tool = {"type": "function", "function": {"name": "fox"}}
    asked = Rendering(tools=[tool])
    unaware = PromptTokens(model_text)
    [told] = [message["content"] for message in with_tools_in_words([], [tool])]
    assert unaware.of_chat([], 0, asked) == unaware.of_chat([ChatMessage("system", told)], 0)
    aware = PromptTokens(msgspec.structs.replace(model_text, chat_template="{{ tools[0].function.name }}"))
    assert aware.tokenizer is not None
    assert aware.of_chat([], 0, asked) == aware.tokenizer.encode_chat("fox")


@pytest.mark.parametrize(
    ("shown", "text"),
    [("{{ c.function.arguments | tojson }}", '{"the": 1}'), ("{{ '' + c.function.arguments + '' }}", '{"the": 1}')],
)
def test_earlier_calls_are_as_the_template_wants_them(model_text: ModelText, shown: str, text: str) -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}" + shown + "{% endfor %}{% endfor %}"
    tokens = PromptTokens(msgspec.structs.replace(model_text, chat_template=template))
    assert tokens.tokenizer is not None
    call = {"id": "x", "type": "function", "function": {"name": "fox", "arguments": '{"the":1}'}}
    assert tokens.of_chat([ChatMessage("assistant", tool_calls=[call])], 0) == tokens.tokenizer.encode_chat(text)


def test_the_templates_clock_is_the_requests(model_text: ModelText) -> None:
    dated = PromptTokens(msgspec.structs.replace(model_text, chat_template="{{ strftime_now('%Y') }}"))
    assert dated.tokenizer is not None
    assert dated.of_chat([], 1_000_000_000) == dated.tokenizer.encode_chat("2001")


def test_what_has_no_ids_says_why(model_text: ModelText) -> None:
    with pytest.raises(InvalidRequest, match="prompt: must not be empty"):
        PromptTokens(model_text).of_text("")
    with pytest.raises(InvalidRequest, match="no chat template"):
        PromptTokens(msgspec.structs.replace(model_text, chat_template=None)).of_chat([], 0)
    with pytest.raises(InvalidRequest, match="prompt: this model has no tokenizer"):
        PromptTokens(msgspec.structs.replace(model_text, tokenizer=None)).of_text("fox")


@pytest.mark.parametrize("field", ["tokenizer", "chat_template", "bos_token", "eos_token"])
def test_whatever_may_change_the_ids_changes_the_hash(model_text: ModelText, field: str) -> None:
    assert text_hash(model_text) == text_hash(msgspec.structs.replace(model_text))
    assert text_hash(model_text) != text_hash(msgspec.structs.replace(model_text, **{field: "something else"}))


def test_without_a_tokenizer_there_is_nothing_to_agree_on() -> None:
    assert text_hash(ModelText(None, TEMPLATE, None, None)) == ""
