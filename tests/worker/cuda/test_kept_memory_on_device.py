"""Weights and KV on a real CUDA device outlive the worker. The tests count the tokens that are computed again after a kill
and after a crash, and check that the device's memory is free when all processes are dead."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from onward.bench.model_shapes import write_tokenizer
from onward.worker.cuda.shared_regions import CudaRegions, checksum
from tests.e2e.server import Server
from tests.e2e.streams import Stream, run_streams

pytestmark = pytest.mark.gpu

NUM_STREAMS, NUM_TOKENS, NUM_PROMPT, BLOCK_SIZE, MAX_STEPS_IN_FLIGHT = 8, 1500, 200, 16, 2
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 4096, "num_key_value_heads": 4,
    "head_dim": 128, "max_position_embeddings": 4096, "hidden_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 8, "intermediate_size": 1536, "tie_word_embeddings": True,
}  # fmt: skip
BODIES = [
    {
        "model": "m", "prompt": [(i * 31 + j * j) % 4096 for j in range(NUM_PROMPT)], "max_tokens": NUM_TOKENS,
        "ignore_eos": True, "temperature": 0.7, "seed": i,
    }
    for i in range(NUM_STREAMS)
]  # fmt: skip
REGION_BYTES = (64 << 20) + 8
WRITER = f"""
import socket, sys, torch
from onward.worker.cuda.shared_regions import CudaRegions, checksum
fd, memory = CudaRegions().create({REGION_BYTES})
half = len(memory) // 16 * 8
memory.random_(generator=torch.Generator("cuda").manual_seed(3))
memory[half:] = 0
print(checksum(memory[:half]), flush=True)
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"x"], [fd])
while True:
    memory[half:].add_(1)
"""


def test_memory_outlives_a_process_that_is_killed_in_the_middle_of_a_kernel() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert writer.stdout is not None
        expected = writer.stdout.readline().strip()
        _, [fd], _, _ = socket.recv_fds(ours, 1, 1)
    writer.kill()
    writer.wait()
    memory = CudaRegions().attach(fd, REGION_BYTES)
    half = REGION_BYTES // 16 * 8
    assert checksum(memory[:half]) == expected
    first = checksum(memory[: half * 2])
    torch.cuda.synchronize()
    assert checksum(memory[: half * 2]) == first, "nothing writes it any more"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    write_tokenizer(folder, 4096)
    return folder


def serve(folder: Path, standby: str) -> Server:
    flags = ["--device", "cuda", "--deterministic", "--load-format", "dummy", "--served-model-name", "m"]
    sizes = ["--max-num-seqs", "16", "--num-kv-blocks", "2000", "--max-num-batched-tokens", "2048"]
    return Server(str(folder), *flags, *sizes, "--standby-worker", standby)


@pytest.fixture(scope="module", params=["off", "on"])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Server]:
    with serve(folder, request.param) as server:
        yield server


def processes(server: Server) -> list[tuple[str, str, int]]:
    return [(one["role"], one["state"], one["pid"]) for one in server.get("/info")["processes"]]


def wait_for_standby(server: Server) -> None:
    """Where there is to be one: each kill finds it ready."""
    if server.get("/info")["configuration"]["standby_worker"] == "off":
        return
    until_s = time.monotonic() + 60
    while not any((role, state) == ("standby", "ready") for role, state, _ in processes(server)):
        assert time.monotonic() < until_s, server.log()


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[tuple]:
    return [stream.result() for stream in run_streams(server.url, BODIES, path="/v1/completions")]


def recomputed(server: Server, cause: str) -> float:
    return server.metrics()[f'onward_recomputed_tokens_total{{cause="{cause}"}}']


def signal_during_streams(server: Server, role: str, number: signal.Signals) -> list[Stream]:
    wait_for_standby(server)
    pid, was_sent = server.pid(role), False

    def send(streams: list[Stream]) -> None:
        nonlocal was_sent
        if not was_sent and min(len(stream.token_ids) for stream in streams) >= 40:
            assert max(len(stream.token_ids) for stream in streams) < NUM_TOKENS, "too late to be a test"
            os.kill(pid, number)
            was_sent = True

    streams = run_streams(server.url, BODIES, send, path="/v1/completions")
    assert was_sent
    assert server.pid(role) != pid
    return streams


def test_a_killed_worker_costs_the_steps_in_flight(server: Server, undisturbed: list[tuple]) -> None:
    before = recomputed(server, "worker")
    streams = signal_during_streams(server, "worker", signal.SIGKILL)
    assert [stream.result() for stream in streams] == undisturbed
    assert recomputed(server, "worker") - before <= MAX_STEPS_IN_FLIGHT * NUM_STREAMS


def test_a_worker_that_crashed_costs_every_context(server: Server, undisturbed: list[tuple]) -> None:
    before = recomputed(server, "worker")
    streams = signal_during_streams(server, "worker", signal.SIGSEGV)
    assert [stream.result() for stream in streams] == undisturbed
    assert recomputed(server, "worker") - before >= NUM_STREAMS * NUM_PROMPT


def test_a_killed_engine_costs_a_block_of_each_stream_at_most(server: Server, undisturbed: list[tuple]) -> None:
    """Counters begin again with the engine."""
    streams = signal_during_streams(server, "engine", signal.SIGKILL)
    assert [stream.result() for stream in streams] == undisturbed
    assert recomputed(server, "engine") <= NUM_STREAMS * BLOCK_SIZE
    assert "cached blocks adopted" in server.log()


def test_device_memory_is_freed_when_everything_is_killed(folder: Path) -> None:
    """By itself: it looks at all memory of the device."""
    before, total = torch.cuda.mem_get_info()
    with serve(folder, "on") as server:
        wait_for_standby(server)
        taken, _ = torch.cuda.mem_get_info()
        assert before - taken > 1 << 28, "weights, pool and two contexts"
        for _, _, pid in processes(server):
            os.kill(pid, signal.SIGKILL)
        until_s = time.monotonic() + 30
        while before - torch.cuda.mem_get_info()[0] > 1 << 24:
            assert time.monotonic() < until_s, f"{before - torch.cuda.mem_get_info()[0]} of {total} bytes are left"
