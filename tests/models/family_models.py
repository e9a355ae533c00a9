"""Tiny random models of every family, as transformers has them: weights large enough that attention is not flat, norms
that are not one, biases that are not zero, windows of 8, and contexts that are longer than the original ones."""

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from onward.models.loader.bounded_read import read_json
from onward.models.loader.checkpoint import check_checkpoint, weight_files
from onward.models.loader.config_parser import from_hf
from onward.models.loader.safetensors_file import CanonicalTensors, MappedTensors
from onward.proto.model import ModelConfig
from tests.models.checkpoints import int8_arrays
from tests.worker.driver import Driver, prepared

MAX_MODEL_LEN = 160
"""Served, and longer than every original context here."""
ORIGINAL = 40
WINDOW = 8

_SIZES: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": MAX_MODEL_LEN, "tie_word_embeddings": False,
}  # fmt: skip
_LONG = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0 + 0.05 * i for i in range(12)], "long_factor": [1.5 + 0.4 * i for i in range(12)],
}  # fmt: skip
_PHI3_ORIGINAL = {"original_max_position_embeddings": ORIGINAL}


def _rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **more}}


_SLIDING_AND_FULL = ["sliding_attention", "full_attention", "sliding_attention"]

_EXPERTS = {"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 64}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", _rope("linear", factor=4.0)),
    "llama-dynamic": ("Llama", _rope("dynamic", factor=4.0) | {"max_position_embeddings": ORIGINAL}),
    "llama-llama3": (
        "Llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL),
    ),
    "llama-yarn": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL)),
    "llama-odd-head": ("Llama", {"head_dim": 20}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"attention_bias": True, "layer_types": _SLIDING_AND_FULL, "use_sliding_window": True,
                        "sliding_window": WINDOW}),
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"tie_word_embeddings": True, "sliding_window": WINDOW, "query_pre_attn_scalar": 24,
                          "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    "gemma3": ("Gemma3", {
        "tie_word_embeddings": True, "sliding_window": WINDOW, "query_pre_attn_scalar": 24,
        "layer_types": _SLIDING_AND_FULL,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
        },
    }),
    "phi3": ("Phi3", {"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 1, "sliding_window": WINDOW,
                      "rope_parameters": _LONG | {"partial_rotary_factor": 0.75}} | _PHI3_ORIGINAL),
    "olmo2": ("Olmo2", {"head_dim": None, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "granite": ("Granite", {"head_dim": None, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                            "attention_multiplier": 0.3, "logits_scaling": 5.0}),
    "smollm3": ("SmolLM3", {"head_dim": None, "no_rope_layers": [1, 0, 1], "use_sliding_window": True,
                            "sliding_window": WINDOW}),
    "gpt2": ("GPT2", {"head_dim": None, "num_key_value_heads": None, "intermediate_size": None, "n_inner": 224}),
    "gptneox": ("GPTNeoX", {"head_dim": None, "num_key_value_heads": None, "num_attention_heads": 3,
                            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0,
                                                "partial_rotary_factor": 0.25}}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "qwen2moe": ("Qwen2Moe", _EXPERTS | {"head_dim": 32, "qkv_bias": True, "shared_expert_intermediate_size": 96,
                                         "norm_topk_prob": False, "use_sliding_window": True, "sliding_window": WINDOW,
                                         "max_window_layers": 2, "mlp_only_layers": [1]}),
    "qwen3moe": ("Qwen3Moe", _EXPERTS | {"attention_bias": True, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3moe-step": ("Qwen3Moe", _EXPERTS | {"decoder_sparse_step": 2, "norm_topk_prob": False,
                                              "use_sliding_window": True, "sliding_window": WINDOW}),
    "gptoss": ("GptOss", {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": WINDOW,
                          "layer_types": _SLIDING_AND_FULL, "swiglu_limit": 1.5, "swiglu_alpha": 1.3,
                          **_rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL, truncate=False)}),
    "glm4moe": ("Glm4Moe", {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "n_group": 4,
                            "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.5, "attention_bias": True,
                            "use_qk_norm": True, "norm_topk_prob": True, "first_k_dense_replace": 1}),
    "glm4moe-plain": ("Glm4Moe", {"n_routed_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
                                  "norm_topk_prob": False, "first_k_dense_replace": 0}),
}  # fmt: skip
"""By name: transformers' prefix of the classes, and changes to `_SIZES`."""


@dataclass(frozen=True, slots=True)
class FamilyModel:
    name: str
    theirs: Any
    raw: dict[str, Any]
    """`config.json`."""
    config: ModelConfig
    tensors: dict[str, np.ndarray]
    """By canonical name."""

    def their_logits(self, token_ids: list[int]) -> np.ndarray:
        """As of a text of `MAX_MODEL_LEN` tokens: what transformers chooses by the length of a text is chosen once here.
        Later tokens do not change earlier ones."""
        padded = token_ids + [0] * (MAX_MODEL_LEN - len(token_ids))
        with torch.inference_mode():
            return self.theirs(torch.tensor([padded]), use_cache=False).logits[0, : len(token_ids)].numpy()


def hf_config(name: str, **changes: Any) -> Any:
    prefix, differences = CASES[name]
    kind = getattr(transformers, "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config")
    values = {key: value for key, value in (_SIZES | differences | changes).items() if value is not None}
    return kind(**values, attn_implementation="eager", pad_token_id=None, bos_token_id=1, eos_token_id=2)


@functools.cache
def make(name: str) -> FamilyModel:
    torch.manual_seed(sum(map(ord, name)))
    config = hf_config(name)
    prefix = CASES[name][0]
    kind = getattr(transformers, f"{prefix}LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM")
    theirs = kind(config).float().eval()
    _shake(theirs)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        raw = read_json(Path(folder) / "config.json")
        ours = from_hf(raw)
        files = weight_files(Path(folder))
        check_checkpoint(files, ours, name)
        tensors = {name: np.array(array) for name, array in CanonicalTensors(MappedTensors(files), ours).items()}
    return FamilyModel(name, theirs, raw, ours, tensors)


def _shake(model: Any) -> None:
    """Weights of attention start so small that every score is nearly zero, biases at zero and norms at one."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "embed" in name or "wte" in name or "wpe" in name or "lm_head" in name:
                parameter.normal_(std=0.3)
            elif "router" in name or "mlp.gate.weight" in name:  # decisive: rounding seldom chooses another expert
                parameter.normal_(std=4.0 * parameter.shape[1] ** -0.5)
            else:
                inputs = parameter.shape[1] if "Oss" in type(model).__name__ else parameter.shape[-1]
                parameter.normal_(std=1.6 * inputs**-0.5)


@functools.cache
def logits_of(name: str, precision: str) -> np.ndarray:
    """Returns the logits of 90 fixed tokens, in one chunk."""
    model = make(name)
    settings: dict[str, Any] = {"threads": 1, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 90}
    if precision == "int8":
        driver = Driver(
            prepared(model.config, quantization="int8"), int8_arrays(model.config, model.tensors), **settings
        )
    else:
        driver = Driver(prepared(model.config, dtype=precision), model.tensors, **settings)
    token_ids = np.random.default_rng(3).integers(0, model.config.vocab_size, 90).tolist()
    return driver.logits(0, token_ids, [90])[:, : model.config.vocab_size]


def int8_error(model: FamilyModel) -> float:
    """The mean difference of logits between int8 and float32, as a share of the spread of logits."""
    exact = logits_of(model.name, "float32")
    return float(np.abs(logits_of(model.name, "int8") - exact).mean() / exact.std())
