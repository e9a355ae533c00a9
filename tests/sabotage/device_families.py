"""Deliberate bugs in how a CUDA worker computes families of models, and the tests that notice each, which run on the host
with plain operations. Triton's kernels have bugs of their own in `tests/kernels/interpreted_kernels.py`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from onward.kernels.ops import AttentionLayer, Scoring
from tests.sabotage.patches import Patches, Sabotage

HOST = "tests/worker/cuda/test_families_on_host.py::test_"
LOGITS = HOST + "logits_of_a_device_are_those_of_transformers_in_any_chunks"
NEWEST = HOST + "logits_of_a_device_are_those_of_the_cpu_where_no_family_is_at_hand"


def _scoring(change: Callable[[Scoring], Mapping[str, Any]]) -> Callable[[Patches], None]:
    """Every layer's attention has other parameters."""

    def apply(patch: Patches) -> None:
        from onward.worker.cuda import torch_device

        def layers(original: Callable, *args: Any) -> list[AttentionLayer]:
            return [
                dataclasses.replace(layer, scoring=dataclasses.replace(layer.scoring, **change(layer.scoring)))
                for layer in original(*args)
            ]

        patch.around(torch_device, "build_attention_layers", layers)

    return apply


def _one_table_for_all_layers(patch: Patches) -> None:
    from onward.worker.cuda import torch_device

    def layers(original: Callable, *args: Any) -> list[AttentionLayer]:
        built = original(*args)
        return [dataclasses.replace(layer, rotary=built[0].rotary) for layer in built]

    patch.around(torch_device, "build_attention_layers", layers)


def _no_offset(patch: Patches) -> None:
    from onward.models.loader import device_weights

    patch.put(device_weights, "norm_weights", lambda weights: iter(()))


def _every_block_is_a_llamas(patch: Patches) -> None:
    from onward.models.layers.device import forward_layers

    patch.put(forward_layers, "has_plain_blocks", lambda config: True)


def _norms_count_padding(patch: Patches) -> None:
    from onward.kernels import torch_reference

    def rms_norm(original: Callable, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return original(x, weight, eps) * (32 / 20) ** 0.5 if x.shape[-1] == 20 else original(x, weight, eps)

    patch.around(torch_reference, "rms_norm", rms_norm)


def _logits_as_they_are(patch: Patches) -> None:
    from onward.kernels.torch_ops import TorchOps

    patch.put(TorchOps, "finish_logits", lambda self, logits, multiplier, softcap: None)


def _history_from_the_first_block(patch: Patches) -> None:
    from onward.kernels import torch_reference

    def history(original: Callable, kv: Any, table: Any, length: int, first: int = 0) -> Any:
        keys, values = original(kv, table, length)
        return keys[first:] + 0 * keys[:1], values[first:] + 0 * values[:1]  # reads a block that may be another's

    patch.around(torch_reference, "history", history)


def _kernels_of_one_kind_of_layer(patch: Patches) -> None:
    import msgspec

    from onward.worker.cuda import kernel_precompile

    def smallest(original: Callable, config: Any) -> Any:
        return msgspec.structs.replace(original(config), num_layers=2, layers=config.layers[:1] * 2)

    patch.around(kernel_precompile, "layers_of_each_kind", smallest)


TABLE = [
    Sabotage(
        "device-window-off-by-one",
        "a layer with a window sees one position too many on a device",
        _scoring(lambda scoring: {"window": scoring.window and scoring.window + 1}),
        [LOGITS + "[mistral]", LOGITS + "[gemma2]"],
    ),
    Sabotage(
        "device-softcap-missing",
        "scores are not capped on a device",
        _scoring(lambda _: {"softcap": None}),
        [LOGITS + "[gemma2]"],
    ),
    Sabotage(
        "device-sinks-missing",
        "attention sinks do not take part in the softmax on a device",
        _scoring(lambda _: {"sinks": None}),
        [NEWEST + "[sinks]"],
    ),
    Sabotage(
        "device-query-scale-missing",
        "scores are divided by the root of the head's size on a device, whatever the model says",
        _scoring(lambda _: {"scale": 16**-0.5}),
        [LOGITS + "[granite]", LOGITS + "[gemma3]"],
    ),
    Sabotage(
        "device-one-rope-for-all-layers",
        "all layers are rotated like the first one on a device",
        _one_table_for_all_layers,
        [LOGITS + "[gemma3]", LOGITS + "[smollm3]"],
    ),
    Sabotage(
        "device-norm-offset-missing",
        "the weights of Gemma's norms lack the one that is added to them on a device",
        _no_offset,
        [LOGITS + "[gemma]", LOGITS + "[gemma3]"],
    ),
    Sabotage(
        "device-blocks-of-a-llama",
        "norms behind products, multipliers and whole norms of q and k are left out on a device",
        _every_block_is_a_llamas,
        [LOGITS + "[granite]", LOGITS + "[gemma2]"],
    ),
    Sabotage(
        "device-head-norm-counts-padding",
        "the norm of a padded head is of its padding, too",
        _norms_count_padding,
        [NEWEST + "[padded-head-norms]"],
    ),
    Sabotage(
        "device-logits-unfinished",
        "logits are neither multiplied nor capped on a device",
        _logits_as_they_are,
        [LOGITS + "[gemma2]", LOGITS + "[granite]"],
    ),
    Sabotage(
        "device-reads-before-the-window",
        "attention reads blocks that lie before the window on a device",
        _history_from_the_first_block,
        [HOST + "blocks_before_a_window_are_not_read"],
    ),
    Sabotage(
        "kernels-of-one-kind-of-layer",
        "kernels of layers that differ from the first one are compiled while requests wait",
        _kernels_of_one_kind_of_layer,
        [
            "tests/worker/cuda/test_kernels_are_rehearsed.py::"
            "test_a_model_with_a_layer_of_each_kind_has_all_kernels_of_the_model"
        ],
    ),
]
