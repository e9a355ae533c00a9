"""Small models of each kind whose tensors are divided among ranks in their own way, for tests on every device."""

from typing import Any

import msgspec
import numpy as np

from onward.proto.model import Experts, LayerKind, ModelConfig
from tests.worker.cuda.small_model import CONFIG

HEADS = {"num_heads": 6, "num_kv_heads": 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama, heads of 128": {
        "architecture": "llama", "qk_norm": False, "num_heads": 9, "head_dim": 128, "tie_word_embeddings": True,
    },
    "qwen2": {"architecture": "qwen2", "qk_norm": False, "qkv_bias": True},
    "gpt2": {
        "norm": "layer", "norm_bias": True, "learned_positions": True, "gated_mlp": False, "activation": "gelu_tanh",
        "qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": False,
    },
    "gptneox": {"norm": "layer", "parallel_block": True, "rotary_dim": 16, "gated_mlp": False, "o_bias": True},
    "gemma2": {
        "post_norm": True, "norm_weight_offset": 1.0, "attention_softcap": 5.0, "logit_softcap": 8.0,
        "embedding_multiplier": 8.0, "layers": (LayerKind(window=8), LayerKind()),
    },
    "granite": {"residual_multiplier": 0.4, "logits_multiplier": 0.2, "query_scale": 0.3, "head_dim": 20},
    "gpt-oss": {
        "attention_sinks": True, "o_bias": True, "mlp_bias": True,
        "experts": Experts(6, 3, 96, router_bias=True, renormalize=True),
    },
    "qwen2moe": {"experts": Experts(6, 3, 96, shared_intermediate_size=64)},
}  # fmt: skip


def config_of(name: str) -> ModelConfig:
    return msgspec.structs.replace(CONFIG, **(HEADS | FAMILIES[name]))


def tokens(count: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, count).tolist()


def error(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(ours - expected).max() / np.abs(expected).max())
