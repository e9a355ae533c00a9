"""Loads a model's weights onto a device: from mapped files through pinned memory, several pieces at once; or random
ones.

Tensors are copied straight to their place in a fused matrix. They are transferred in the type in which they are stored,
and converted on the device.
"""

import queue
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from onward.models.layers.device.model_weights import ModelWeights, allocate, checkpoint_targets, norm_weights
from onward.models.layers.device.weights_layout import tensors_of
from onward.proto.model import PreparedModel

_PIECE_BYTES = 32 << 20
_NUM_PIECES = 12
"""Pieces that are copied at once, each through pinned memory of its own."""


def load_device_weights(
    model: PreparedModel, weights: Mapping[str, Any] | None, dtype: torch.dtype, device: str
) -> ModelWeights:
    model_weights = allocate(model.config, dtype, device)
    fill_device_weights(model_weights, model, weights, device)
    if model.quantization == "fp8":
        model_weights.quantize_to_fp8()
        if device != "cpu":
            torch.cuda.empty_cache()  # else the memory of the unquantized weights counts as used when the pool is measured
    return model_weights


def copy_device_weights(source: ModelWeights, target: ModelWeights) -> None:
    for tensor, copied in zip(tensors_of(target), tensors_of(source), strict=True):
        tensor.copy_(copied)


def fill_device_weights(
    model_weights: ModelWeights, model: PreparedModel, weights: Mapping[str, Any] | None, device: str
) -> None:
    targets = checkpoint_targets(model_weights, model.config)
    offset = model.config.norm_weight_offset
    if weights is None:
        _fill_randomly(targets, 1.0 - offset)
    elif device == "cpu":
        for name, target in targets:
            target.copy_(_source(name, weights, target))
    else:
        _copy_all([(_source(name, weights, target), target) for name, target in targets], device)
    if offset:
        for weight in norm_weights(model_weights):
            weight.add_(offset)


def as_tensor(array: Any) -> torch.Tensor:
    """Returns the array as a tensor, without a copy unless its memory is read-only."""
    if isinstance(array, torch.Tensor):
        return array
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _source(name: str, weights: Mapping[str, Any], target: torch.Tensor) -> torch.Tensor:
    """Returns the tensor for a target. Norms of single heads have no weights for padding (`models.head_padding`)."""
    source = as_tensor(weights[name])
    return source[: len(target)] if name.endswith(("q_norm.weight", "k_norm.weight")) else source


def _fill_randomly(targets: Iterable[tuple[str, torch.Tensor]], norm_weight: float) -> None:
    """Fills tensors with random values of a size that keeps activations near one, so that logits have some spread."""
    for number, (name, target) in enumerate(targets):
        generator = torch.Generator(target.device).manual_seed(number)
        if name.endswith("norm.weight"):
            target.fill_(norm_weight)
        else:
            target.normal_(std=target.shape[-1] ** -0.5, generator=generator)


def _copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]], device: str) -> None:
    buffers: queue.Queue[torch.Tensor] = queue.Queue()
    for _ in range(_NUM_PIECES):
        buffers.put(torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True))

    def copy(chunk: tuple[torch.Tensor, torch.Tensor]) -> None:
        source, target = chunk
        buffer = buffers.get()
        pinned = buffer[: source.nbytes]
        np.copyto(pinned.numpy(), source.view(torch.uint8).numpy())
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            staged = pinned.view(source.dtype)
            is_as_stored = source.dtype == target.dtype
            target.copy_(staged if is_as_stored else staged.to(device, non_blocking=True), non_blocking=True)
        stream.synchronize()
        buffers.put(buffer)

    with ThreadPoolExecutor(_NUM_PIECES) as threads:
        for _ in threads.map(copy, (chunk for pair in pairs for chunk in _chunks(*pair))):
            pass


def _chunks(source: torch.Tensor, target: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    count = _PIECE_BYTES // source.element_size()
    return zip(source.contiguous().view(-1).split(count), target.view(-1).split(count), strict=True)
