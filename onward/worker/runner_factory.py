"""The one interface of all runners, and the choice among them. A step begins, and its result comes later, in order."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from onward.config import WorkerConfig, quiet_torch
from onward.errors import StartupError
from onward.proto.model import PreparedModel
from onward.proto.step import StepPlan, StepResult

if TYPE_CHECKING:
    from onward.worker.cpu_model_runner import CpuModelRunner
    from onward.worker.cuda.cuda_model_runner import CudaModelRunner
    from onward.worker.cuda.kernel_precompile import KernelPrecompilation


class AsyncModelRunner(Protocol):
    @property
    def is_busy(self) -> bool:
        """Whether a result is due."""
        ...

    @property
    def has_result(self) -> bool:
        """Whether `finish` would not have to wait for somebody else."""
        ...

    def begin(self, plan: StepPlan) -> None: ...

    def finish(self) -> StepResult | None:
        """The result of the oldest step that has begun; None if there is none."""
        ...


class SyncModelRunner(Protocol):
    """Computes a step when it is called, in this thread."""

    def step(self, plan: StepPlan) -> StepResult: ...


class SyncRunnerAdapter:
    """A runner of the host as one that overlaps: a step is computed when its result is asked for."""

    def __init__(self, runner: SyncModelRunner) -> None:
        self._runner = runner
        self._plans: deque[StepPlan] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self._plans)

    @property
    def has_result(self) -> bool:
        return bool(self._plans)

    def begin(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def finish(self) -> StepResult | None:
        if not self._plans:
            return None
        plan = self._plans.popleft()
        result = self._runner.step(plan)
        assert result.step == plan.step, "a result has the number of its plan"
        return result


def open_cpu_runner(
    model: PreparedModel, config: WorkerConfig, progress: Callable[[str, float | None], None]
) -> "CpuModelRunner":
    """Ready to run: kernels are compiled, or loaded, and weights touched. Imports what only a CPU needs."""
    from onward.kernels.cpu.compile_progress import report_compile_progress
    from onward.models.loader.weights import open_weights
    from onward.worker.cpu_model_runner import CpuModelRunner
    from onward.worker.speculation.proposer_factory import create_proposer_factory

    with report_compile_progress(progress):
        runner = CpuModelRunner(model, config, open_weights(model), drafter=create_proposer_factory(config))
        runner.warm_up(lambda message: progress(message, None))
    return runner


def open_cuda_runner(model: PreparedModel, config: WorkerConfig) -> "CudaModelRunner":
    """Imports what only such a device needs."""
    from onward.worker.cuda.kernel_precompile import KernelPrecompilation

    compilation = KernelPrecompilation(model, config)
    try:
        return _load_cuda_runner(model, config, compilation)
    except BaseException:
        compilation.stop()
        raise


def _load_cuda_runner(
    model: PreparedModel, config: WorkerConfig, compilation: "KernelPrecompilation"
) -> "CudaModelRunner":
    quiet_torch()
    import torch

    if not torch.cuda.is_available():
        raise StartupError(f"--device cuda: torch {torch.__version__} finds no CUDA device here")
    check_capability(torch.cuda.get_device_capability(), deterministic=config.deterministic)
    from onward.kernels.triton.triton_ops import TritonOps
    from onward.models.loader.weights import open_weights
    from onward.worker.cuda.cuda_model_runner import CudaModelRunner
    from onward.worker.kv_memory_budget import resolve_max_model_len

    ops = TritonOps(max_model_len=resolve_max_model_len(config, model.config), fixed_order=config.deterministic)
    weights = open_weights(model) if model.weights else None
    try:
        return CudaModelRunner(model, config, weights, ops=ops, before_pool=compilation.wait)
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"out of memory on the device while loading the model: {str(error).splitlines()[0]}; take a smaller model, "
            "--quantization fp8 or a smaller --max-num-batched-tokens, or free the device of others"
        ) from None


def check_capability(capability: tuple[int, int], *, deterministic: bool) -> None:
    """Overlapping launches need 9.0. On newer devices products of few and of many rows use different matrix instructions,
    whose bits were never compared, so nothing is guaranteed there."""
    version = ".".join(map(str, capability))
    if capability < (9, 0):
        raise StartupError(f"--device cuda: compute capability 9.0 (H100, H200) is needed; this device has {version}")
    if deterministic and capability != (9, 0):
        raise StartupError(
            f"--deterministic was shown to be exact on compute capability 9.0 (H100, H200), and this device has {version}; "
            "start with --no-deterministic"
        )
