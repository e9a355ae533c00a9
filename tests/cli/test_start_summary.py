"""What a start says about memory, limits, keys and addresses, and when it warns."""

import io

import msgspec
import numba
import pytest
from rich.console import Console

from onward.cli import start_summary
from onward.cli.progress import ProgressDisplay
from onward.cli.ready_message import READY_LINE_PREFIX, print_ready
from onward.cli.start_summary import summary
from onward.config import ServeConfig
from onward.kernels.cpu import compile_progress
from onward.proto.step import WorkerHello
from onward.supervisor.pd_config import resolve_pd
from onward.supervisor.registration_config import resolve_registration
from tests.supervisor.test_worker_wire import MODEL

URL = "http://127.0.0.1:8000"
WORKER = WorkerHello(1, "w", "e", 1, "fp", 1000, 16, 4096, 320, kernels="int8 kernels (avx2 SIMD, cpu)", threads=2)


def told(
    config: ServeConfig, worker: WorkerHello = WORKER, num_keys: int = 0, handoff_port: int | None = None
) -> dict[str, str]:
    pd, routers = resolve_pd(config, "", handoff_port), resolve_registration(config, 8000)
    model = msgspec.structs.replace(MODEL, name="small", quantization="int8")
    return dict(summary(config, model, worker, URL, pd, routers, num_keys=num_keys))


def pool_of(num_blocks: int) -> str:
    return told(ServeConfig(), msgspec.structs.replace(WORKER, num_blocks=num_blocks))["KV pool"]


def test_a_start_says_what_it_has_come_to() -> None:
    lines = told(ServeConfig())
    assert lines["model"] == f"small: {MODEL.config.architecture}, {MODEL.config.num_layers} layers, int8"
    assert lines["compute"] == "cpu, int8 kernels (avx2 SIMD, cpu), 2 threads"
    assert lines["context"] == "4,096 tokens"
    assert lines["limits"].startswith("64 running and 1,024 waiting requests, 192 tokens per step")
    assert lines["addresses"] == URL


def test_a_start_says_that_chat_is_disabled() -> None:
    with_template = msgspec.structs.replace(MODEL, tokenizer="tokenizer.json", chat_template="T")
    assert start_summary.chat_disabled(with_template) is None
    without_template = msgspec.structs.replace(with_template, chat_template=None)
    assert start_summary.chat_disabled(without_template) == (
        "disabled: the model has no chat template; --chat-template FILE gives it one"
    )
    assert "token ids" in (start_summary.chat_disabled(msgspec.structs.replace(with_template, tokenizer=None)) or "")
    config = ServeConfig()
    pd, routers = resolve_pd(config, "", None), resolve_registration(config, 8000)
    for model, is_told in ((with_template, False), (without_template, True)):
        assert ("chat" in dict(summary(config, model, WORKER, URL, pd, routers, num_keys=0))) is is_told


@pytest.mark.parametrize(
    ("num_blocks", "expected"),
    [
        (1000, "1,000 blocks of 16 = 16,000 tokens: 3 requests of 4,096 tokens, or 64 requests of 240"),
        (256, "256 blocks of 16 = 4,096 tokens: 1 request of 4,096 tokens, or 64 requests of 64"),
        (255, "255 blocks of 16 = 4,080 tokens: none of 4,096 tokens, or 64 requests of 48"),
        (64 * 256, "16,384 blocks of 16 = 262,144 tokens: 64 requests of 4,096 tokens"),
    ],
)
def test_the_pool_is_counted_in_blocks_tokens_and_requests(num_blocks: int, expected: str) -> None:
    assert pool_of(num_blocks) == expected


@pytest.mark.parametrize(
    ("num_ranks", "threads", "warning"),
    [
        (2, 4, None),
        (
            2,
            6,
            "--tensor-parallel 2 with --threads 3: 6 threads wait for each other on 4 cores; start with --threads 2",
        ),
        (
            8,
            8,
            "--tensor-parallel 8 with --threads 1: 8 threads wait for each other on 4 cores; start with fewer ranks",
        ),
        (1, 6, None),
    ],
)
def test_more_threads_of_ranks_than_cores_are_a_warning(num_ranks: int, threads: int, warning: str | None) -> None:
    worker = msgspec.structs.replace(WORKER, threads=threads)
    assert start_summary.threads_warning(ServeConfig(tensor_parallel=num_ranks), worker, 4) == warning


def test_a_pool_smaller_than_the_context_is_a_warning() -> None:
    assert start_summary.pool_warning(msgspec.structs.replace(WORKER, num_blocks=256)) is None
    warning = start_summary.pool_warning(msgspec.structs.replace(WORKER, num_blocks=255))
    assert warning is not None and "4,080 tokens" in warning
    assert "--num-kv-blocks 256" in warning and "--max-model-len 4080" in warning


def test_keys_and_addresses_are_named() -> None:
    assert told(ServeConfig())["keys"] == "none: every client that can connect has full access"
    assert told(ServeConfig(api_keys="keys.json", open_metrics=True), num_keys=3)["keys"] == (
        "3, from keys.json; /metrics is open"
    )
    lines = told(ServeConfig(role="prefill", router="http://127.0.0.1:8080"), handoff_port=7000)
    assert lines["addresses"] == f"{URL}, handoffs at tcp://127.0.0.1:7000, registered as {URL}"


def test_the_greeting_stays_the_first_line() -> None:
    out, config = io.StringIO(), ServeConfig()
    pd, routers = resolve_pd(config, "", None), resolve_registration(config, 8000)
    lines = list(told(config).items())
    print_ready(Console(file=out, highlight=False, width=20), config, MODEL, URL, pd, routers, lines)
    shown = out.getvalue().splitlines()
    assert shown[1].startswith(READY_LINE_PREFIX), "`onward up` looks for it"
    assert [line for line in shown if line.startswith("  KV pool    1,000 blocks")], "a line stays whole"


def test_each_phase_of_a_start_has_a_bar_of_its_own() -> None:
    out = io.StringIO()
    with ProgressDisplay(Console(file=out, force_terminal=True, width=100)) as progress:
        progress("converting", 1.0)
        progress("compiling", 0.25)
        [task] = progress._bar.tasks
        assert (task.description, task.completed, task.finished) == ("compiling", 0.25, False)


def test_compiling_kernels_is_told_in_fractions() -> None:
    told: list[tuple[str, float | None]] = []

    def plus_one(number: int) -> int:
        return number + 1

    with compile_progress.report_compile_progress(lambda message, fraction: told.append((message, fraction))):
        numba.njit("int64(int64)")(plus_one)
    assert [message.startswith("compiling kernels") for message, _ in told] == [True, True]
    assert told[0][1] == 0.0 and 0 < (told[1][1] or 0) < 1
    numba.njit("int32(int32)")(plus_one)
    assert len(told) == 2, "only what is compiled meanwhile"
