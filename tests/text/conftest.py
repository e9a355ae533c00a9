"""Small vocabularies, trained here, in the form a GGUF file has them."""

import io
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from onward.text.gguf_tokenizer import build_tokenizer
from onward.text.tokenizer import Tokenizer as OnwardTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog isn't amused; they've seen it before.",
    "In 1984 there were 12345 foxes and 678 dogs. In 2024 there are 90000 and 31415926.",
    "def add(a, b):\n    # adds two numbers\n    return a + b\n\n\nclass Fox:\n\tdef jump(self):\n\t\tpass\n",
    "Größe, naïve café, señor, Ελλάδα, Москва, 日本語の文章です。中文文本，你好世界。 한국어 문장.",
    "👍🏽 👨‍👩‍👧‍👦 🎉🎉 I'm, you're, WE'LL, he'd; aaa aaaa aaaaa aaaaaaa banana bananas ananas",
    "   leading, trailing   \n\n   and   inner    spaces\t\ttabs\r\nlines\r\n\r\n",
    '{\'key\': [1, 2, 3], "other": {"nested": null}} <b>html</b> https://example.org/a?b=c&d=e',
]


def byte_level_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    vocab = tokenizer.get_vocab()
    by_id = sorted(vocab, key=vocab.__getitem__)
    # Every way to make a token of two older ones, in the order of their making: what converters write into GGUF files.
    merges = [
        (token[:cut], token[cut:])
        for token in by_id
        for cut in range(1, len(token))
        if vocab.get(token[:cut], len(vocab)) < vocab[token] > vocab.get(token[cut:], len(vocab))
    ]
    return vocab, merges


@pytest.fixture(scope="session")
def byte_level() -> tuple[dict[str, int], list[tuple[str, str]]]:
    return byte_level_vocabulary()


@pytest.fixture(scope="session")
def byte_level_metadata(byte_level: tuple[dict[str, int], list[tuple[str, str]]]) -> dict[str, Any]:
    """Control tokens last: `<|end|>` (eos) and `<|begin|>` (bos), and `<tool>`, which is user-defined."""
    vocab, merges = byte_level
    tokens = [*sorted(vocab, key=vocab.__getitem__), "<|end|>", "<|begin|>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(vocab) + [3, 3, 4],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.eos_token_id": len(vocab),
        "tokenizer.ggml.bos_token_id": len(vocab) + 1,
    }


@pytest.fixture(scope="session")
def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    """Trained with the settings that Llama 2 was trained with."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS * 4 for line in text.splitlines() if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=620,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.98,
        minloglevel=2,
        num_threads=1,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="session")
def sentencepiece_metadata(sentencepiece_model: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    model = sentencepiece_model
    ids = range(model.get_piece_size())

    def token_type(i: int) -> int:
        kinds = [(model.is_unknown(i), 2), (model.is_control(i), 3), (model.is_unused(i), 5), (model.is_byte(i), 6)]
        return next((kind for applies, kind in kinds if applies), 1)

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [token_type(i) for i in ids],
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
    }


@pytest.fixture(scope="session")
def byte_level_tokenizer(byte_level_metadata: dict[str, Any]) -> OnwardTokenizer:
    return OnwardTokenizer(build_tokenizer(byte_level_metadata).to_str())


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(sentencepiece_metadata: dict[str, Any]) -> OnwardTokenizer:
    return OnwardTokenizer(build_tokenizer(sentencepiece_metadata).to_str())
