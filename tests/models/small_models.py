"""Small random models of each architecture, as transformers has them and as our decoder gets them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from onward.proto.model import Llama3Rope, ModelConfig

_SIZES: dict[str, Any] = {
    "vocab_size": 301, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "initializer_range": 0.1, "attn_implementation": "eager", "pad_token_id": None,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@dataclasses.dataclass(slots=True)
class SmallModel:
    config: ModelConfig
    theirs: Any
    tensors: Mapping[str, np.ndarray]

    def their_logits(self, token_ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            return self.theirs(torch.tensor([token_ids])).logits[0].numpy()

    def their_outputs(self, token_ids: list[int]) -> np.ndarray:
        """Returns the outputs of the last layer, normalized."""
        with torch.inference_mode():
            return self.theirs.model(torch.tensor([token_ids])).last_hidden_state[0].numpy()


def make(name: str) -> SmallModel:
    """`llama` (untied, scaled rope), `llama-tied`, `qwen2`, `qwen3`; head_dim 32 throughout."""
    torch.manual_seed(len(name))
    architecture = name.partition("-")[0]
    is_tied = name in ("llama-tied", "qwen3")
    theta = 10_000.0
    rope: dict[str, Any] = {"rope_theta": theta} | (_LLAMA3 if name == "llama" else {"rope_type": "default"})
    common = _SIZES | {"tie_word_embeddings": is_tied, "rope_parameters": rope, "head_dim": 32}
    classes: dict[str, tuple[Any, Any]] = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    config_class, model_class = classes[architecture]
    theirs = model_class(config_class(**common)).float().eval()
    _shake(theirs)
    tensors = {k: v.detach().numpy() for k, v in theirs.state_dict().items()}
    if is_tied:
        tensors.pop("lm_head.weight", None)
    config = ModelConfig(
        architecture=architecture, vocab_size=301, hidden_size=96, intermediate_size=160, num_layers=3, num_heads=6,
        num_kv_heads=2, head_dim=32, max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=theta,
        rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 64) if name == "llama" else None, tie_word_embeddings=is_tied,
        qkv_bias=architecture == "qwen2", qk_norm=architecture == "qwen3",
    )  # fmt: skip
    return SmallModel(config, theirs, tensors)


def _shake(model: Any) -> None:
    """Biases and norms start at zero and one, where mistakes would not show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(0.3 * torch.randn_like(parameter))
