"""Served models with windows, with two ropes, norms on both sides and soft-caps: their streams survive a killed worker."""

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
}  # fmt: skip
"""All layers of the second have the window, so blocks before it are given to other requests."""


@pytest.fixture(scope="module", params=SHAPES)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPES[request.param]))
    write_tokenizer(folder, SIZES["vocab_size"])
    requests = Requests(num_streams=6, prompt_len=90, num_tokens=48, vocab_size=SIZES["vocab_size"])
    return check_exactness(Setup(folder, "cpu", ["--load-format", "dummy"], requests), ["mixed"], ["worker-killed"])


@pytest.mark.parametrize("line", [BASE, "worker-killed"])
def test_streams_are_the_same_when_the_worker_is_killed(results: Results, line: str) -> None:
    result = results["mixed", line]
    assert result.passed, str(result)
