"""Compiles all kernels of a model's steps in several processes, while the worker is still loading the weights.

Each process has a model of the same shape with one layer of each kind, runs steps of every size without launching
anything, and compiles its share into Triton's cache. A stamp file there marks the work as done, so that later starts
skip it. The worker itself compiles kernels that are missing, because a process failed or was too slow, when it needs
them.

    python -m onward.worker.cuda.kernel_precompile PART OF   the model and the worker's config as JSON on standard input
"""

import contextlib
import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import msgspec

from onward import log
from onward.config import WorkerConfig, set_triton_cache
from onward.models.fingerprint import gpu_model, has_gpu
from onward.proto.model import ModelConfig, PreparedModel

MAX_PROCESSES = 12
LIMIT_S = 60.0

logger = logging.getLogger(__name__)


class _CompileTask(msgspec.Struct, frozen=True):
    model: PreparedModel
    config: WorkerConfig


class KernelPrecompilation:
    """The processes that compile. They start on creation, unless the stamp exists; `wait` waits for their end."""

    def __init__(self, model: PreparedModel, config: WorkerConfig) -> None:
        self._stamp = set_triton_cache() / f"onward-{_identity(model, config)}"
        self._processes: list[subprocess.Popen[bytes]] = []
        if self._stamp.exists() or not has_gpu():
            return
        task = msgspec.json.encode(
            _CompileTask(_smallest(model), replace(config, num_kv_blocks=2, max_num_batched_tokens=512))
        )
        count = max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0)) - 2))
        for part in range(count):
            self._processes.append(_start([str(part), str(count)], task))

    def wait(self) -> None:
        """Waits until all processes have ended. Their memory on the device is free afterwards."""
        if not self._processes:
            return
        exit_codes = [_ended(process) for process in self._processes]
        self._processes.clear()
        if any(exit_codes):
            logger.warning(log.event("kernels are compiled later", exit_codes=exit_codes))
            return
        with contextlib.suppress(OSError):  # then the next start tries again
            self._stamp.parent.mkdir(parents=True, exist_ok=True)
            self._stamp.touch()

    def stop(self) -> None:
        """Kills the processes, which are not needed any more."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()


def _start(arguments: Sequence[str], task: bytes) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "onward.worker.cuda.kernel_precompile", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdin is not None, "standard input of the process is a pipe"
    process.stdin.write(task)
    process.stdin.close()
    return process


def _ended(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def layers_of_each_kind(config: ModelConfig) -> ModelConfig:
    """Returns the same model with one layer of each kind, which is enough to use all of its kernels."""
    kinds = tuple(dict.fromkeys(config.layers))
    return msgspec.structs.replace(config, num_layers=max(1, len(kinds)), layers=kinds)


def _smallest(model: PreparedModel) -> PreparedModel:
    config = msgspec.structs.replace(layers_of_each_kind(model.config), tie_word_embeddings=True)
    return msgspec.structs.replace(model, config=config, weights=[])


def _identity(model: PreparedModel, config: WorkerConfig) -> str:
    """Returns a hash of everything that decides which kernels the model needs."""
    digest = hashlib.sha256()
    sources = Path(__file__).parents[2] / "kernels" / "triton"
    for path in sorted(sources.glob("*.py")):
        digest.update(path.read_bytes())
    inputs = (
        layers_of_each_kind(model.config), model.dtype, model.quantization, config.max_num_seqs, config.block_size,
        config.max_model_len, config.deterministic, metadata.version("torch"), gpu_model(),
    )  # fmt: skip
    digest.update(msgspec.json.encode(inputs))
    return digest.hexdigest()[:24]


def main() -> None:
    part, num_parts = map(int, sys.argv[1:])
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=_CompileTask)
    set_triton_cache()
    from onward.kernels.triton.kernel_launch import compile_share
    from onward.kernels.triton.triton_ops import TritonOps
    from onward.worker.cuda.torch_device import TorchDevice
    from onward.worker.kv_memory_budget import resolve_max_model_len
    from onward.worker.model_runner import ModelRunner

    max_model_len = resolve_max_model_len(task.config, task.model.config)
    ops = TritonOps(max_model_len=max_model_len, fixed_order=task.config.deterministic)
    with compile_share(part, num_parts):
        device = TorchDevice(task.model, task.config, None, ops=ops, is_rehearsal=True)
        ModelRunner(task.model, task.config, device).run_dummy_steps(device.rehearsal_steps())


if __name__ == "__main__":
    main()
