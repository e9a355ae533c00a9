"""Every kind of tokenizer file gives the ids of its reference over 10,000 strings, and its text back, streamed or whole.

The references are the libraries that the kinds come from: sentencepiece, tiktoken, and transformers for the rest.
"""

import base64
import io
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from tokenizers import AddedToken
from transformers import GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from onward.models.loader.tokenizer_files import prepare_tokenizer
from onward.text.detokenizer import Detokenizer
from onward.text.gguf_tokenizer import build_tokenizer
from onward.text.tokenizer import Tokenizer
from tests.text.conftest import CORPUS
from tests.text.reference_strings import NUM_STRINGS, planes_of, reference_strings

Vocabulary = tuple[dict[str, int], list[tuple[str, str]]]
Encode = Callable[[str], list[int]]

LLAMA3 = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
QWEN = LLAMA3.replace("{1,3}", "")
CL100K = "|".join(
    [
        r"'(?i:[sdmt]|ll|ve|re)",
        r"[^\r\n\p{L}\p{N}]?+\p{L}++",
        r"\p{N}{1,3}+",
        r" ?[^\s\p{L}\p{N}]++[\r\n]*+",
        r"\s++$",
        r"\s*[\r\n]",
        r"\s+(?!\S)",
        r"\s",
    ]
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "[INST]"]
FLAGGED: list[dict[str, Any]] = [
    {"content": "<left>", "lstrip": True, "special": True},
    {"content": "<right>", "rstrip": True, "special": True},
    {"content": "<word>", "single_word": True, "special": False, "normalized": False},
    {"content": "naïve", "special": False, "normalized": True},
]


def opened(folder: Path, **files: Any) -> Tokenizer:
    """`files`: contents by name, in which `__` stands for the dot."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name.replace("__", ".")).write_bytes(data)
    path = prepare_tokenizer(folder, folder / "cache")
    assert path is not None
    return Tokenizer.from_file(folder / path)


def assert_agrees(ours: Tokenizer, theirs: Encode, strings: Sequence[str]) -> None:
    assert len(strings) == NUM_STRINGS and planes_of(strings) == set(range(17))
    wrong = [string for string in strings if ours.encode(string, add_special_tokens=False) != theirs(string)]
    assert not wrong, f"{len(wrong)} strings have other ids, such as {min(wrong, key=len)!r}"


def assert_text_comes_back(
    tokenizer: Tokenizer, strings: Sequence[str], expected: Callable[[str], str] = lambda string: string
) -> None:
    """Also token by token, where no piece ends within a character."""
    for string in strings:
        token_ids = tokenizer.encode(string, add_special_tokens=False)
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == expected(string)
        for skip in (False, True):
            detokenizer = Detokenizer(tokenizer.table, skip_special_tokens=skip)
            pieces = [detokenizer.push(token_id) for token_id in token_ids]
            assert not detokenizer.flush(), "valid text ends with a whole character"
            streamed, whole = "".join(pieces), tokenizer.decode(token_ids, skip_special_tokens=skip)
            # An output goes on behind its prompt, so the space before a text is shown there.
            assert streamed == (" " + whole if tokenizer.table.strips_leading_space and streamed[:1] == " " else whole)
            assert "\ufffd" in string or "\ufffd" not in streamed


def merges_file(merges: list[tuple[str, str]]) -> bytes:
    return ("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges) + "\n").encode()


def with_ids(vocab: dict[str, int], tokens: Sequence[str]) -> dict[str, int]:
    return dict(vocab) | {token: len(vocab) + index for index, token in enumerate(tokens)}


@pytest.mark.parametrize("adds_prefix", [False, True])
@pytest.mark.parametrize("reference", [GPT2Tokenizer, Qwen2Tokenizer])
def test_vocab_and_merges(tmp_path: Path, byte_level: Vocabulary, reference: Any, adds_prefix: bool) -> None:
    """Added tokens have every flag that there is."""
    vocab, merges = byte_level
    vocab = with_ids(vocab, ["<|endoftext|>"])
    decoder = {str(len(vocab) + index): token for index, token in enumerate(FLAGGED)}
    config = {
        "tokenizer_class": reference.__name__,
        "added_tokens_decoder": decoder,
        "eos_token": "<|im_end|>",
        "extra_special_tokens": ["<|im_start|>"],
        "add_prefix_space": adds_prefix,
    }
    ours = opened(tmp_path / "m", vocab__json=vocab, merges__txt=merges_file(merges), tokenizer_config__json=config)
    theirs = reference.from_pretrained(tmp_path / "m")
    tokens = [*SPECIAL, *(token["content"] for token in FLAGGED)]
    assert [ours.token_id(t) for t in tokens] == [
        None if t == "[INST]" else theirs.convert_tokens_to_ids(t) for t in tokens
    ]
    assert_agrees(ours, lambda text: theirs.encode(text, add_special_tokens=False), reference_strings(tokens))


def test_vocab_and_merges_give_the_text_back(tmp_path: Path, byte_level: Vocabulary) -> None:
    vocab, merges = byte_level
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    ours = opened(tmp_path / "m", vocab__json=vocab, merges__txt=merges_file(merges), tokenizer_config__json=config)
    normalized = [unicodedata.normalize("NFC", string) for string in reference_strings(["<|im_end|>"])]
    assert_text_comes_back(ours, normalized)


def test_tokenizer_json_with_its_config(tmp_path: Path, byte_level_metadata: dict[str, Any]) -> None:
    """The config adds tokens that the description lacks. It does not decide how a text begins and ends: the description
    does."""
    library = build_tokenizer(byte_level_metadata | {"tokenizer.ggml.pre": "llama-bpe"})
    size = library.get_vocab_size()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(size + index): token for index, token in enumerate(FLAGGED)},
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "pad_token": "<|im_start|>",
        "add_bos_token": False,
        "add_eos_token": True,
    }
    ours = opened(tmp_path / "m", tokenizer__json=library.to_str().encode(), tokenizer_config__json=config)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "m")
    tokens = ["<|begin|>", "<|end|>", "<tool>", "<|im_start|>", *(token["content"] for token in FLAGGED)]
    strings = reference_strings(tokens)
    assert_agrees(ours, lambda text: theirs.encode(text, add_special_tokens=False), strings)
    assert ours.encode("fox") == theirs.encode("fox") == [size - 2, *ours.encode_chat("fox")]
    plain = reference_strings(["<|end|>", "<tool>"])
    assert_text_comes_back(ours, plain)


def train_sentencepiece(**options: Any) -> bytes:
    """With the settings that the models have which are served: no normalization, spaces kept, bytes for the rest."""
    model = io.BytesIO()
    settings = {
        "byte_fallback": True,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "character_coverage": 0.98,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS * 4 for line in text.splitlines() if line),
        model_writer=model,
        minloglevel=2,
        num_threads=1,
        **(settings | options),
    )
    return model.getvalue()


CONTROL = ["[INST]", "[/INST]"]
USER_DEFINED = ["<tool>", "▁▁", "▁▁▁▁", "\n\n"]


@pytest.fixture(scope="module")
def bpe_model() -> bytes:
    return train_sentencepiece(
        model_type="bpe", vocab_size=640, control_symbols=CONTROL, user_defined_symbols=USER_DEFINED
    )


@pytest.fixture(scope="module")
def unigram_model() -> bytes:
    return train_sentencepiece(
        model_type="unigram",
        vocab_size=420,
        hard_vocab_limit=False,
        control_symbols=CONTROL,
        user_defined_symbols=["<tool>", "\n\n"],
    )


def processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


WITHOUT_PREFIX = bytes([0x1A, 2, 0x18, 0])
"""Behind a model, this says once more what its normalizer's `add_dummy_prefix` is: false."""


def by_stretch(model: bytes, special_tokens: Sequence[str], *, legacy: bool) -> Encode:
    """sentencepiece on every stretch between special tokens. `legacy`: with a space before each; else only before a text
    that begins with none."""
    with_prefix, without = processor(model), processor(model + WITHOUT_PREFIX)
    cut = re.compile("(" + "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))) + ")")

    def encode(text: str) -> list[int]:
        token_ids: list[int] = []
        for index, stretch in enumerate(cut.split(text)):
            if index % 2:
                token_ids.append(with_prefix.piece_to_id(stretch))
            else:
                token_ids += (with_prefix if legacy or index == 0 else without).encode(stretch)
        return token_ids

    return encode


def test_a_sentencepiece_bpe_model(tmp_path: Path, bpe_model: bytes) -> None:
    ours = opened(tmp_path / "m", tokenizer__model=bpe_model)
    theirs = by_stretch(bpe_model, [*CONTROL, "<s>", "</s>"], legacy=False)
    strings = reference_strings([*CONTROL, *USER_DEFINED, "<s>", "</s>"], marks=True)
    assert_agrees(ours, theirs, strings)


def test_a_sentencepiece_bpe_model_gives_the_text_back(tmp_path: Path, bpe_model: bytes) -> None:
    ours = opened(tmp_path / "m", tokenizer__model=bpe_model)
    # Without control tokens, as a text that begins with one loses a space that follows it.
    assert_text_comes_back(ours, reference_strings(["<tool>", "\n\n"]))


def test_a_legacy_sentencepiece_model_has_a_space_behind_every_special_token(tmp_path: Path) -> None:
    model = train_sentencepiece(model_type="bpe", vocab_size=640, control_symbols=CONTROL)
    ours = opened(tmp_path / "m", tokenizer__model=model, tokenizer_config__json={"legacy": True})
    specials = [*CONTROL, "<s>", "</s>"]
    assert_agrees(ours, by_stretch(model, specials, legacy=True), reference_strings(specials, marks=True))


def test_a_sentencepiece_model_in_transformers(tmp_path: Path) -> None:
    """Its tokenizer of Llama, with the same tokens added. It leaves the space before a text out where there is one already,
    which sentencepiece does not, so no string here begins with one."""
    model = train_sentencepiece(model_type="bpe", vocab_size=640)
    scored = processor(model)
    pieces = {scored.id_to_piece(i): i for i in range(scored.get_piece_size())}
    plain = {
        piece for piece, i in pieces.items() if not (scored.is_control(i) or scored.is_byte(i) or scored.is_unknown(i))
    }
    merges = sorted(
        (-scored.get_score(i), piece[:cut], piece[cut:])
        for piece, i in pieces.items()
        for cut in range(1, len(piece))
        if piece in plain and piece[:cut] in plain and piece[cut:] in plain
    )
    decoder = {str(len(pieces) + index): token for index, token in enumerate(FLAGGED)}
    config = {"added_tokens_decoder": decoder, "legacy": False, "add_bos_token": True, "add_eos_token": True}
    ours = opened(tmp_path / "m", tokenizer__model=model, tokenizer_config__json=config)
    theirs = LlamaTokenizer(
        vocab=dict(pieces),
        merges=[(left, right) for _, left, right in merges],
        legacy=False,
        add_bos_token=True,
        add_eos_token=True,
    )
    theirs.add_tokens([AddedToken(**token) for token in FLAGGED])
    tokens = ["<s>", "</s>", *(token["content"] for token in FLAGGED)]
    strings = [string.lstrip(" ") for string in reference_strings(tokens)]
    assert_agrees(ours, lambda text: theirs.encode(text, add_special_tokens=False), strings)
    assert ours.encode("fox") == theirs.encode("fox")


def test_a_sentencepiece_unigram_model(tmp_path: Path, unigram_model: bytes) -> None:
    """Two segmentations may have the same score, up to the rounding of the floats that sentencepiece adds; then either is
    right. Any other difference is wrong."""
    ours, theirs = opened(tmp_path / "m", tokenizer__model=unigram_model), processor(unigram_model)
    strings = reference_strings(["<tool>", "\n\n"], marks=True)
    assert len(strings) == NUM_STRINGS and planes_of(strings) == set(range(17))
    num_ties = 0
    for string in strings:
        our_ids, their_ids = ours.encode(string, add_special_tokens=False), theirs.encode(string)
        if our_ids != their_ids:
            assert sorted(our_ids) == sorted(their_ids), string
            num_ties += 1
    assert num_ties < NUM_STRINGS // 20
    assert_text_comes_back(ours, [string.replace("▁", "_") for string in strings])


def test_a_sentencepiece_unigram_model_with_special_tokens(tmp_path: Path, unigram_model: bytes) -> None:
    ours = opened(tmp_path / "m", tokenizer__model=unigram_model)
    theirs = by_stretch(unigram_model, [*CONTROL, "<s>"], legacy=False)
    differing = [
        string
        for string in reference_strings([*CONTROL, "<s>"], seed=1)
        if sorted(ours.encode(string, add_special_tokens=False)) != sorted(theirs(string))
    ]
    assert differing == []


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("tokenizer.model", LLAMA3),
        ("cl100k_base.tiktoken", CL100K),
        ("o200k_base.tiktoken", O200K),
        ("p50k_base.tiktoken", GPT2),
        ("qwen.tiktoken", QWEN),
    ],
    ids=lambda value: value.partition(".")[0] if value.isascii() and len(value) < 30 else "",
)
def test_a_tiktoken_file(tmp_path: Path, byte_ranks: dict[bytes, int], file: str, pattern: str) -> None:
    first = len(byte_ranks)
    special = {token: first + 2 * index for index, token in enumerate(SPECIAL)}
    decoder = {str(token_id): {"content": token, "special": True} for token, token_id in special.items()}
    lines = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in byte_ranks.items())
    ours = opened(
        tmp_path / "m", **{file.replace(".", "__"): lines, "tokenizer_config__json": {"added_tokens_decoder": decoder}}
    )
    theirs = tiktoken.Encoding("trained here", pat_str=pattern, mergeable_ranks=byte_ranks, special_tokens=special)
    normalize = (lambda text: unicodedata.normalize("NFC", text)) if file.startswith("qwen") else str
    strings = [normalize(string) for string in reference_strings(SPECIAL)]
    assert_agrees(ours, lambda text: theirs.encode(text, allowed_special="all"), strings)
    assert_text_comes_back(ours, strings)


def tekken(ranks: dict[bytes, int], special: Sequence[str], num_special: int) -> dict[str, Any]:
    """With ten tokens that are not the model's, as published files have them."""
    entries = [*ranks.items(), *((b"surplus %d" % index, len(ranks) + index) for index in range(10))]
    return {
        "config": {
            "pattern": TEKKEN,
            "default_vocab_size": num_special + len(ranks),
            "default_num_special_tokens": num_special,
            "version": "v7",
        },
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for token, rank in entries],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(special)
        ],
    }


def test_a_tekken_file(tmp_path: Path, byte_ranks: dict[bytes, int]) -> None:
    """tiktoken counts ranks from 0, and the file's tokens begin behind the special ones."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    ours = opened(tmp_path / "m", tekken__json=tekken(byte_ranks, special, num_special=20))
    theirs = tiktoken.Encoding(
        "trained here",
        pat_str=TEKKEN,
        mergeable_ranks=byte_ranks,
        special_tokens={token: len(byte_ranks) + index for index, token in enumerate(special)},
    )

    def encode(text: str) -> list[int]:
        token_ids = theirs.encode(text, allowed_special="all")
        return [token - len(byte_ranks) if token >= len(byte_ranks) else token + 20 for token in token_ids]

    strings = reference_strings(special)
    assert_agrees(ours, encode, strings)
    assert_text_comes_back(ours, strings)
    assert ours.encode("fox") == [1, *encode("fox")], "a text begins with <s>"


@pytest.fixture(scope="module")
def byte_ranks(byte_level: Vocabulary) -> dict[bytes, int]:
    vocab, _ = byte_level
    byte_of = {character: byte for byte, character in _byte_alphabet().items()}
    return {bytes(byte_of[character] for character in token): token_id for token, token_id in vocab.items()}


def _byte_alphabet() -> dict[int, str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()


@pytest.mark.parametrize(
    ("pre", "pattern"),
    [
        ("gpt-2", GPT2),
        ("llama-bpe", LLAMA3),
        ("qwen2", QWEN),
        ("gpt-4o", O200K),
        ("tekken", TEKKEN),
    ],
    ids=lambda value: value if len(value) < 12 else "",
)
def test_a_byte_level_gguf_vocabulary(
    byte_level_metadata: dict[str, Any], byte_ranks: dict[bytes, int], pre: str, pattern: str
) -> None:
    ours = Tokenizer(build_tokenizer(byte_level_metadata | {"tokenizer.ggml.pre": pre}).to_str())
    tokens: list[str] = byte_level_metadata["tokenizer.ggml.tokens"]
    special = {token: tokens.index(token) for token in ("<|end|>", "<|begin|>", "<tool>")}
    theirs = tiktoken.Encoding("trained here", pat_str=pattern, mergeable_ranks=byte_ranks, special_tokens=special)
    normalize = (lambda text: unicodedata.normalize("NFC", text)) if pre == "qwen2" else str
    strings = [normalize(string) for string in reference_strings(list(special))]
    assert_agrees(ours, lambda text: theirs.encode(text, allowed_special="all"), strings)


def test_a_sentencepiece_gguf_vocabulary(
    sentencepiece_tokenizer: Tokenizer, sentencepiece_model: sentencepiece.SentencePieceProcessor
) -> None:
    theirs = by_stretch(sentencepiece_model.serialized_model_proto(), ["<s>", "</s>"], legacy=True)
    assert_agrees(sentencepiece_tokenizer, theirs, reference_strings(["<s>", "</s>"], marks=True))
    assert_text_comes_back(sentencepiece_tokenizer, reference_strings())
