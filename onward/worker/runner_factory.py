"""Opens a model runner on the device that the configuration names. Each device's modules are imported only for it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from onward.config import WorkerConfig, quiet_torch
from onward.errors import StartupError
from onward.proto.model import PreparedModel
from onward.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from onward.worker.cuda.kernel_precompile import KernelPrecompilation
    from onward.worker.cuda.torch_device import TorchDevice
    from onward.worker.kept_memory import KeptMemory


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
        return _open_cuda(model, config, progress, kept)
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
    from onward.worker.tensor_parallel.rank_group import RankGroup

    ranks = RankGroup(rank_fds) if rank_fds else None
    with report_compile_progress(progress):
        device = CpuDevice(model, config, open_weights(model), create_proposer_factory(config), kv_memory_fd, ranks)
        runner = ModelRunner(model, config, device)
        runner.warm_up(lambda message: progress(message, None))
    return runner


def _open_cuda(
    model: PreparedModel,
    config: WorkerConfig,
    progress: Callable[[str, float | None], None],
    kept: "KeptMemory | None",
) -> ModelRunner:
    from onward.worker.cuda.kernel_precompile import KernelPrecompilation

    if config.speculative is not None:
        raise StartupError("--speculative is for --device cpu: a worker with --device cuda verifies no drafts")
    # If there is a pool already, a worker has compiled the kernels, and compiler processes would lack device memory.
    compilation = None if kept is not None and kept.kv_bytes else KernelPrecompilation(model, config)
    try:
        quiet_torch()
        import torch

        try:
            runner = ModelRunner(model, config, _load_cuda_device(model, config, compilation, kept))
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


def _load_cuda_device(
    model: PreparedModel, config: WorkerConfig, compilation: "KernelPrecompilation | None", kept: "KeptMemory | None"
) -> "TorchDevice":
    import torch

    if not torch.cuda.is_available():
        raise StartupError(f"--device cuda: torch {torch.__version__} finds no CUDA device here")
    check_capability(torch.cuda.get_device_capability(), deterministic=config.deterministic)
    from onward.kernels.triton.triton_ops import TritonOps
    from onward.models.loader.weights import open_weights
    from onward.worker.cuda.kept_device_memory import KeptDeviceMemory
    from onward.worker.cuda.shared_regions import CudaRegions, can_export
    from onward.worker.cuda.torch_device import TorchDevice
    from onward.worker.kv_memory_budget import resolve_max_model_len

    ops = TritonOps(max_model_len=resolve_max_model_len(config, model.config), fixed_order=config.deterministic)
    weights = open_weights(model) if model.weights else None
    memory = None
    if kept is not None:
        kept.is_kv_kept = can_export()
        memory = KeptDeviceMemory(kept, CudaRegions()) if kept.is_kv_kept else None
    before_pool = (lambda: None) if compilation is None else compilation.wait
    return TorchDevice(model, config, weights, ops=ops, before_pool=before_pool, memory=memory)


def check_capability(capability: tuple[int, int], *, deterministic: bool) -> None:
    """Raises `StartupError` for a device that is too old, or not known to be exact. Overlapping launches need compute
    capability 9.0. On newer devices, products of few rows and of many rows use different matrix instructions. Their
    bits were never compared, so nothing is guaranteed there."""
    version = ".".join(map(str, capability))
    if capability < (9, 0):
        raise StartupError(f"--device cuda: compute capability 9.0 (H100, H200) is needed; this device has {version}")
    if deterministic and capability != (9, 0):
        raise StartupError(
            f"--deterministic was shown to be exact on compute capability 9.0 (H100, H200), and this device has {version}; "
            "start with --no-deterministic"
        )
