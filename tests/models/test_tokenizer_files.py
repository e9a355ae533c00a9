"""Which files of a folder make its tokenizer, where the result lies, and when it is made again."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from onward.errors import StartupError
from onward.models.loader.model_store import prepare
from onward.models.loader.tokenizer_files import find_tokenizer, prepare_tokenizer
from onward.text.gguf_tokenizer import build_tokenizer
from onward.text.token_table import CHARACTER_OF_BYTE
from onward.text.tokenizer import Tokenizer as OnwardTokenizer
from tests.models.checkpoints import GPT2_TOKENIZER, random_tensors, tiny_config, write_folder

DESCRIPTION = build_tokenizer(GPT2_TOKENIZER).to_str()
VOCAB = {CHARACTER_OF_BYTE[byte]: byte for byte in range(256)} | {"ab": 256, "<|endoftext|>": 257}
MERGES = "#version: 0.2\na b\n"
RANKS = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)) + b"YWI= 256\n"


def write(folder: Path, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode() if isinstance(content, str) else None
        (folder / name.replace("__", ".")).write_bytes(json.dumps(content).encode() if data is None else data)
    return folder


def opened(folder: Path) -> OnwardTokenizer:
    path = prepare_tokenizer(folder, folder.parent / "cache")
    assert path is not None
    return OnwardTokenizer.from_file(folder / path)


def test_a_tokenizer_json_that_says_all_is_used_where_it_lies(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", tokenizer__json=DESCRIPTION, tokenizer_config__json={"bos_token": "<|im_start|>"})
    assert prepare_tokenizer(folder, tmp_path / "cache") == "tokenizer.json"
    assert not (tmp_path / "cache" / "tokenizers").exists()


def test_tokens_that_only_the_config_has_are_added_in_the_cache(tmp_path: Path) -> None:
    size = len(GPT2_TOKENIZER["tokenizer.ggml.tokens"])
    added = {str(size): {"content": "<think>"}, str(size + 3): {"content": "</think>", "special": True}}
    folder = write(tmp_path / "m", tokenizer__json=DESCRIPTION, tokenizer_config__json={"added_tokens_decoder": added})
    tokenizer = opened(folder)
    assert tokenizer.encode("a<think>b</think>") == [3, size, 4, size + 3]
    assert tokenizer.decode([size, size + 3]) == "<think>"
    path = prepare_tokenizer(folder, tmp_path / "cache")
    assert path is not None and Path(path).is_relative_to(tmp_path / "cache")
    # The key is made of contents: another folder with the same files shares it.
    same = write(tmp_path / "n", tokenizer__json=DESCRIPTION, tokenizer_config__json={"added_tokens_decoder": added})
    assert prepare_tokenizer(same, tmp_path / "cache") == path
    write(folder, tokenizer_config__json={"added_tokens_decoder": {str(size): "<other>"}})
    assert opened(folder).token_id("<other>") == size


def test_tokens_in_the_older_form_are_added_too(tmp_path: Path) -> None:
    size = len(GPT2_TOKENIZER["tokenizer.ggml.tokens"])
    config = {"eos_token": "<end>"}
    folder = write(
        tmp_path / "m",
        tokenizer__json=DESCRIPTION,
        added_tokens__json={"<end>": size},
        special_tokens_map__json=config,
    )
    tokenizer = opened(folder)
    assert tokenizer.token_id("<end>") == size and size in tokenizer.special_ids


def test_what_was_built_is_not_built_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", tokenizer__model=RANKS)
    path = prepare_tokenizer(folder, tmp_path / "cache")
    assert path is not None
    os.utime(path, ns=(7, 7))
    assert prepare_tokenizer(folder, tmp_path / "cache") == path
    assert Path(path).stat().st_mtime_ns == 7


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model", "other.tiktoken"])
def test_ranks_are_known_by_their_content_or_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / name).write_bytes(RANKS)
    assert opened(folder).encode("xab") == [120, 256]


def test_vocab_and_merges_follow_the_class_or_the_model_type(tmp_path: Path) -> None:
    by_class = write(
        tmp_path / "m",
        vocab__json=VOCAB,
        merges__txt=MERGES,
        tokenizer_config__json={"tokenizer_class": "GPT2Tokenizer"},
    )
    by_type = write(tmp_path / "n", vocab__json=VOCAB, merges__txt=MERGES, config__json={"model_type": "gpt2"})
    for folder in (by_class, by_type):
        tokenizer = opened(folder)
        assert tokenizer.encode("xab<|endoftext|>") == [120, 256, 257]
        assert tokenizer.special_ids == {257}


def test_a_word_pattern_is_never_guessed(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", vocab__json=VOCAB, merges__txt=MERGES, config__json={"model_type": "mystery"})
    with pytest.raises(StartupError, match=r"tokenizer_class is .*mystery.*known: GPT2Tokenizer"):
        prepare_tokenizer(folder, tmp_path / "cache")
    write(folder, tokenizer_config__json={"tokenizer_class": "MysteryTokenizer"})
    with pytest.raises(StartupError, match=r"tokenizer_class is 'MysteryTokenizer'"):
        prepare_tokenizer(folder, tmp_path / "cache")


def test_a_vocabulary_without_merges_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"vocab\.json but no merges\.txt"):
        find_tokenizer(write(tmp_path / "m", vocab__json=VOCAB))


def test_merges_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    config = {"tokenizer_class": "Qwen2Tokenizer"}
    folder = write(tmp_path / "m", vocab__json=VOCAB, merges__txt="a\n", tokenizer_config__json=config)
    with pytest.raises(StartupError, match=r"merges\.txt has 'a'"):
        prepare_tokenizer(folder, tmp_path / "cache")
    write(folder, merges__txt="a zz\n")
    with pytest.raises(StartupError, match=r"merges\.txt does not fit vocab\.json"):
        prepare_tokenizer(folder, tmp_path / "cache")


def test_a_folder_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    assert prepare_tokenizer(tmp_path, tmp_path / "cache") is None


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_model_with_another_form_of_tokenizer_is_prepared(tmp_path: Path, quantization: str) -> None:
    config = tiny_config(vocab_size=320, hidden_size=64, intermediate_size=128, head_dim=16)
    folder = write_folder(tmp_path / "m", config, random_tensors(config))
    write(folder, tokenizer__model=RANKS, tokenizer_config__json={"chat_template": "T", "eos_token": "ab"})
    model = prepare(str(folder), quantization=quantization, cache_dir=tmp_path / "cache")
    assert model.tokenizer is not None and model.chat_template == "T"
    assert OnwardTokenizer.from_file(Path(model.folder) / model.tokenizer).encode("xab") == [120, 256]
    # Other ranks make another tokenizer, also of a model that is converted.
    (folder / "tokenizer.model").write_bytes(RANKS.replace(b"YWI= 256", b"eGE= 256"))
    again = prepare(str(folder), quantization=quantization, cache_dir=tmp_path / "cache")
    assert again.tokenizer is not None
    assert OnwardTokenizer.from_file(Path(again.folder) / again.tokenizer).encode("xa") == [256]


def test_a_description_that_the_library_refuses_is_reported_with_its_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", tokenizer__json="{}")
    with pytest.raises(StartupError, match=r"the tokenizer of .*/m \(tokenizer\.json\): the tokenizer cannot be read"):
        prepare_tokenizer(folder, tmp_path / "cache")
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    assert prepare_tokenizer(folder, tmp_path / "cache") == "tokenizer.json"
