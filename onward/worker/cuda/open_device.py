"""Opens the CUDA device of this process, with Triton's kernels. They are imported only if there is such a device."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from onward.config import WorkerConfig
from onward.errors import StartupError
from onward.models.loader.weights import open_weights
from onward.proto.model import PreparedModel
from onward.worker.kv_memory_budget import resolve_max_model_len

if TYPE_CHECKING:
    from onward.models.sharding.rank_exchange import RankExchange
    from onward.worker.cuda.kept_device_memory import KeptDeviceMemory
    from onward.worker.cuda.torch_device import TorchDevice


def check_cuda() -> None:
    """Raises `StartupError` if there is no CUDA device."""
    if not torch.cuda.is_available():
        raise StartupError(f"--device cuda: torch {torch.__version__} finds no CUDA device here")


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


def open_cuda_device(
    model: PreparedModel,
    config: WorkerConfig,
    *,
    before_pool: Callable[[], None],
    memory: "KeptDeviceMemory | None" = None,
    exchange: "RankExchange | None" = None,
) -> "TorchDevice":
    """Takes the arguments of `TorchDevice`. The caller has called `check_cuda`."""
    if exchange is not None:
        torch.cuda.set_device(exchange.shard.device_index(torch.cuda.device_count()))
    check_capability(torch.cuda.get_device_capability(), deterministic=config.deterministic)
    from onward.kernels.triton.triton_ops import TritonOps
    from onward.worker.cuda.torch_device import TorchDevice

    ops = TritonOps(max_model_len=resolve_max_model_len(config, model.config), fixed_order=config.deterministic)
    weights = open_weights(model) if model.weights else None
    return TorchDevice(model, config, weights, ops=ops, before_pool=before_pool, memory=memory, exchange=exchange)
