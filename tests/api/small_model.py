"""A model's paperwork without a model: a byte-level tokenizer whose first 256 ids are the bytes, and a template."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from onward.proto.model import ModelConfig, PreparedModel

EOS = 256
IM_START = 257
THINK, END_OF_THOUGHT = 258, 259
"""Where the tags of thinking are asked for."""
VOCAB_SIZE = 320
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}{{ '\n' + m.content }}"
    "<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


def _byte_characters() -> list[str]:
    """How byte-level vocabularies write each byte: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + hidden.index(byte)) for byte in range(256)]


THINKING_TEMPLATE = (
    "{% if tools %}tools:{% for t in tools %} {{ t.function.name }}{% endfor %}{{ '\n' }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\n' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking %}<think>{% endif %}"
)
"""The template of a model that knows tools, and thinks if it is told to."""


def prepare(
    folder: Path,
    name: str = "small-model",
    max_model_len: int = 256,
    template: str = TEMPLATE,
    tags: tuple[str, ...] = (),
) -> PreparedModel:
    vocabulary = {character: token_id for token_id, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_end|>", "<|im_start|>")])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer.save(str(folder / "tokenizer.json"))
    return PreparedModel(
        name=name,
        folder=str(folder),
        config=ModelConfig("llama", VOCAB_SIZE, 8, 16, 1, 1, 1, 8, max_model_len, 1e-5, 1e4),
        dtype="float32",
        quantization="none",
        fingerprint="fp-small",
        weights=[],
        tokenizer="tokenizer.json",
        chat_template=template,
        bos_token=None,
        eos_token="<|im_end|>",
        eos_token_ids=[EOS],
        created_s=1_700_000_000,
    )


def chat_prompt(text: str) -> list[int]:
    """What a single user message becomes."""
    parts = (
        [IM_START],
        b"user\n" + text.encode(),
        [EOS],
        b"\n",
        [IM_START],
        b"assistant\n",
    )
    return [token for part in parts for token in part]
