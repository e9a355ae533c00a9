import json
from pathlib import Path
from typing import Any

import pytest

from onward.errors import StartupError
from onward.models.loader.text_metadata import has_tokenizer, read_folder_text_metadata, read_gguf_text_metadata
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
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
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
    said = read_folder_text_metadata(
        write(tmp_path, tokenizer_config={"eos_token": "</s>"}, tokenizer={"added_tokens": added})
    )
    assert said.eos_token_ids == [12]


def test_a_folder_without_any_text_files_says_nothing(tmp_path: Path) -> None:
    said = read_folder_text_metadata(tmp_path)
    assert (said.chat_template, said.bos_token, said.eos_token, said.eos_token_ids) == (None, None, None, [])
    assert not has_tokenizer(tmp_path)


def test_wrong_end_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="eos_token_id"):
        read_folder_text_metadata(write(tmp_path, config={"eos_token_id": "</s>"}))


def test_a_tokenizer_in_another_form_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(StartupError, match=r"tokenizer\.model but no tokenizer\.json"):
        has_tokenizer(tmp_path)


def test_gguf_names_its_tokens_by_id() -> None:
    said = read_gguf_text_metadata(
        GPT2_TOKENIZER | {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 0}
    )
    assert (said.bos_token, said.eos_token, said.eos_token_ids) == ("<|im_start|>", "<|im_end|>", [2, 0])
    assert said.chat_template == GPT2_TOKENIZER["tokenizer.chat_template"]


def test_gguf_without_text_fields_says_nothing() -> None:
    said = read_gguf_text_metadata({"tokenizer.ggml.eos_token_id": 99, "tokenizer.ggml.tokens": ["a"]})
    assert (said.chat_template, said.bos_token, said.eos_token, said.eos_token_ids) == (None, None, None, [99])
