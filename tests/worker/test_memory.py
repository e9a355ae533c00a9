"""How large the KV pool becomes, and what is said when it does not fit."""

from pathlib import Path

import pytest

from onward.config import WorkerConfig
from onward.errors import StartupError
from onward.worker.memory import free_memory_bytes, longest_sequence, pool_blocks
from tests.worker.small_int8 import CONFIG

MIB = 1 << 20


def test_the_models_own_context_is_the_default() -> None:
    assert longest_sequence(WorkerConfig(), CONFIG) == 256
    assert longest_sequence(WorkerConfig(max_model_len=100), CONFIG) == 100


@pytest.mark.parametrize("length", [0, -3, 257])
def test_a_context_that_the_model_does_not_have_is_refused(length: int) -> None:
    with pytest.raises(StartupError, match="--max-model-len"):
        longest_sequence(WorkerConfig(max_model_len=length), CONFIG)


def test_a_quarter_of_the_free_memory_is_used() -> None:
    assert pool_blocks(WorkerConfig(), MIB, 10**6, lambda: 400 * MIB) == 100


def test_the_pool_is_no_larger_than_all_requests_together_can_fill() -> None:
    assert pool_blocks(WorkerConfig(max_num_seqs=3), MIB, 100, lambda: 10**6 * MIB) == 3 * 7


def test_a_given_number_of_blocks_is_taken_as_it_is() -> None:
    assert pool_blocks(WorkerConfig(num_kv_blocks=390), MIB, 100, lambda: 400 * MIB) == 390


@pytest.mark.parametrize("num_blocks", [0, 401])
def test_a_pool_that_does_not_fit_is_refused_with_what_would(num_blocks: int) -> None:
    with pytest.raises(StartupError, match="--num-kv-blocks"):
        pool_blocks(WorkerConfig(num_kv_blocks=num_blocks), MIB, 100, lambda: 400 * MIB)


def test_too_little_memory_for_any_pool_is_said_in_numbers() -> None:
    with pytest.raises(StartupError, match="4 MiB are free"):
        pool_blocks(WorkerConfig(), MIB, 100, lambda: 4 * MIB)


@pytest.mark.parametrize("block_size", [0, 8, 24])
def test_a_block_size_that_the_kernels_cannot_read_is_refused(block_size: int) -> None:
    with pytest.raises(StartupError, match="--block-size"):
        pool_blocks(WorkerConfig(block_size=block_size), MIB, 100, lambda: 400 * MIB)


def test_free_memory_is_a_plausible_number() -> None:
    assert 16 * MIB < free_memory_bytes() < 1 << 50


def test_files_that_were_read_do_not_count_against_a_container_s_limit(tmp_path: Path) -> None:
    """They fill it in time, and a worker that is started again must find the room that the first one had."""
    for name, text in {
        "memory.max": f"{100 * MIB}\n",
        "memory.current": f"{99 * MIB}\n",
        "memory.stat": f"anon {9 * MIB}\nshmem {10 * MIB}\ninactive_file {50 * MIB}\nactive_file {30 * MIB}\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert free_memory_bytes(tmp_path) == (100 - (99 - 50 - 30)) * MIB
    (tmp_path / "memory.stat").unlink()
    assert free_memory_bytes(tmp_path) == 1 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes(tmp_path) > 100 * MIB
