import json
from pathlib import Path
from typing import Any

import pytest

from onward.errors import StartupError
from onward.models.loader.text_metadata import read_folder_text_metadata, read_gguf_text_metadata
from onward.text.chat_template import ChatTemplate
from tests.models.checkpoints import GPT2_TOKENIZER


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_template_and_tokens_come_from_the_tokenizers_config(tmp_path: Path) -> None:
    said = read_folder_text_metadata(
        write(
            tmp_path,
            tokenizer_config={"chat_template": "T", "bos_token": {"content": "<s>"}, "eos_token": "</s>"},
            config={"eos_token_id": 7},
        )
    )
    assert (said.chat_template, said.bos_token, said.eos_token, said.eos_token_ids) == ("T", "<s>", "</s>", [7])


def test_a_template_file_comes_before_the_config(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("new ✓", "utf-8")
    assert read_folder_text_metadata(tmp_path).chat_template == "new ✓"


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match=r"chat_template\.jinja is not valid UTF-8"):
        read_folder_text_metadata(tmp_path)


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    templates = [{"name": "rag", "template": "documents"}, {"name": "default", "template": "plain"}]
    assert (
        read_folder_text_metadata(write(tmp_path, tokenizer_config={"chat_template": templates})).chat_template
        == "plain"
    )


def test_end_tokens_of_generation_and_model_config_are_joined(tmp_path: Path) -> None:
    said = read_folder_text_metadata(
        write(tmp_path, generation_config={"eos_token_id": [5, 3]}, config={"eos_token_id": 3})
    )
    assert said.eos_token_ids == [5, 3]


def test_without_ids_the_tokenizers_end_token_is_looked_up(tmp_path: Path) -> None:
    added = [{"id": 11, "content": "<s>"}, {"id": 12, "content": "</s>"}]
    write(tmp_path, tokenizer_config={"eos_token": "</s>"}, tokenizer={"added_tokens": added})
    said = read_folder_text_metadata(tmp_path, "tokenizer.json")
    assert said.eos_token_ids == [12]


def test_a_folder_without_any_text_files_says_nothing(tmp_path: Path) -> None:
    said = read_folder_text_metadata(tmp_path)
    assert (said.chat_template, said.bos_token, said.eos_token, said.eos_token_ids) == (None, None, None, [])


def test_wrong_end_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="eos_token_id"):
        read_folder_text_metadata(write(tmp_path, config={"eos_token_id": "</s>"}))


@pytest.mark.parametrize("tools", [None, [{"type": "function"}]])
@pytest.mark.parametrize("ending", ["", "\n", " ", "\n  ", "{% if tools %}x{% endif %}"])
def test_a_template_for_tools_is_taken_where_there_are_tools(tmp_path: Path, tools: Any, ending: str) -> None:
    """As if each were rendered by itself, to the last space."""
    sources = {name: f"\n  {{%- set x = {name!r} %}}\n{{{{ x }}}}{ending}" for name in ("tool_use", "default")}
    templates = [{"name": name, "template": source} for name, source in sources.items()]
    combined = read_folder_text_metadata(write(tmp_path, tokenizer_config={"chat_template": templates})).chat_template
    assert combined is not None

    def rendered(source: str) -> str:
        return ChatTemplate(source).render([{"role": "user", "content": "x"}], created_s=0, tools=tools)

    assert rendered(combined) == rendered(sources["tool_use" if tools else "default"])


@pytest.mark.parametrize("templates", [[], [{"name": "rag", "template": "x"}]])
def test_templates_for_other_uses_are_none_for_chats(tmp_path: Path, templates: list[Any]) -> None:
    written = write(tmp_path, tokenizer_config={"chat_template": templates})
    assert read_folder_text_metadata(written).chat_template is None


@pytest.mark.parametrize("wrong", [7, {"default": "x"}, [{"name": "default"}], ["x"]])
def test_a_template_of_another_type_is_refused_by_field(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(StartupError, match=r"tokenizer_config\.json: chat_template"):
        read_folder_text_metadata(write(tmp_path, tokenizer_config={"chat_template": wrong}))


def test_a_template_in_a_json_file_of_its_own_is_found(tmp_path: Path) -> None:
    write(tmp_path, chat_template={"chat_template": "own"}, tokenizer_config={"chat_template": "old"})
    assert read_folder_text_metadata(tmp_path).chat_template == "own"


def test_gguf_names_its_tokens_by_id() -> None:
    said = read_gguf_text_metadata(
        GPT2_TOKENIZER | {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 0}
    )
    assert (said.bos_token, said.eos_token, said.eos_token_ids) == ("<|im_start|>", "<|im_end|>", [2, 0])
    assert said.chat_template == GPT2_TOKENIZER["tokenizer.chat_template"]


def test_gguf_without_text_fields_says_nothing() -> None:
    said = read_gguf_text_metadata({"tokenizer.ggml.eos_token_id": 99, "tokenizer.ggml.tokens": ["a"]})
    assert (said.chat_template, said.bos_token, said.eos_token, said.eos_token_ids) == (None, None, None, [99])
