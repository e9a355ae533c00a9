"""The offline benchmark's workloads, and its command on a small model."""

import json
from pathlib import Path

import pytest

from onward.bench import offline
from onward.bench.model_shapes import SHAPES, write_config, write_tokenizer
from onward.cli.main import run
from onward.models.loader.config_parser import from_hf
from onward.text.tokenizer import Tokenizer

SMALL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 2048,
}  # fmt: skip


def test_the_workload_is_the_anchors_token_for_token() -> None:
    requests = offline.workload_256()
    assert len(requests) == 256
    assert sum(one.num_output_tokens for one in requests) == 133_966
    assert all(100 <= len(one.prompt) <= 1024 and 100 <= one.num_output_tokens <= 1024 for one in requests)


def test_each_run_has_prompts_of_its_own() -> None:
    requests = offline.workload_256(3)
    runs = [offline.shifted(requests, by, 512) for by in range(3)]
    assert len({tuple(one.prompt[:16]) for run in runs for one in run}) == 9
    assert [len(one.prompt) for one in runs[1]] == [len(one.prompt) for one in requests]
    assert max(token for run in runs for one in run for token in one.prompt) < 512


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_configs_that_we_serve(shape: str, tmp_path: Path) -> None:
    write_config(tmp_path, shape)
    config = from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert config.architecture == ("qwen3moe" if shape == "qwen3-30b-a3b" else "qwen3")
    assert (config.head_dim, config.vocab_size) == (128, 151_936)


def test_a_made_up_tokenizer_has_a_text_for_every_token(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 300)
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert tokenizer.encode("w1") != []


def test_the_command_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SMALL))
    flags = ["--load-format", "dummy", "--requests", "2", "--runs", "1", "--threads", "1"]
    flags += ["--workload", "256", "--workload", "prompt", "--prompt-tokens", "300"]
    assert run(["bench", "offline", str(model), *flags, "--json", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    figures, prompt = written["figures"]
    assert figures["num_output_tokens"] == sum(one.num_output_tokens for one in offline.workload_256(2))
    assert figures["tokens_per_s"] > 0 < written["ready_s"]
    assert (prompt["num_prompt_tokens"], prompt["num_output_tokens"]) == (300, 1)
    shown = capsys.readouterr().out
    assert "tok/s" in shown
    assert "one prompt of 300 tokens" in shown
