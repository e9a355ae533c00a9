"""Opens a model runner on the device that the configuration names. Each device's modules are imported only for it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onward.config import WorkerConfig, quiet_torch, set_triton_cache
from onward.errors import StartupError
from onward.proto.model import PreparedModel
from onward.worker.device import Device
from onward.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from onward.worker.cuda.kernel_precompile import KernelPrecompilation
    from onward.worker.cuda.torch_device import TorchDevice
    from onward.worker.kept_memory import KeptMemory
    from onward.worker.speculation.proposer import ProposerFactory
    from onward.worker.tensor_parallel.leading_device import LeadingDevice


def open_runner(
    model: PreparedModel,
    config: WorkerConfig,
    progress: Callable[[str, float | None], None],
    kept: "KeptMemory | None" = None,
    rank_fds: Sequence[int] = (),
) -> ModelRunner:
    """Returns a runner that is ready: kernels are compiled or loaded, and weights touched. `kept` is memory that
    outlives the worker; None: all memory ends with the worker. `rank_fds` are sockets to the other ranks with
    `--tensor-parallel`."""
    assert len(rank_fds) == config.tensor_parallel - 1, "there is a socket to each other rank"
    if config.device == "cuda":
        return _open_cuda(model, config, progress, kept, rank_fds)
    return _open_cpu(model, config, progress, None if kept is None else kept.kv_fd, rank_fds)


def _open_cpu(
    model: PreparedModel,
    config: WorkerConfig,
    progress: Callable[[str, float | None], None],
    kv_memory_fd: int | None,
    rank_fds: Sequence[int],
) -> ModelRunner:
    from onward.kernels.cpu.compile_progress import report_compile_progress
    from onward.models.loader.weights import open_weights
    from onward.worker.cpu_device import CpuDevice
    from onward.worker.speculation.proposer_factory import create_proposer_factory

    with report_compile_progress(progress):
        weights, drafter = open_weights(model), create_proposer_factory(config)
        if rank_fds and model.quantization == "none":
            device: Device = _open_sharded_cpu(model, config, weights, drafter, kv_memory_fd, rank_fds)
        else:
            from onward.worker.tensor_parallel.rank_group import RankGroup

            ranks = RankGroup(rank_fds) if rank_fds else None
            device = CpuDevice(model, config, weights, drafter, kv_memory_fd, ranks)
        runner = ModelRunner(model, config, device)
        runner.warm_up(lambda message: progress(message, None))
    return runner


def _open_sharded_cpu(
    model: PreparedModel,
    config: WorkerConfig,
    weights: Mapping[str, Any],
    drafter: "ProposerFactory | None",
    kv_memory_fd: int | None,
    rank_fds: Sequence[int],
) -> "LeadingDevice":
    quiet_torch()
    from onward.worker.cpu_device import CpuDevice
    from onward.worker.tensor_parallel.leading_device import LeadingDevice
    from onward.worker.tensor_parallel.shard_group import ShardGroup

    group = ShardGroup(rank_fds)
    device = CpuDevice(
        model, config, weights, drafter, kv_memory_fd, exchange=group.exchange,
        on_kv_pool=lambda pool: group.start(model, config, pool.fd),
    )  # fmt: skip
    group.connect()
    return LeadingDevice(device, group)


def _open_cuda(
    model: PreparedModel,
    config: WorkerConfig,
    progress: Callable[[str, float | None], None],
    kept: "KeptMemory | None",
    rank_fds: Sequence[int],
) -> ModelRunner:
    from onward.worker.cuda.kernel_precompile import KernelPrecompilation

    if config.speculative is not None:
        raise StartupError("--speculative is for --device cpu: a worker with --device cuda verifies no drafts")
    # If there is a pool already, a worker has compiled the kernels, and compiler processes would lack device memory.
    is_compiled = kept is not None and kept.kv_bytes > 0
    compilation = None if is_compiled or rank_fds else KernelPrecompilation(model, config)
    try:
        quiet_torch()
        import torch

        try:
            device: Device = (
                _open_sharded_cuda(model, config, kept, rank_fds)
                if rank_fds
                else _open_cuda_device(model, config, compilation, kept)
            )
            runner = ModelRunner(model, config, device)
            runner.warm_up(lambda message: progress(message, None))
        except torch.OutOfMemoryError as error:
            raise StartupError(
                f"out of memory on the device while loading the model: {str(error).splitlines()[0]}; take a smaller model, "
                "--quantization fp8 or a smaller --max-num-batched-tokens, or free the device of others"
            ) from None
    except BaseException:
        if compilation is not None:
            compilation.stop()
        raise
    return runner


def _open_cuda_device(
    model: PreparedModel, config: WorkerConfig, compilation: "KernelPrecompilation | None", kept: "KeptMemory | None"
) -> "TorchDevice":
    from onward.worker.cuda.kept_device_memory import KeptDeviceMemory
    from onward.worker.cuda.open_device import check_cuda, open_cuda_device
    from onward.worker.cuda.shared_regions import CudaRegions, can_export

    check_cuda()
    memory = None
    if kept is not None:
        kept.is_kv_kept = can_export()
        memory = KeptDeviceMemory(kept, CudaRegions()) if kept.is_kv_kept else None
    before_pool = (lambda: None) if compilation is None else compilation.wait
    return open_cuda_device(model, config, before_pool=before_pool, memory=memory)


def _open_sharded_cuda(
    model: PreparedModel, config: WorkerConfig, kept: "KeptMemory | None", rank_fds: Sequence[int]
) -> "LeadingDevice":
    """Kernels are compiled when the warm-up needs them. Memory ends with the group: the supervisor keeps the memory of one
    process, and each rank has its own."""
    from onward.worker.cuda.open_device import check_cuda, open_cuda_device
    from onward.worker.tensor_parallel.leading_device import LeadingDevice
    from onward.worker.tensor_parallel.shard_group import ShardGroup

    check_cuda()
    if kept is not None:
        kept.is_kv_kept = False
    set_triton_cache()
    group = ShardGroup(rank_fds)
    group.start(model, config)
    device = open_cuda_device(model, config, before_pool=group.connect, exchange=group.exchange)
    return LeadingDevice(device, group)
