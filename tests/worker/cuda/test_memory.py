"""How many KV blocks a device gets, and what is said where there is no room."""

import pytest

from onward.config import WorkerConfig
from onward.errors import StartupError
from onward.worker.cuda.device_memory_budget import GRAPH_RESERVE_BYTES, choose_num_device_blocks

GIB = 1 << 30
BLOCK = 2 << 20


def test_the_pool_gets_the_share_that_is_left() -> None:
    config = WorkerConfig(gpu_memory_utilization=0.5, max_num_seqs=10_000)
    assert (
        choose_num_device_blocks(config, BLOCK, 4096, free=100 * GIB, total=120 * GIB)
        == (40 * GIB - GRAPH_RESERVE_BYTES) // BLOCK
    )


def test_no_more_blocks_than_all_requests_together_can_use() -> None:
    config = WorkerConfig(max_num_seqs=4, block_size=16)
    assert choose_num_device_blocks(config, BLOCK, 1000, free=100 * GIB, total=120 * GIB) == 4 * 63


@pytest.mark.parametrize(("free", "share"), [(1 * GIB, 0.9), (100 * GIB, 0.1)])
def test_too_little_memory_is_said_with_its_numbers(free: int, share: float) -> None:
    config = WorkerConfig(gpu_memory_utilization=share)
    with pytest.raises(StartupError, match=f"122880 MiB, {free >> 20} are free .*--gpu-memory-utilization {share}"):
        choose_num_device_blocks(config, BLOCK, 4096, free=free, total=120 * GIB)


def test_blocks_that_were_asked_for_must_fit() -> None:
    assert choose_num_device_blocks(WorkerConfig(num_kv_blocks=100), BLOCK, 4096, free=20 * GIB, total=20 * GIB) == 100
    with pytest.raises(StartupError, match="at most 8704 blocks fit"):
        choose_num_device_blocks(WorkerConfig(num_kv_blocks=9999), BLOCK, 4096, free=20 * GIB, total=20 * GIB)
    with pytest.raises(StartupError, match="not positive"):
        choose_num_device_blocks(WorkerConfig(num_kv_blocks=0), BLOCK, 4096, free=20 * GIB, total=20 * GIB)
