"""Weights and KV pool of a device in memory that outlives the worker, on the host: a second worker attaches both, reads no
checkpoint, and writes no block that the engine may hand out."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch

from onward.config import WorkerConfig
from onward.kernels.torch_ops import TorchOps
from onward.models.layers.device.weights_layout import WeightsLayout
from onward.proto.control import DeviceKvAllocated, DeviceWeightsLoaded, KeptWeights
from onward.proto.model import ModelConfig
from onward.worker.cuda import torch_device
from onward.worker.cuda.kept_device_memory import DamagedWeights, KeptDeviceMemory
from onward.worker.cuda.shared_regions import HostRegions, checksum
from onward.worker.cuda.torch_device import TorchDevice
from onward.worker.kept_memory import KeptMemory
from onward.worker.model_runner import ModelRunner
from tests.worker.cuda.small_model import CONFIG, SETTINGS, DeviceDriver, random_weights
from tests.worker.driver import Driver, prepared

PROMPT = list(range(3, 70))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases, sinks and a norm's offset": {
        "attention_sinks": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "norm_weight_offset": 0.5,
    },
    "LayerNorm, positions, no gate": {
        "norm": "layer", "norm_bias": True, "learned_positions": True, "gated_mlp": False, "activation": "gelu",
        "qk_norm": False,
    },
    "norms of all heads together, norms behind": {"qk_norm_is_whole": True, "post_norm": True},
    "padded heads": {"head_dim": 20},
}  # fmt: skip
"""Small changes of a Qwen3, which have every kind of tensor between them."""


class Unreadable(Mapping[str, Any]):
    """A checkpoint that must not be read."""

    def __getitem__(self, name: str) -> Any:
        raise AssertionError(f"{name} is read again")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("the checkpoint is read again")

    def __len__(self) -> int:
        return 0


@dataclass
class Owner:
    """Keeps file descriptors as the supervisor does."""

    kept: KeptMemory = field(default_factory=lambda: KeptMemory("memory-1"))
    accepts: bool = True
    num_loads: int = 0

    def take(self, message: DeviceKvAllocated | DeviceWeightsLoaded, fd: int) -> bool:
        if not self.accepts:
            return False
        if isinstance(message, DeviceWeightsLoaded):
            self.num_loads += 1
            self.kept.weights = KeptWeights(os.dup(fd), message.num_bytes, message.checksum, message.layout)
        else:
            assert message.kv_memory == "memory-1"
            self.kept.kv_fd, self.kept.kv_bytes = os.dup(fd), message.num_bytes
        return True

    def for_worker(self) -> KeptMemory:
        """With descriptors of its own, as over a process boundary."""
        weights = self.kept.weights
        if weights is not None:
            weights = msgspec.structs.replace(weights, fd=os.dup(weights.fd))
        kv_fd = os.dup(self.kept.kv_fd) if self.kept.kv_bytes else -1
        return KeptMemory("memory-1", kv_fd, self.kept.kv_bytes, weights, self.take)


class KeptDriver(Driver):
    def __init__(
        self,
        owner: Owner,
        weights: Mapping[str, Any],
        config: ModelConfig = CONFIG,
        quantization: str = "none",
        **settings: Any,
    ) -> None:
        self.config = WorkerConfig(**(SETTINGS | settings), device="cuda")
        self.kept = owner.for_worker()
        model = prepared(config, dtype="float32", quantization=quantization)
        memory = KeptDeviceMemory(self.kept, HostRegions())
        self.torch_device = TorchDevice(model, self.config, weights, ops=TorchOps(), device="cpu", memory=memory)
        runner = ModelRunner(model, self.config, self.torch_device)
        runner.warm_up(lambda message: None)
        self._open(runner)

    def pages(self) -> torch.Tensor:
        """Returns the pages of all layers; the last block is the scratch block."""
        return torch.stack(self.torch_device._decoder._kv)


def logits(driver: Driver) -> bytes:
    """Returns the logits of every token of the prompt, as bytes."""
    return driver.logits(0, PROMPT, [len(PROMPT)]).tobytes()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_second_worker_reads_no_checkpoint_and_has_the_same_logits(variant: str) -> None:
    config, owner = msgspec.structs.replace(CONFIG, **VARIANTS[variant]), Owner()
    alone = DeviceDriver(config)
    first = KeptDriver(owner, random_weights(config), config)
    second = KeptDriver(owner, Unreadable(), config)
    assert logits(alone) == logits(first) == logits(second)
    assert owner.num_loads == 1


def test_quantized_weights_are_kept_as_they_are() -> None:
    owner = Owner()
    alone = DeviceDriver(quantization="fp8")
    first = KeptDriver(owner, random_weights(), quantization="fp8")
    second = KeptDriver(owner, Unreadable(), quantization="fp8")
    assert logits(alone) == logits(first) == logits(second)


@pytest.mark.parametrize("change", [{"layout": ""}, {"layout": "another"}, {"num_bytes": 1 << 12}])
def test_weights_of_another_layout_are_loaded_again_and_do_not_end_the_worker(change: dict[str, Any]) -> None:
    """A server of another version has left them."""
    owner = Owner()
    expected = logits(KeptDriver(owner, random_weights()))
    assert owner.kept.weights is not None
    owner.kept.weights = msgspec.structs.replace(owner.kept.weights, **change)
    assert logits(KeptDriver(owner, random_weights())) == expected
    assert owner.num_loads == 2
    assert logits(KeptDriver(owner, Unreadable())) == expected


def test_the_digest_of_a_layout_depends_on_its_tensors() -> None:
    plain, tall = (
        WeightsLayout(prepared(msgspec.structs.replace(CONFIG, **shape), dtype="float32"), torch.float32)
        for shape in ({}, {"qkv_bias": True})
    )
    again = WeightsLayout(prepared(CONFIG, dtype="float32"), torch.float32)
    half = WeightsLayout(prepared(CONFIG, dtype="float32"), torch.float16)
    assert plain.digest == again.digest
    assert len({plain.digest, tall.digest, half.digest}) == 3


@pytest.mark.parametrize("position", [0, 12_345, -1])
def test_a_worker_does_not_start_with_damaged_weights(position: int) -> None:
    owner = Owner()
    KeptDriver(owner, random_weights())
    assert owner.kept.weights is not None
    memory = HostRegions().attach(os.dup(owner.kept.weights.fd), owner.kept.weights.num_bytes)
    memory[position] ^= 1
    with pytest.raises(DamagedWeights, match=owner.kept.weights.checksum):
        KeptDriver(owner, random_weights())
    assert owner.num_loads == 1, "it writes nothing: another worker may use them"
    memory[position] ^= 1
    KeptDriver(owner, Unreadable())


def test_quantized_weights_need_no_shared_memory_while_the_wide_ones_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may not have room for both."""
    order: list[str] = []
    load, create = torch_device.load_device_weights, HostRegions.create
    monkeypatch.setattr(torch_device, "load_device_weights", lambda *args: order.append("load") or load(*args))
    monkeypatch.setattr(HostRegions, "create", lambda self, size: order.append("create") or create(self, size))
    KeptDriver(Owner(), random_weights(), quantization="fp8")
    assert order == ["load", "create", "create"], "weights, then the pool"


def test_a_second_worker_changes_no_byte_of_a_block_that_may_be_handed_out() -> None:
    owner = Owner()
    first = KeptDriver(owner, random_weights())
    generator = torch.Generator().manual_seed(7)
    for layer in first.torch_device._decoder._kv:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    before = first.pages()
    second = KeptDriver(owner, Unreadable())
    second.runner.run_dummy_steps(second.torch_device.rehearsal_steps())
    after, num_blocks = second.pages(), second.runner.num_blocks
    assert num_blocks == first.runner.num_blocks == SETTINGS["num_kv_blocks"]
    assert torch.equal(after[:, :num_blocks], before[:, :num_blocks])
    assert not torch.equal(after[:, num_blocks:], before[:, num_blocks:]), "dummy steps write the scratch block"


def test_the_number_of_blocks_is_that_of_the_memory() -> None:
    owner = Owner()
    KeptDriver(owner, random_weights(), num_kv_blocks=31)
    assert KeptDriver(owner, Unreadable(), num_kv_blocks=64).runner.num_blocks == 31


def test_memory_that_the_supervisor_did_not_get_is_not_reported_as_kept() -> None:
    """Else the engine would rely on blocks that the next worker does not have."""
    kept = KeptDriver(Owner(accepts=False), random_weights()).kept
    assert kept.reported_name == ""
    assert KeptDriver(Owner(), random_weights()).kept.reported_name == "memory-1"


def test_a_checksum_depends_on_every_word_and_its_place() -> None:
    memory = torch.arange(4096, dtype=torch.int64).view(torch.uint8)
    expected = checksum(memory)
    assert checksum(memory.clone()) == expected
    for position in (0, 7, 100, len(memory) - 1):
        damaged = memory.clone()
        damaged[position] ^= 0x80
        assert checksum(damaged) != expected
    swapped = memory.clone()
    swapped[:8], swapped[8:16] = memory[8:16].clone(), memory[:8].clone()
    assert checksum(swapped) != expected
