"""Decides how much memory the KV pool gets, before anything large is allocated."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from onward.config import BLOCK_MULTIPLE, WorkerConfig
from onward.errors import StartupError
from onward.obs.cgroup_memory import PROC_SELF, memory_cgroups
from onward.proto.model import ModelConfig

POOL_SHARE = 0.25
"""Share of the memory that is free at start. The system provides pages only when tokens are written to them."""
GRAPH_RESERVE_BYTES = 1 << 30
"""Memory of a CUDA device kept free for graphs, which are captured later, and for allocations of rare steps."""
CONTEXT_RESERVE_BYTES = 1 << 30
"""Memory of a CUDA device that a process uses beside its tensors: for its context and the modules of kernels."""
MAX_STANDBY_SHARE = 0.1
"""Share of the pool's memory that a standby worker may take if `standby_worker` is `auto`."""
_MIB = 1 << 20


def resolve_max_model_len(config: WorkerConfig, model: ModelConfig) -> int:
    """Returns `max_model_len` from the configuration, or the model's longest context."""
    limit = model.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if not 0 < config.max_model_len <= limit:
        raise StartupError(f"--max-model-len {config.max_model_len} is not within the model's 1 to {limit} tokens")
    return config.max_model_len


def choose_num_blocks(config: WorkerConfig, block_bytes: int, max_model_len: int, free_bytes: Callable[[], int]) -> int:
    """Returns the number of KV blocks, of `block_bytes` bytes each."""
    if config.block_size <= 0 or config.block_size % BLOCK_MULTIPLE:
        raise StartupError(f"--block-size {config.block_size} is not a multiple of {BLOCK_MULTIPLE}")
    if config.num_kv_blocks is not None:
        return _checked(config.num_kv_blocks, block_bytes, free_bytes())
    max_useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    free = free_bytes()
    max_fitting = int(free * POOL_SHARE) // block_bytes
    if max_fitting < 2:
        raise StartupError(
            f"no memory for the KV pool: {free >> 20} MiB are free, of which {POOL_SHARE:.0%} may be used, and one "
            f"block of {config.block_size} tokens takes {block_bytes / (1 << 20):.1f} MiB; free some memory or set "
            "--num-kv-blocks"
        )
    return min(max_useful, max_fitting)


def _checked(num_blocks: int, block_bytes: int, free: int) -> int:
    if num_blocks < 1:
        raise StartupError(f"--num-kv-blocks {num_blocks} is not positive")
    if num_blocks * block_bytes > free:
        raise StartupError(
            f"--num-kv-blocks {num_blocks} takes {num_blocks * block_bytes >> 20} MiB, but only {free >> 20} MiB are free; "
            f"at most {free // block_bytes} blocks fit"
        )
    return num_blocks


class DevicePoolSize(NamedTuple):
    num_blocks: int
    has_standby_room: bool
    """Whether the pool leaves enough memory for a standby worker."""


def choose_device_pool(
    config: WorkerConfig, block_bytes: int, max_model_len: int, free: int, total: int, buffers: int
) -> DevicePoolSize:
    """Returns the size of a pool on a CUDA device. `free` and `total` are bytes of the device, measured with the
    weights loaded. `buffers` are the bytes of this worker's own buffers; a standby worker has as many."""
    standby = buffers + CONTEXT_RESERVE_BYTES + GRAPH_RESERVE_BYTES
    usable = _usable_device_bytes(config, free, total)
    if config.num_kv_blocks is not None:
        num_blocks = choose_num_device_blocks(config, block_bytes, max_model_len, free, total)
        return DevicePoolSize(num_blocks, num_blocks * block_bytes <= usable - standby)
    is_small = standby <= usable * MAX_STANDBY_SHARE
    has_room = config.standby_worker == "on" or (config.standby_worker == "auto" and is_small)
    left = free - standby if has_room else free
    return DevicePoolSize(choose_num_device_blocks(config, block_bytes, max_model_len, left, total), has_room)


def _usable_device_bytes(config: WorkerConfig, free: int, total: int) -> int:
    """Returns the bytes that a pool may use. A pool that keeps the size of an earlier one may use all free memory:
    other processes may have taken memory since that size was chosen, and the engine expects as many blocks as
    before."""
    if config.keeps_pool_size:
        return free
    return int(total * config.gpu_memory_utilization) - (total - free) - GRAPH_RESERVE_BYTES


def choose_num_device_blocks(config: WorkerConfig, block_bytes: int, max_model_len: int, free: int, total: int) -> int:
    """Returns the number of blocks of a pool on a CUDA device with `free` of `total` bytes free."""
    usable = _usable_device_bytes(config, free, total)
    max_fitting = max(0, usable) // block_bytes
    if config.num_kv_blocks is not None:
        return _checked_device_blocks(config.num_kv_blocks, max_fitting, block_bytes, usable)
    if max_fitting < 2:
        raise StartupError(
            f"no memory for the KV pool: of the device's {total // _MIB} MiB, {free // _MIB} are free once the weights are "
            f"loaded. --gpu-memory-utilization {config.gpu_memory_utilization} leaves {max(0, usable) // _MIB} for "
            f"blocks of {block_bytes / _MIB:.1f} MiB. Raise it, free the device of others, or take a smaller model or "
            "--dtype"
        )
    return min(max_fitting, config.max_num_seqs * -(-max_model_len // config.block_size))


def _checked_device_blocks(num_blocks: int, max_fitting: int, block_bytes: int, usable: int) -> int:
    if num_blocks < 1:
        raise StartupError(f"--num-kv-blocks {num_blocks} is not positive")
    if num_blocks > max_fitting:
        raise StartupError(
            f"--num-kv-blocks {num_blocks} takes {num_blocks * block_bytes // _MIB} MiB, but --gpu-memory-utilization "
            f"leaves only {max(0, usable) // _MIB} MiB: at most {max_fitting} blocks fit"
        )
    return num_blocks


def free_memory_bytes(proc: Path = PROC_SELF) -> int:
    """Returns the bytes that this process may still allocate: the system's available memory, or what is left of the
    tightest limit of its cgroups if that is less."""
    groups = [group for chain in memory_cgroups(proc) for group in chain]
    headrooms = [group.headroom_bytes() for group in groups]
    return min([_system_available(), *(headroom for headroom in headrooms if headroom is not None)])


def _system_available() -> int:
    """Returns the system's available memory. Without Linux's `MemAvailable`, half of all memory is the estimate."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
