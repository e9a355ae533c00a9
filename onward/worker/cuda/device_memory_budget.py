"""How many KV blocks a device has room for, once everything else is on it."""

from onward.config import WorkerConfig
from onward.errors import StartupError

GRAPH_RESERVE_BYTES = 1 << 30
"""For graphs, which are captured later, and for what a rare step allocates."""
_MIB = 1 << 20


def choose_num_device_blocks(config: WorkerConfig, block_bytes: int, max_model_len: int, free: int, total: int) -> int:
    """`free` and `total` are the device's bytes, measured with the weights loaded."""
    usable = int(total * config.gpu_memory_utilization) - (total - free) - GRAPH_RESERVE_BYTES
    max_fitting = max(0, usable) // block_bytes
    if config.num_kv_blocks is not None:
        return _checked(config.num_kv_blocks, max_fitting, block_bytes, usable)
    if max_fitting < 2:
        raise StartupError(
            f"no memory for the KV pool: of the device's {total // _MIB} MiB, {free // _MIB} are free once the weights are "
            f"loaded, and --gpu-memory-utilization {config.gpu_memory_utilization} leaves {max(0, usable) // _MIB} for "
            f"blocks of {block_bytes / _MIB:.1f} MiB; raise it, free the device of others, or take a smaller model or "
            "--dtype"
        )
    return min(max_fitting, config.max_num_seqs * -(-max_model_len // config.block_size))


def _checked(num_blocks: int, max_fitting: int, block_bytes: int, usable: int) -> int:
    if num_blocks < 1:
        raise StartupError(f"--num-kv-blocks {num_blocks} is not positive")
    if num_blocks > max_fitting:
        raise StartupError(
            f"--num-kv-blocks {num_blocks} takes {num_blocks * block_bytes // _MIB} MiB, but --gpu-memory-utilization "
            f"leaves only {max(0, usable) // _MIB} MiB: at most {max_fitting} blocks fit"
        )
    return num_blocks
