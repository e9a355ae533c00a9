"""Shapes of known models, in the form of their `config.json` on Hugging Face, and checkpoints of random numbers."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from onward.models.families.registry import tensor_sources
from onward.models.loader.config_parser import from_hf
from onward.models.loader.safetensors_file import BFloat16Bits, write_file

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12_288,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
_SHARD_BYTES = 2 << 30
_WRITTEN_AT_ONCE = 8


def write_config(folder: Path, shape: str) -> None:
    """Writes `config.json`, which is all that a model with `--load-format dummy` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=1))


def write_checkpoint(folder: Path, shape: str) -> None:
    """Writes random bfloat16 weights in shards, to measure how long a start takes. Repeats one stretch of noise, for
    speed."""
    write_config(folder, shape)
    noise = np.random.default_rng(0).standard_normal(1 << 24, dtype=np.float32)

    def write(numbered: tuple[int, dict[str, tuple[int, ...]]]) -> None:
        number, shard = numbered
        tensors = {name: _noise(noise, name, shape) for name, shape in shard.items()}
        write_file(folder / f"model-{number:05d}.safetensors", tensors)

    with ThreadPoolExecutor(_WRITTEN_AT_ONCE) as threads:
        list(threads.map(write, enumerate(_shards(stored_shapes(shape)))))


def stored_shapes(shape: str) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor, by its name in the family's checkpoints."""
    sources = tensor_sources(from_hf(SHAPES[shape]), ()).values()
    assert all(source.pick is None for source in sources), "checkpoints of these families store each tensor by itself"
    return {source.name: source.shape for source in sources}


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a tokenizer of bytes and made-up words, to measure a server that sends text. Every token has a text."""
    visible = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    hidden = [chr(256 + index) for index in range(256 - len(visible))]
    words = [f"\u0120w{number}" for number in range(vocab_size - 256)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {word: number for number, word in enumerate(visible + hidden + words)}, "merges": [],
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(document))


def _shards(tensors: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    num_bytes = 0
    for name, shape in tensors.items():
        shard[name] = shape
        num_bytes += 2 * int(np.prod(shape))
        if num_bytes >= _SHARD_BYTES:
            yield shard
            shard, num_bytes = {}, 0
    if shard:
        yield shard


def _noise(noise: np.ndarray, name: str, shape: tuple[int, ...]) -> BFloat16Bits:
    if name.endswith("norm.weight"):
        return BFloat16Bits.of(np.ones(shape, np.float32))
    bits = BFloat16Bits.of(noise * np.float32(shape[-1] ** -0.5)).bits
    return BFloat16Bits(np.resize(np.roll(bits, len(name)), shape))
