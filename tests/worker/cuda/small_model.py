"""A small random model on every device: the CPU, and torch with plain operations or on a real device."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from onward.config import WorkerConfig
from onward.kernels.ops import Ops
from onward.kernels.torch_ops import TorchOps
from onward.models.tensor_names import expected_tensors
from onward.proto.model import ModelConfig, PreparedModel
from onward.sim import vocabulary
from onward.worker.cuda.torch_device import TorchDevice
from onward.worker.logits_processors.mask_executor import MaskExecutor
from onward.worker.model_runner import ModelRunner
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
        quantization: str = "none", weights: Mapping[str, Any] | None = None, model: PreparedModel | None = None,
        masks: MaskExecutor | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        self.config = WorkerConfig(**(SETTINGS | settings), device="cuda")
        model = model or prepared(config, dtype=dtype, quantization=quantization)
        weights = random_weights(config) if weights is None else weights
        ops = ops or TorchOps()
        self.torch_device = TorchDevice(model, self.config, weights, ops=ops, device=device)
        self._open(ModelRunner(model, self.config, self.torch_device, masks))

    def rehearse(self) -> None:
        """Steps of every size and kind."""
        self.runner.run_dummy_steps(self.torch_device.rehearsal_steps())


def cpu_driver(config: ModelConfig = CONFIG, **settings: Any) -> Driver:
    return Driver(prepared(config), random_weights(config), **(SETTINGS | settings))


SPOKEN = msgspec.structs.replace(CONFIG, vocab_size=len(vocabulary.token_bytes()))
"""Speaks the simulator's vocabulary, so that its outputs are text."""


@contextmanager
def spoken_model() -> Iterator[PreparedModel]:
    """While its tokenizer's file is there."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(vocabulary.model_text().tokenizer or "", encoding="utf-8")
        yield msgspec.structs.replace(prepared(SPOKEN), folder=folder, tokenizer="tokenizer.json")


def spoken_driver(masks: MaskExecutor | None = None, **settings: Any) -> DeviceDriver:
    with spoken_model() as model:
        driver = DeviceDriver(SPOKEN, model=model, masks=masks, **settings)
        driver.runner._grammar_compiler.get()  # reads the file
        return driver


def spoken_cpu_driver(masks: MaskExecutor | None = None) -> Driver:
    with spoken_model() as model:
        driver = Driver(model, random_weights(SPOKEN), masks, **SETTINGS)
        driver.runner._grammar_compiler.get()
        return driver
