"""Served models whose weights keep the bits of their checkpoint: streams survive a killed worker, `/info` names formats.

There is a GGUF file with matrices of every block format, one with experts, and a folder for each published method.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest

from benchmarks.gpu.exactness import BASE, Results, Setup, check_exactness
from benchmarks.gpu.exactness_requests import Requests
from onward.bench.model_shapes import write_tokenizer
from onward.kernels.weight_formats import BLOCK_FORMATS
from onward.proto.model import Experts, ModelConfig
from tests.kernels.block_weights import lively_rows
from tests.models.checkpoints import random_tensors, tiny_config, write_gguf
from tests.models.gguf_expert_models import CONFIGS, write
from tests.models.published_checkpoints import write_published

VOCAB_SIZE = 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 512, "num_layers": 3, "num_heads": 4,
    "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip
CONFIG = tiny_config(**SIZES)
EXPERTS = tiny_config("qwen3moe", qk_norm=True, experts=Experts(6, 2, 256, renormalize=True), **SIZES)


def _gguf_of_every_format(folder: Path) -> Path:
    tensors, raw, names = random_tensors(CONFIG), {}, []
    for name, array in tensors.items():
        if array.ndim == 2:
            names.append(name)
            kind = list(BLOCK_FORMATS)[len(names) % len(BLOCK_FORMATS)]
            if "up_proj" in name:  # as its gate
                kind = raw[name.replace("up_proj", "gate_proj")][1].name
            raw[name] = lively_rows(kind, *array.shape, seed=len(names)), gguf.GGMLQuantizationType[kind]
    return write_gguf(folder / "model.gguf", CONFIG, tensors, raw=raw, fields=_tokenizer_fields())


def _gguf_of_gpt_oss(folder: Path) -> Path:
    config = msgspec.structs.replace(CONFIGS["gptoss"], vocab_size=VOCAB_SIZE)
    write(folder / "model.gguf", config, "MXFP4", fields=_tokenizer_fields())
    return folder / "model.gguf"


def _tokenizer_fields() -> dict[str, Any]:
    visible = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    tokens = [*visible, *(chr(256 + index) for index in range(256 - len(visible)))]
    tokens += [f"w{number}" for number in range(VOCAB_SIZE - 256)]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * VOCAB_SIZE, "tokenizer.ggml.merges": ["w 0"],
    }  # fmt: skip


def _published(layout: str, config: ModelConfig = CONFIG) -> Callable[[Path], Path]:
    def write_folder(folder: Path) -> Path:
        write_published(folder / "model", config, layout)
        write_tokenizer(folder / "model", VOCAB_SIZE)
        return folder / "model"

    return write_folder


MODELS = {
    "gguf": (_gguf_of_every_format, set(BLOCK_FORMATS)),
    "gguf-experts": (_gguf_of_gpt_oss, {"MXFP4", "int8"}),
    "awq": (_published("awq"), {"int4-zero", "int8"}),
    "awq-experts": (_published("awq", EXPERTS), {"int4-zero", "int8"}),
    "gptq": (_published("gptq-4-asymmetric"), {"int4-zero", "int8"}),
    "compressed-tensors": (_published("compressed-int4"), {"Q4_0", "int8"}),
    "fp8": (_published("fp8-blocks"), {"int8"}),
}
"""What writes a model, and the formats that its server names. fp8 is rounded to int8."""


def _setup(folder: Path, kind: str) -> Setup:
    requests = Requests(num_streams=6, prompt_len=90, num_tokens=200, vocab_size=VOCAB_SIZE)
    return Setup(MODELS[kind][0](folder), "cpu", [], requests)


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def setup(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return _setup(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="module")
def results(setup: Setup) -> Results:
    return check_exactness(setup, ["mixed"], ["worker-killed"])


@pytest.mark.parametrize("line", [BASE, "worker-killed"])
def test_streams_are_the_same_when_the_worker_is_killed(results: Results, line: str) -> None:
    result = results["mixed", line]
    assert result.passed, str(result)


def test_the_server_names_the_formats_of_its_weights(setup: Setup, kind: str) -> None:
    server = setup.start()
    try:
        model = server.info()["model"]
    finally:
        server.stop()
    assert set(model["weight_formats"]) == MODELS[kind][1]
    others = [name for name in model["weight_formats"] if name != "int8"]
    assert model["precision"] == (f"int8, weights in {', '.join(model['weight_formats'])}" if others else "int8")
