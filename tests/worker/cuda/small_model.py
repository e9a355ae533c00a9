"""A small random model on both runners: the CPU's, and the device's with plain operations or on a real device."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onward.config import WorkerConfig
from onward.kernels.ops import Ops
from onward.kernels.torch_ops import TorchOps
from onward.models.names import expected_tensors
from onward.proto.model import ModelConfig
from onward.proto.step import StepPlan, StepResult
from onward.worker.cuda.runner import CudaRunner
from tests.worker.driver import Driver, prepared

CONFIG = ModelConfig(
    architecture="qwen3", vocab_size=199, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=32, max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=10_000.0,
    tie_word_embeddings=False, qk_norm=True,
)  # fmt: skip
SETTINGS: dict[str, Any] = {
    "num_kv_blocks": 64, "max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 96, "block_size": 16,
}  # fmt: skip


def random_weights(config: ModelConfig = CONFIG) -> Mapping[str, np.ndarray]:
    """Large enough that logits differ by more than rounding does."""
    generator = np.random.default_rng(11)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        values = generator.standard_normal(shape, dtype=np.float32)
        tensors[name] = (
            1 + 0.2 * values if name.endswith("norm.weight") else values * np.float32(1.5 * shape[-1] ** -0.5)
        )
    return tensors


class DeviceDriver(Driver):
    """Drives a device's runner as `Driver` drives the CPU's."""

    def __init__(
        self, config: ModelConfig = CONFIG, *, ops: Ops | None = None, device: str = "cpu", dtype: str = "float32",
        quantization: str = "none", weights: Mapping[str, Any] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        self.config = WorkerConfig(**(SETTINGS | settings), device="cuda")
        model = prepared(config, dtype=dtype, quantization=quantization)
        weights = random_weights(config) if weights is None else weights
        self._open(CudaRunner(model, self.config, weights, ops=ops or TorchOps(), device=device))

    def logits(self, slot: int, token_ids: Sequence[int], chunks: Sequence[int]) -> np.ndarray:
        assert sum(chunks) == len(token_ids)
        request = self.assign(slot, token_ids)
        self.step(assign=[request])
        parts, start = [], 0
        for count in chunks:
            parts.append(self.runner.logits_of(slot, start, count).float().cpu().numpy())
            start += count
        self.give_back(request.block_ids)
        return np.concatenate(parts)

    def overlapped(self, plans: Sequence[StepPlan], depth: int = 2) -> list[StepResult]:
        """All plans, with so many steps in flight."""
        results: list[StepResult] = []
        for plan in plans:
            while self.num_in_flight >= depth:
                results.append(self._finished())
            self.runner.begin(plan)
            self.num_in_flight += 1
        while self.num_in_flight:
            results.append(self._finished())
        return results

    num_in_flight = 0

    def _finished(self) -> StepResult:
        result = self.runner.finish()
        assert result is not None
        self.num_in_flight -= 1
        return result


def cpu_driver(config: ModelConfig = CONFIG, **settings: Any) -> Driver:
    return Driver(prepared(config), random_weights(config), **(SETTINGS | settings))
