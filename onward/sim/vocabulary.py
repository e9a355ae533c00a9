"""A small byte-level tokenizer for simulations. It is awkward on purpose: many tokens begin or end within a character.

The hash model samples only the first ids. All single bytes have ids after these, so that any prompt can be encoded.
"""

import functools
import json

from onward.grammar.grammar_compiler import GrammarCompiler
from onward.proto.model import ModelConfig, PreparedModel, TokenizerFiles
from onward.text.tokenizer import Tokenizer

END = "<|end|>"
POISON = "<|poison|>"
"""In a prompt: every worker that runs the request dies."""
ENGINE_POISON = "<|engine-poison|>"
"""In a prompt: every engine that assigns a slot to the request dies."""
DOOM = "<|doom|>"
"""In a prompt: the request fails with invalid logits."""
SPECIAL = (END, "<|user|>", "<|assistant|>")
END_ID = 0

_WHOLE = (
    "a",
    "b",
    "c",
    "d",
    "e",
    "f",
    " ",
    "ab",
    "bc",
    " the",
    " sea",
    "ing",
    "\n",
    '"',
    "\\",
    "é",
    "日",
    "🌊",
    "e\u0301",
)
_CUT = ("é", "ß", "日", "本", "€", "🌊", "🐙", "👩‍🚀")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _spoken() -> list[bytes]:
    """Returns the bytes of the tokens that the model samples, without special tokens."""
    pieces = [word.encode() for word in _WHOLE]
    for character in _CUT:
        data = character.encode()
        middle = len(data) // 2
        pieces += [data[:middle], data[middle:], b"x" + data[:1], data[1:] + b"y"]
    return list(dict.fromkeys(pieces))


_SPOKEN = _spoken()
NUM_SAMPLED_IDS = len(SPECIAL) + len(_SPOKEN)
POISON_ID, DOOM_ID, ENGINE_POISON_ID = NUM_SAMPLED_IDS, NUM_SAMPLED_IDS + 1, NUM_SAMPLED_IDS + 2


@functools.cache
def token_bytes() -> list[bytes]:
    """Returns the bytes of each token id; empty for special tokens."""
    spoken = [b""] * len(SPECIAL) + _SPOKEN + [b"", b""]
    return spoken + [bytes([byte]) for byte in range(256) if bytes([byte]) not in spoken]


@functools.cache
def model_text() -> TokenizerFiles:
    letters = _byte_letters()
    written = [*SPECIAL, *("".join(letters[byte] for byte in piece) for piece in _SPOKEN), POISON, DOOM, ENGINE_POISON]
    written += [letters[piece[0]] for piece in token_bytes()[len(written) :]]
    vocabulary = {token: token_id for token_id, token in enumerate(written)}
    special = [
        {
            "id": vocabulary[token],
            "content": token,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for token in (*SPECIAL, POISON, DOOM, ENGINE_POISON)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    spec = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    return TokenizerFiles(json.dumps(spec), CHAT_TEMPLATE, None, END)


@functools.cache
def grammars() -> GrammarCompiler:
    return GrammarCompiler(Tokenizer(model_text().tokenizer or ""))


def prepared_model() -> PreparedModel:
    config = ModelConfig(
        architecture="llama",
        vocab_size=len(token_bytes()),
        hidden_size=1,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        max_position_embeddings=1 << 16,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
    )
    return PreparedModel(
        name="hash",
        folder="",
        config=config,
        dtype="float32",
        quantization="int8",
        fingerprint="hash",
        weights=[],
        tokenizer=None,
        chat_template=CHAT_TEMPLATE,
        bos_token=None,
        eos_token=END,
        eos_token_ids=[END_ID],
    )


def _byte_letters() -> dict[int, str]:
    """Returns the character of each byte in a byte-level vocabulary: visible ones are themselves, all others start at
    U+0100."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in seen}
    others = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(0x100 + index) for index, byte in enumerate(others)}
