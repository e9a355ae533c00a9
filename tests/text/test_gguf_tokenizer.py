import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer
from transformers import GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

from onward.errors import StartupError
from onward.text.gguf_tokenizer import build_tokenizer

Vocabulary = tuple[dict[str, int], list[tuple[str, str]]]
Encode = Callable[[str], list[int]]

SAMPLES = [
    "",
    " ",
    "Hello",
    "isn't THEY'VE i'M",
    "1234567 12 a1b22c333 ½ ² ٣٤ Ⅷ",
    "def f(x):\n    return x  # twice\n\n\n\tdone\r\n\r\n",
    "   three   and\ttabs \t mixed  \n  end   ",
    "naïve café e\u0301 Å 日本語です。 Москва 한국어",
    "👍🏽 👨‍👩‍👧‍👦🎉 \u200d \u00a0x \u3000y",
    "aaaaaaaaaaaaa bananananas !!!???... --- ===",
    "a" * 2000,
    "\x00\x01\x7f \u0085 \u2028",
]
WORDS = [
    "the",
    " the",
    "fox",
    "is",
    "n't",
    "'ve",
    "12",
    "345",
    " ",
    "  ",
    "\n",
    "\t",
    "é",
    "日本",
    "👍",
    "aa",
    "!",
    "_",
]
texts = st.one_of(
    st.sampled_from(SAMPLES), st.text(max_size=40), st.lists(st.sampled_from(WORDS), max_size=20).map("".join)
)


def with_fields(metadata: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def encoder(tokenizer: Tokenizer) -> Encode:
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="session")
def built(byte_level_metadata: dict[str, Any]) -> dict[str, Tokenizer]:
    return {
        pre: build_tokenizer(with_fields(byte_level_metadata, pre=pre))
        for pre in ("smollm", "gpt-2", "qwen2", "llama-bpe")
    }


@pytest.fixture(scope="session")
def references(byte_level: Vocabulary) -> dict[str, Encode]:
    vocab, merges = byte_level
    pairs: Any = merges  # declared as strings, taken as pairs
    gpt2 = GPT2Tokenizer(vocab=dict(vocab), merges=pairs)
    qwen2 = Qwen2Tokenizer(vocab=dict(vocab), merges=pairs)
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}

    class TrainedHere(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return {bytes(byte_of[c] for c in token): token_id for token, token_id in vocab.items()}

    return {
        "gpt-2": lambda text: gpt2.encode(text, add_special_tokens=False),
        "qwen2": lambda text: qwen2.encode(text, add_special_tokens=False),
        "llama-bpe": encoder(TrainedHere(vocab_file="trained here").converted()),
    }


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_byte_level_ids_are_those_of_transformers(
    built: dict[str, Tokenizer], references: dict[str, Encode], pre: str
) -> None:
    ours, theirs = encoder(built[pre]), references[pre]

    @settings(max_examples=150, deadline=None)
    @given(texts)
    def agree(text: str) -> None:
        assert ours(text) == theirs(text)

    agree()


@settings(max_examples=100, deadline=None)
@given(texts)
def test_byte_level_tokens_give_the_text_back(built: dict[str, Tokenizer], text: str) -> None:
    for pre in ("smollm", "gpt-2", "llama-bpe"):
        assert built[pre].decode(encoder(built[pre])(text)) == text
    composed = unicodedata.normalize("NFC", text)
    assert built["qwen2"].decode(encoder(built["qwen2"])(composed)) == composed


def test_smollm_makes_every_digit_a_token(built: dict[str, Tokenizer]) -> None:
    text = "In 1984 and12345"
    tokens = built["smollm"].encode(text).tokens
    assert [token for token in tokens if any(c.isdigit() for c in token)] == list("198412345")
    assert any(len(token) > 1 and token.isdigit() for token in built["gpt-2"].encode(text).tokens)


@settings(max_examples=100, deadline=None)
@given(texts)
def test_smollm_is_gpt2_between_single_digits(built: dict[str, Tokenizer], text: str) -> None:
    stretches = [""]
    for character in text:
        if unicodedata.category(character).startswith("N"):
            stretches += [character, ""]
        else:
            stretches[-1] += character
    gpt2 = encoder(built["gpt-2"])
    assert encoder(built["smollm"])(text) == [i for stretch in stretches for i in gpt2(stretch)]


def test_llama3_takes_a_word_that_is_a_token_whole(byte_level_metadata: dict[str, Any]) -> None:
    """Also where no merges lead to it."""
    tokens = [*byte_level_metadata["tokenizer.ggml.tokens"], "qzxj"]
    types = [*byte_level_metadata["tokenizer.ggml.token_type"], 1]
    metadata = with_fields(byte_level_metadata, tokens=tokens, token_type=types)
    llama3 = build_tokenizer(with_fields(metadata, pre="llama-bpe"))
    gpt2 = build_tokenizer(with_fields(metadata, pre="gpt-2"))
    assert encoder(llama3)("qzxj") == [len(tokens) - 1]
    assert len(encoder(gpt2)("qzxj")) > 1


def test_control_and_user_defined_tokens_are_never_cut(byte_level_metadata: dict[str, Any]) -> None:
    tokens = byte_level_metadata["tokenizer.ggml.tokens"]
    tokenizer = build_tokenizer(byte_level_metadata)
    encoding = tokenizer.encode("the<|begin|>fox<tool><|end|>")
    assert [t for t in encoding.tokens if "<" in t] == ["<|begin|>", "<tool>", "<|end|>"]
    assert all(tokens[i] == token for i, token in zip(encoding.ids, encoding.tokens, strict=True))
    assert tokenizer.decode(encoding.ids) == "thefox<tool>", "control tokens have no text"
    assert tokenizer.get_vocab_size() == len(tokens)


def test_bos_and_eos_are_added_as_the_file_says(byte_level_metadata: dict[str, Any]) -> None:
    def ends(**fields: Any) -> list[str]:
        tokens = build_tokenizer(with_fields(byte_level_metadata, **fields)).encode("fox").tokens
        return [token for token in tokens if token.startswith("<|")]

    assert ends() == []
    assert ends(add_bos_token=True) == ["<|begin|>"]
    assert ends(add_bos_token=True, add_eos_token=True) == ["<|begin|>", "<|end|>"]
    assert ends(pre="llama-bpe") == ["<|begin|>"], "Llama 3 begins so, unless the file says otherwise"
    assert ends(pre="llama-bpe", add_bos_token=False) == []


def test_sentencepiece_ids_are_those_of_sentencepiece(
    sentencepiece_model: SentencePieceProcessor, sentencepiece_metadata: dict[str, Any]
) -> None:
    ours = encoder(build_tokenizer(sentencepiece_metadata))

    @settings(max_examples=300, deadline=None)
    @given(texts)
    def agree(text: str) -> None:
        assert ours(text) == sentencepiece_model.encode(text)

    agree()


@settings(max_examples=100, deadline=None)
@given(texts)
def test_sentencepiece_tokens_give_the_text_back(sentencepiece_built: Tokenizer, text: str) -> None:
    marked = text.replace("▁", "_")  # the mark itself cannot be told from a space
    assert sentencepiece_built.decode(encoder(sentencepiece_built)(marked)) == marked


@pytest.fixture(scope="session")
def sentencepiece_built(sentencepiece_metadata: dict[str, Any]) -> Tokenizer:
    return build_tokenizer(sentencepiece_metadata)


def test_sentencepiece_begins_with_bos_and_falls_back_to_bytes(sentencepiece_built: Tokenizer) -> None:
    assert sentencepiece_built.encode("𝄞").tokens == ["<s>", "▁", "<0xF0>", "<0x9D>", "<0x84>", "<0x9E>"]


def test_sentencepiece_without_a_space_prefix_keeps_leading_spaces(sentencepiece_metadata: dict[str, Any]) -> None:
    tokenizer = build_tokenizer(with_fields(sentencepiece_metadata, add_space_prefix=False))
    assert tokenizer.encode("the").tokens[1] != "▁the"
    for text in ("the", " the", "  the"):
        assert tokenizer.decode(encoder(tokenizer)(text)) == text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pre": "never-heard-of"}, ["tokenizer.ggml.pre", "never-heard-of", "smollm", "qwen2", "llama-bpe"]),
        ({"pre": None}, ["tokenizer.ggml.pre"]),
        ({"model": "rwkv"}, ["tokenizer.ggml.model", "rwkv", "gpt2", "llama"]),
        ({"tokens": None}, ["tokenizer.ggml.tokens"]),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, ["tokenizer.ggml.tokens", "twice"]),
        ({"merges": None}, ["tokenizer.ggml.merges"]),
        ({"merges": ["nospace"]}, ["tokenizer.ggml.merges", "nospace"]),
        ({"merges": ["missing1 missing2"]}, ["tokenizer.ggml.merges"]),
        ({"token_type": [1]}, ["tokenizer.ggml.token_type"]),
        ({"add_bos_token": True, "bos_token_id": 10**6}, ["tokenizer.ggml.bos_token_id"]),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused_by_field(
    byte_level_metadata: dict[str, Any], fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(StartupError) as refused:
        build_tokenizer(with_fields(byte_level_metadata, **fields))
    assert all(word in refused.value.message for word in words), refused.value.message


def test_sentencepiece_scores_must_fit_the_tokens(sentencepiece_metadata: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.ggml\.scores"):
        build_tokenizer(with_fields(sentencepiece_metadata, scores=[0.0]))
