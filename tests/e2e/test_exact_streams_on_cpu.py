"""`benchmarks.gpu.exactness` against a server on the CPU: with int8 a stream is the same however it is computed.

Killed processes are in `test_crashes`, preemption is in `test_pressure`.
"""

import json
from pathlib import Path

import pytest

from benchmarks.gpu.exactness import BASE, Results, Setup, check_exactness
from benchmarks.gpu.exactness_lines import LINES
from benchmarks.gpu.exactness_requests import Requests
from onward.bench.model_shapes import write_tokenizer

ELSEWHERE = {"worker-killed", "engine-killed", "preempted"}
HERE = [name for name in LINES if name not in ELSEWHERE]
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 2048, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 4096, "hidden_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "intermediate_size": 512, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    write_tokenizer(folder, SHAPE["vocab_size"])
    requests = Requests(num_streams=12, prompt_len=150, num_tokens=48, vocab_size=SHAPE["vocab_size"])
    return check_exactness(Setup(folder, "cpu", ["--load-format", "dummy"], requests), ["mixed"], HERE)


@pytest.mark.parametrize("line", [BASE, *HERE])
def test_streams_are_the_same_however_they_are_computed(results: Results, line: str) -> None:
    result = results["mixed", line]
    assert result.passed, str(result)
