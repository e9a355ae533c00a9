"""`onward serve --device cuda --deterministic`: streams whose worker is killed get what they would have got."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from onward.bench.model_shapes import write_tokenizer
from tests.e2e.server import Server
from tests.e2e.streams import Stream, run_streams

pytestmark = pytest.mark.gpu

NUM_TOKENS = 1500
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 4096, "num_key_value_heads": 4,
    "head_dim": 64, "max_position_embeddings": 4096, "hidden_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 8, "intermediate_size": 1536, "tie_word_embeddings": True,
}  # fmt: skip
BODIES = [
    {
        "model": "m", "prompt": [(i * 31 + j * j) % 4096 for j in range(5 + 60 * i)], "max_tokens": NUM_TOKENS,
        "ignore_eos": True, "temperature": 0.7, "seed": i,
    }
    for i in range(12)
] + [
    {
        "model": "m", "prompt": [(i * 17 + j * j) % 4096 for j in range(9)], "max_tokens": NUM_TOKENS, "seed": i,
        "temperature": 0.9, "guided_regex": "([a-z]{3} ){250}[a-z]{5}",
    }
    for i in range(2)
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    write_tokenizer(folder, 4096)
    flags = ["--device", "cuda", "--deterministic", "--load-format", "dummy", "--served-model-name", "m"]
    with Server(str(folder), *flags, "--max-num-seqs", "16", "--gpu-memory-utilization", "0.2") as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[tuple]:
    return [stream.result() for stream in run_streams(server.url, BODIES, path="/v1/completions")]


@pytest.mark.parametrize("role", ["worker", "engine"])
def test_streams_go_on_when_a_process_is_killed(server: Server, undisturbed: list[tuple], role: str) -> None:
    pid, killed = server.pid(role), False

    def kill(streams: list[Stream]) -> None:
        nonlocal killed
        if not killed and min(len(stream.token_ids) for stream in streams) >= 20:
            killed = True
            assert max(len(stream.token_ids) for stream in streams) < NUM_TOKENS, "too late to be a test"
            os.kill(pid, signal.SIGKILL)

    streams = run_streams(server.url, BODIES, kill, path="/v1/completions")
    assert killed
    assert [stream.result() for stream in streams] == undisturbed
    assert server.pid(role) != pid


def test_answers_have_the_form_that_was_asked_for(undisturbed: list[tuple]) -> None:
    for text, *_ in undisturbed[12:]:
        assert re.fullmatch("([a-z]{3} ){250}[a-z]{5}", text)


def test_vectors_are_the_same_alone_and_among_others(server: Server) -> None:
    inputs = [body["prompt"] for body in BODIES]
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def ask(several: list[Any]) -> list[list[float]]:
            answer = client.post("/v1/embeddings", json={"model": "m", "input": several})
            assert answer.status_code == 200, answer.text
            return [one["embedding"] for one in answer.json()["data"]]

        together = ask(inputs)
        assert [ask([one])[0] for one in inputs[::5]] == together[::5]
    assert len({tuple(vector) for vector in together}) == len(inputs)
    assert all(abs(sum(x * x for x in vector) - 1) < 1e-3 for vector in together)


def test_each_stream_alone_gets_what_it_got_among_others(server: Server, undisturbed: list[tuple]) -> None:
    for body, expected in list(zip(BODIES, undisturbed, strict=True))[::4]:
        (stream,) = run_streams(server.url, [body], path="/v1/completions")
        assert stream.result() == expected
