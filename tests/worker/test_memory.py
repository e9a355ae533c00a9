"""How large the KV pool becomes, and what is said when it does not fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onward.config import WorkerConfig
from onward.errors import StartupError
from onward.worker.kv_memory_budget import (
    GRAPH_RESERVE_BYTES,
    choose_device_pool,
    choose_num_blocks,
    choose_num_device_blocks,
    free_memory_bytes,
    resolve_max_model_len,
)
from tests.obs.control_groups import write_group, write_proc
from tests.worker.small_int8 import CONFIG

MIB, GIB = 1 << 20, 1 << 30
DEVICE_BLOCK = 2 << 20


def test_the_models_own_context_is_the_default() -> None:
    assert resolve_max_model_len(WorkerConfig(), CONFIG) == 256
    assert resolve_max_model_len(WorkerConfig(max_model_len=100), CONFIG) == 100


@pytest.mark.parametrize("length", [0, -3, 257])
def test_a_context_that_the_model_does_not_have_is_refused(length: int) -> None:
    with pytest.raises(StartupError, match="--max-model-len"):
        resolve_max_model_len(WorkerConfig(max_model_len=length), CONFIG)


def test_a_quarter_of_the_free_memory_is_used() -> None:
    assert choose_num_blocks(WorkerConfig(), MIB, 10**6, lambda: 400 * MIB) == 100


def test_the_pool_is_no_larger_than_all_requests_together_can_fill() -> None:
    assert choose_num_blocks(WorkerConfig(max_num_seqs=3), MIB, 100, lambda: 10**6 * MIB) == 3 * 7


def test_a_given_number_of_blocks_is_taken_as_it_is() -> None:
    assert choose_num_blocks(WorkerConfig(num_kv_blocks=390), MIB, 100, lambda: 400 * MIB) == 390


@pytest.mark.parametrize("num_blocks", [0, 401])
def test_a_pool_that_does_not_fit_is_refused_with_what_would(num_blocks: int) -> None:
    with pytest.raises(StartupError, match="--num-kv-blocks"):
        choose_num_blocks(WorkerConfig(num_kv_blocks=num_blocks), MIB, 100, lambda: 400 * MIB)


def test_too_little_memory_for_any_pool_is_said_in_numbers() -> None:
    with pytest.raises(StartupError, match="4 MiB are free"):
        choose_num_blocks(WorkerConfig(), MIB, 100, lambda: 4 * MIB)


@pytest.mark.parametrize("block_size", [0, 8, 24])
def test_a_block_size_that_the_kernels_cannot_read_is_refused(block_size: int) -> None:
    with pytest.raises(StartupError, match="--block-size"):
        choose_num_blocks(WorkerConfig(block_size=block_size), MIB, 100, lambda: 400 * MIB)


def test_free_memory_is_a_plausible_number() -> None:
    assert 16 * MIB < free_memory_bytes() < 1 << 50


def test_the_tightest_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    mount = write_group(tmp_path / "cgroup")
    write_group(mount / "a", memory__max=30 * MIB, memory__current=8 * MIB)
    write_group(mount / "a" / "b", memory__max=25 * MIB, memory__current=1 * MIB)
    assert free_memory_bytes(write_proc(tmp_path / "proc", mount, "/a/b")) == 22 * MIB
    assert free_memory_bytes(tmp_path / "nowhere") > 30 * MIB


def test_the_pool_of_a_device_gets_the_share_that_is_left() -> None:
    config = WorkerConfig(gpu_memory_utilization=0.5, max_num_seqs=10_000)
    assert (
        choose_num_device_blocks(config, DEVICE_BLOCK, 4096, free=100 * GIB, total=120 * GIB)
        == (40 * GIB - GRAPH_RESERVE_BYTES) // DEVICE_BLOCK
    )


def test_a_device_gets_no_more_blocks_than_all_requests_together_can_use() -> None:
    config = WorkerConfig(max_num_seqs=4, block_size=16)
    assert choose_num_device_blocks(config, DEVICE_BLOCK, 1000, free=100 * GIB, total=120 * GIB) == 4 * 63


@pytest.mark.parametrize(("free", "share"), [(1 * GIB, 0.9), (100 * GIB, 0.1)])
def test_too_little_memory_of_a_device_is_said_with_its_numbers(free: int, share: float) -> None:
    config = WorkerConfig(gpu_memory_utilization=share)
    with pytest.raises(StartupError, match=f"122880 MiB, {free >> 20} are free .*--gpu-memory-utilization {share}"):
        choose_num_device_blocks(config, DEVICE_BLOCK, 4096, free=free, total=120 * GIB)


def test_blocks_that_were_asked_for_must_fit_on_the_device() -> None:
    assert (
        choose_num_device_blocks(WorkerConfig(num_kv_blocks=100), DEVICE_BLOCK, 4096, free=20 * GIB, total=20 * GIB)
        == 100
    )
    with pytest.raises(StartupError, match="at most 8704 blocks fit"):
        choose_num_device_blocks(WorkerConfig(num_kv_blocks=9999), DEVICE_BLOCK, 4096, free=20 * GIB, total=20 * GIB)
    with pytest.raises(StartupError, match="not positive"):
        choose_num_device_blocks(WorkerConfig(num_kv_blocks=0), DEVICE_BLOCK, 4096, free=20 * GIB, total=20 * GIB)


def pool(**settings: Any) -> tuple[int, bool]:
    """Returns the pool of a device of 100 GiB with 20 GiB of weights; the worker has 2 GiB of buffers."""
    config = WorkerConfig(max_num_seqs=1 << 20, **settings)
    return choose_device_pool(config, DEVICE_BLOCK, 4096, free=78 * GIB, total=100 * GIB, buffers=2 * GIB)


def test_a_pool_leaves_room_for_a_standby_worker() -> None:
    without, has_room = pool(standby_worker="off")
    assert not has_room
    with_standby, has_room = pool(standby_worker="auto")
    assert has_room
    # Its buffers, its context, and what it keeps for graphs.
    assert (without - with_standby) * DEVICE_BLOCK == 4 * GIB


def test_a_standby_that_would_take_much_of_the_pool_is_only_there_if_it_is_asked_for() -> None:
    config = WorkerConfig(max_num_seqs=1 << 20)
    sizes = {"free": 30 * GIB, "total": 100 * GIB, "buffers": 2 * GIB}
    without, has_room = choose_device_pool(config, DEVICE_BLOCK, 4096, **sizes)
    assert not has_room
    config = replace(config, standby_worker="on")
    with_standby, has_room = choose_device_pool(config, DEVICE_BLOCK, 4096, **sizes)
    assert has_room and (without - with_standby) * DEVICE_BLOCK == 4 * GIB


@pytest.mark.parametrize(("left_gib", "has_room"), [(5, True), (4, True), (3, False)])
def test_a_pool_whose_size_was_given_has_it_and_a_standby_only_what_is_left(left_gib: int, has_room: bool) -> None:
    num_blocks = (100 * 9 // 10 - 22 - 1 - left_gib) * GIB // DEVICE_BLOCK
    assert pool(num_kv_blocks=num_blocks) == (num_blocks, has_room)


def test_a_pool_that_replaces_a_lost_one_needs_no_more_than_the_free_memory() -> None:
    """Its size was chosen when the device had more free memory: a worker that refused it would never come back."""
    config = WorkerConfig(num_kv_blocks=2000)
    sizes = {"free": 4 * GIB, "total": 100 * GIB}
    with pytest.raises(StartupError, match="--num-kv-blocks 2000"):
        choose_num_device_blocks(config, DEVICE_BLOCK, 4096, **sizes)
    kept = replace(config, keeps_pool_size=True)
    assert choose_num_device_blocks(kept, DEVICE_BLOCK, 4096, **sizes) == 2000
    with pytest.raises(StartupError, match="at most 2048 blocks fit"):
        choose_num_device_blocks(replace(kept, num_kv_blocks=2049), DEVICE_BLOCK, 4096, **sizes)
