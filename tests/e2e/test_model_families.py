"""Served models with windows, two ropes, norms on both sides, soft-caps or experts: streams survive a killed worker."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu.exactness import BASE, Results, Setup, check_exactness
from benchmarks.gpu.exactness_requests import Requests
from onward.bench.model_shapes import write_tokenizer

SIZES = {
    "vocab_size": 2048, "num_key_value_heads": 2, "max_position_embeddings": 4096, "hidden_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512, "sliding_window": 24,
}  # fmt: skip
SHAPES = {
    "gemma3": SIZES | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 40,
        "sliding_window_pattern": 2, "query_pre_attn_scalar": 3, "final_logit_softcapping": 20.0,
        "rope_theta": 50_000.0, "rope_local_base_freq": 300.0,
    },
    "mistral": SIZES | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 32},
    "qwen2moe": SIZES | {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "head_dim": 64, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [0],
    },
    "glm4moe": SIZES | {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "head_dim": 64, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_group": 4, "topk_group": 2, "sliding_window": None,
        "use_qk_norm": True,
    },
    "gptoss": SIZES | {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64, "num_local_experts": 8,
        "rope_theta": 150_000.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0,
                                                  "original_max_position_embeddings": 2048, "truncate": False},
    },
}  # fmt: skip
"""All layers of the second have the window, so blocks before it are given to other requests."""


@pytest.fixture(scope="module", params=SHAPES)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPES[request.param]))
    write_tokenizer(folder, SIZES["vocab_size"])
    requests = Requests(num_streams=6, prompt_len=90, num_tokens=160, vocab_size=SIZES["vocab_size"])
    return check_exactness(Setup(folder, "cpu", ["--load-format", "dummy"], requests), ["mixed"], ["worker-killed"])


@pytest.mark.parametrize("line", [BASE, "worker-killed"])
def test_streams_are_the_same_when_the_worker_is_killed(results: Results, line: str) -> None:
    result = results["mixed", line]
    assert result.passed, str(result)
