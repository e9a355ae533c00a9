"""How many KV blocks a device has room for, once everything else is on it."""

from onward.config import WorkerConfig
from onward.errors import StartupError

GRAPH_RESERVE_BYTES = 1 << 30
"""For graphs, which are captured later, and for what a rare step allocates."""
_MIB = 1 << 20


def choose_num_device_blocks(config: WorkerConfig, size: int, max_model_len: int, free: int, total: int) -> int:
    """`size` is that of one block; `free` and `total` are the device's bytes, measured with the weights loaded."""
    usable = int(total * config.gpu_memory_utilization) - (total - free) - GRAPH_RESERVE_BYTES
    fitting = max(0, usable) // size
    if config.num_kv_blocks is not None:
        return _checked(config.num_kv_blocks, fitting, size, usable)
    if fitting < 2:
        raise StartupError(
            f"no memory for the KV pool: of the device's {total // _MIB} MiB, {free // _MIB} are free once the weights are "
            f"loaded, and --gpu-memory-utilization {config.gpu_memory_utilization} leaves {max(0, usable) // _MIB} for "
            f"blocks of {size / _MIB:.1f} MiB; raise it, free the device of others, or take a smaller model or --dtype"
        )
    return min(fitting, config.max_num_seqs * -(-max_model_len // config.block_size))


def _checked(wanted: int, fitting: int, size: int, usable: int) -> int:
    if wanted < 1:
        raise StartupError(f"--num-kv-blocks {wanted} is not positive")
    if wanted > fitting:
        raise StartupError(
            f"--num-kv-blocks {wanted} takes {wanted * size // _MIB} MiB, but --gpu-memory-utilization leaves only "
            f"{max(0, usable) // _MIB} MiB: at most {fitting} blocks fit"
        )
    return wanted
