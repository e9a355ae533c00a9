from typing import Any

import msgspec
import pytest

from onward.errors import InvalidRequest
from onward.proto.model import TokenizerFiles
from onward.text.gguf_tokenizer import build_tokenizer
from onward.text.prompt_tokenizer import ChatMessage, ContentPart, PromptTokenizer, TemplateOptions, tokenizer_hash
from onward.text.tool_messages import with_tools_system_message

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}{% if m.name is defined %} {{ m.name }}{% endif %}]"
    "{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="session")
def model_text(byte_level_metadata: dict[str, Any]) -> TokenizerFiles:
    return TokenizerFiles(build_tokenizer(byte_level_metadata).to_str(), TEMPLATE, "<|begin|>", "<|end|>")


def test_a_chat_is_the_rendered_template_and_what_was_not_sent_is_not_there(model_text: TokenizerFiles) -> None:
    tokens = PromptTokenizer(model_text)
    assert tokens.tokenizer is not None
    messages = [
        ChatMessage("user", "the fox", name="Ann"),
        ChatMessage("assistant", [ContentPart("text", "jumps"), ContentPart("text", "over")]),
    ]
    rendered = "<|begin|>[user Ann]the fox[assistant]jumps\nover"
    assert tokens.tokenize_chat(messages, 0) == tokens.tokenizer.encode_chat(rendered)


def test_special_tokens_are_added_to_a_chat_only_where_asked_for(byte_level_metadata: dict[str, Any]) -> None:
    with_bos = build_tokenizer(byte_level_metadata | {"tokenizer.ggml.add_bos_token": True}).to_str()
    tokens = PromptTokenizer(TokenizerFiles(with_bos, "{{ messages[0].content }}", "<|begin|>", "<|end|>"))
    assert tokens.tokenizer is not None
    bos, messages = tokens.tokenizer.token_id("<|begin|>"), [ChatMessage("user", "fox")]
    plain = tokens.tokenize_chat(messages, 0)
    assert plain and bos not in plain
    assert tokens.tokenize_chat(messages, 0, add_special_tokens=True) == [bos, *plain]


def test_a_template_that_does_not_know_tools_gets_them_in_words(model_text: TokenizerFiles) -> None:
    tool = {"type": "function", "function": {"name": "fox"}}
    asked = TemplateOptions(tools=[tool])
    unaware = PromptTokenizer(model_text)
    [told] = [message["content"] for message in with_tools_system_message([], [tool])]
    assert unaware.tokenize_chat([], 0, asked) == unaware.tokenize_chat([ChatMessage("system", told)], 0)
    aware = PromptTokenizer(msgspec.structs.replace(model_text, chat_template="{{ tools[0].function.name }}"))
    assert aware.tokenizer is not None
    assert aware.tokenize_chat([], 0, asked) == aware.tokenizer.encode_chat("fox")


@pytest.mark.parametrize(
    ("shown", "text"),
    [("{{ c.function.arguments | tojson }}", '{"the": 1}'), ("{{ '' + c.function.arguments + '' }}", '{"the": 1}')],
)
def test_earlier_calls_are_as_the_template_wants_them(model_text: TokenizerFiles, shown: str, text: str) -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}" + shown + "{% endfor %}{% endfor %}"
    tokens = PromptTokenizer(msgspec.structs.replace(model_text, chat_template=template))
    assert tokens.tokenizer is not None
    call = {"id": "x", "type": "function", "function": {"name": "fox", "arguments": '{"the":1}'}}
    assert tokens.tokenize_chat([ChatMessage("assistant", tool_calls=[call])], 0) == tokens.tokenizer.encode_chat(text)


def test_the_templates_clock_is_the_requests(model_text: TokenizerFiles) -> None:
    dated = PromptTokenizer(msgspec.structs.replace(model_text, chat_template="{{ strftime_now('%Y') }}"))
    assert dated.tokenizer is not None
    assert dated.tokenize_chat([], 1_000_000_000) == dated.tokenizer.encode_chat("2001")


def test_what_has_no_ids_says_why(model_text: TokenizerFiles) -> None:
    with pytest.raises(InvalidRequest, match="prompt: must not be empty"):
        PromptTokenizer(model_text).tokenize_text("")
    with pytest.raises(InvalidRequest, match="no chat template"):
        PromptTokenizer(msgspec.structs.replace(model_text, chat_template=None)).tokenize_chat([], 0)
    with pytest.raises(InvalidRequest, match="prompt: this model has no tokenizer"):
        PromptTokenizer(msgspec.structs.replace(model_text, tokenizer=None)).tokenize_text("fox")


@pytest.mark.parametrize("field", ["tokenizer", "chat_template", "bos_token", "eos_token"])
def test_whatever_may_change_the_ids_changes_the_hash(model_text: TokenizerFiles, field: str) -> None:
    assert tokenizer_hash(model_text) == tokenizer_hash(msgspec.structs.replace(model_text))
    assert tokenizer_hash(model_text) != tokenizer_hash(
        msgspec.structs.replace(model_text, **{field: "something else"})
    )


def test_without_a_tokenizer_there_is_nothing_to_agree_on() -> None:
    assert tokenizer_hash(TokenizerFiles(None, TEMPLATE, None, None)) == ""
