"""Deliberate bugs in how families of models are read and computed, and the tests that notice each. Kernels are broken as in
`exactness`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from onward.engine.request import Request
from onward.engine.scheduling.slot_and_block_allocator import SlotAndBlockAllocator
from onward.models import device_support
from onward.models.families import registry
from onward.models.families.config_fields import ConfigFields
from onward.models.head_padding import PaddedTensors
from onward.proto.model import LongRope, ModelConfig, RopeScaling
from tests.sabotage.exactness import compile_anew
from tests.sabotage.patches import Patches, Sabotage

DECODERS = "tests/models/test_family_decoders.py::test_"
LOGITS = DECODERS + "logits_are_those_of_transformers_in_any_chunks"
GREEDY = DECODERS + "greedy_tokens_are_those_of_transformers"
CONFIGS = "tests/models/test_family_configs.py::test_"
FREED = "tests/engine/test_attention_window.py::test_"
KERNEL = "tests/kernels/test_attention.py::test_"


def _a_window_that_is_one_longer(patch: Patches) -> None:
    from onward.kernels.cpu import attention, int8_attention
    from onward.kernels.cpu.jit import inlined_kernel_function

    def first_visible(position, window):
        return max(0, position - window) if window > 0 else 0

    compile_anew(patch)
    for module in (attention, int8_attention):
        patch.put(module, "first_visible", inlined_kernel_function(first_visible))


def _every_block_is_read(patch: Patches) -> None:
    from onward.kernels.cpu import attention, int8_attention
    from onward.kernels.cpu.jit import inlined_kernel_function

    def first_visible(position, window):
        return 0

    compile_anew(patch)
    for module in (attention, int8_attention):
        patch.put(module, "first_visible", inlined_kernel_function(first_visible))


def _factors_by_the_first_length(patch: Patches) -> None:
    def factors(original: Callable, scaling: RopeScaling | None, theta: float, dim: int, max_model_len: int) -> Any:
        return original(scaling, theta, dim, 1 if isinstance(scaling, LongRope) else max_model_len)

    from onward.models.layers import rotary_table

    patch.around(rotary_table, "rope_factors", factors)


def _no_choice_in_the_layout(patch: Patches) -> None:
    from onward.worker import cpu_device

    patch.put(cpu_device, "length_choice", lambda scaling, max_model_len: "")


def _unknown_fields_are_passed_over(patch: Patches) -> None:
    patch.put(ConfigFields, "refuse_unread", lambda self, architecture: None)


def _every_field_is_supported(patch: Patches) -> None:
    patch.put(device_support, "needed_fields", lambda config: [])


def _norms_without_their_offset(patch: Patches) -> None:
    from onward.kernels import quantize

    def offset(weight: np.ndarray, config: ModelConfig) -> np.ndarray:
        return weight

    patch.put(quantize, "_offset", offset)


def _padding_between_the_halves(patch: Patches) -> None:
    def padded(original: Callable, self: PaddedTensors, array: Any) -> Any:
        """Zeros in front of each head instead of behind it."""
        result = original(self, array)
        by_head = result.reshape(-1, self._head_dim, *result.shape[1:])
        return np.roll(by_head, self._head_dim - self._config.head_dim, axis=1).reshape(result.shape)

    patch.around(PaddedTensors, "_padded", padded)


def _a_parallel_block_one_after_the_other(patch: Patches) -> None:
    family = registry.BY_HF_NAME["GPTNeoXForCausalLM"]
    changed = dataclasses.replace(family, parse=lambda fields: family.parse(fields) | {"parallel_block": False})
    patch.put(registry, "BY_HF_NAME", registry.BY_HF_NAME | {family.hf_name: changed})


def _blocks_freed_within_the_window(patch: Patches) -> None:
    def free(original: Callable, self: SlotAndBlockAllocator, request: Request) -> None:
        window, self.attention_window = self.attention_window, self.attention_window and 1
        original(self, request)
        self.attention_window = window

    patch.around(SlotAndBlockAllocator, "free_blocks_before_window", free)


def _blocks_before_the_window_kept(patch: Patches) -> None:
    patch.put(SlotAndBlockAllocator, "free_blocks_before_window", lambda self, request: None)


def _freed_blocks_released_again(patch: Patches) -> None:
    patch.put(Request, "held_block_ids", property(lambda self: self.block_ids))


TABLE = [
    Sabotage(
        "window-blocks-freed-early",
        "blocks that a window still reaches are given to other requests",
        _blocks_freed_within_the_window,
        [FREED + "a_preempted_request_and_one_whose_worker_died_go_on_with_the_same_tokens"],
    ),
    Sabotage(
        "window-blocks-kept",
        "blocks that no layer reads any more stay with their request",
        _blocks_before_the_window_kept,
        [FREED + "requests_that_are_longer_than_the_pool_together_run_without_preemption[True-True]"],
    ),
    Sabotage(
        "window-blocks-released-twice",
        "a request that ends gives up blocks that it gave up before",
        _freed_blocks_released_again,
        [FREED + "requests_that_are_longer_than_the_pool_together_run_without_preemption[False-False]"],
    ),
    Sabotage(
        "window-off-by-one",
        "a layer with a window sees one position too many",
        _a_window_that_is_one_longer,
        [LOGITS + "[mistral]", LOGITS + "[gemma2]"],
    ),
    Sabotage(
        "window-reads-freed-blocks",
        "attention reads blocks that lie before the window",
        _every_block_is_read,
        [f"{KERNEL}blocks_before_the_window_are_not_read[{kv}-8]" for kv in ("float32", "int8")],
    ),
    Sabotage(
        "longrope-by-request",
        "the factors of longrope are those of a short text, whatever --max-model-len says",
        _factors_by_the_first_length,
        [LOGITS + "[phi3]", GREEDY + "[phi3]"],
    ),
    Sabotage(
        "kv-layout-without-rope-choice",
        "two instances that chose other rope factors exchange KV",
        _no_choice_in_the_layout,
        [DECODERS + "kv_passes_only_between_instances_that_chose_the_same_rope_factors"],
    ),
    Sabotage(
        "config-fields-passed-over",
        "a field of config.json that no family knows is ignored",
        _unknown_fields_are_passed_over,
        [CONFIGS + "a_field_that_no_family_knows_is_refused_by_its_name[llama]"],
    ),
    Sabotage(
        "device-takes-every-model",
        "a device computes models whose fields it does not implement",
        _every_field_is_supported,
        [CONFIGS + "a_draft_layer_of_another_kind_is_refused_by_the_name_of_the_field"],
    ),
    Sabotage(
        "int8-norms-without-offset",
        "the int8 weights of Gemma's norms lack the one that is added to them",
        _norms_without_their_offset,
        [DECODERS + "int8_stays_close_to_float32[gemma]"],
    ),
    Sabotage(
        "heads-padded-in-front",
        "the zeros that fill up a head come before its values, where rope rotates",
        _padding_between_the_halves,
        [LOGITS + "[llama-odd-head]"],
    ),
    Sabotage(
        "parallel-block-in-a-row",
        "the MLP of a parallel block reads what attention has added",
        _a_parallel_block_one_after_the_other,
        [LOGITS + "[gptneox]"],
    ),
]
