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
from onward.proto.model import Experts, LayerKind, LongRope, ModelConfig, RopeScaling
from tests.sabotage.exactness import compile_anew
from tests.sabotage.patches import Patches, Sabotage

DECODERS = "tests/models/test_family_decoders.py::test_"
LOGITS = DECODERS + "logits_are_those_of_transformers_in_any_chunks"
GREEDY = DECODERS + "greedy_tokens_are_those_of_transformers"
CONFIGS = "tests/models/test_family_configs.py::test_"
FREED = "tests/engine/test_attention_window.py::test_"
KERNEL = "tests/kernels/test_attention.py::test_"
EXPERTS = "tests/models/test_experts.py::test_"
TIES = EXPERTS + "of_equal_scores_the_experts_with_the_lowest_index_are_chosen_and_the_others_do_not_count"
STORED_EXPERTS = "tests/models/test_expert_checkpoints.py::test_"
EXACT = "tests/worker/test_exact_int8.py::test_no_element_of_the_logits_differs_in_any_family_of_models"


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

    patch.around(PaddedTensors, "padded", padded)


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


def _ties_to_the_highest_index(patch: Patches) -> None:
    import torch

    from onward.models.layers import float_mlp
    from onward.models.layers.device import expert_layers

    def choose(
        original: Callable, scores: torch.Tensor, experts: Experts, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, shares = original(scores.flip(-1), experts, None if bias is None else bias.flip(-1))
        return scores.shape[1] - 1 - chosen, shares

    for module in (float_mlp, expert_layers):
        patch.around(module, "choose_experts", choose)


def _ties_to_the_highest_index_in_int8(patch: Patches) -> None:
    from onward.kernels.cpu import int8_experts, simd
    from onward.kernels.cpu.jit import inlined_kernel_function

    def flip(scores, at, count):
        """Scores that grow with the index by the last bit."""
        for expert in range(count):
            scores[at + expert] = scores[at + expert] + np.float32(expert) * np.float32(1e-6)

    flipped, choose = inlined_kernel_function(flip), int8_experts._choose_experts

    def choose_experts(c, row):
        flipped(simd.floats(c.scores), row * c.score_stride, c.num_experts)
        choose(c, row)

    compile_anew(patch)
    patch.put(int8_experts, "_choose_experts", inlined_kernel_function(choose_experts))


def _a_sum_in_the_order_of_the_batch(patch: Patches) -> None:
    from onward.kernels.cpu import int8_experts, simd
    from onward.kernels.cpu.jit import inlined_kernel_function

    choose = int8_experts._choose_experts

    def choose_experts(c, row):
        """The first two experts of rows with an odd index change places."""
        choose(c, row)
        chosen, shares, first = simd.int32s(c.chosen), simd.floats(c.shares), row * c.top_k
        if row % 2 == 1:
            chosen[first], chosen[first + 1] = chosen[first + 1], chosen[first]
            shares[first], shares[first + 1] = shares[first + 1], shares[first]

    compile_anew(patch)
    patch.put(int8_experts, "_choose_experts", inlined_kernel_function(choose_experts))


def _weights_of_experts_not_renormalized(patch: Patches) -> None:
    from onward.models.layers import float_mlp

    def choose(original: Callable, scores: Any, experts: Experts, bias: Any) -> Any:
        return original(scores, Experts(experts.num_experts, experts.top_k, experts.intermediate_size), bias)

    patch.around(float_mlp, "choose_experts", choose)


def _dense_layers_with_experts(patch: Patches) -> None:
    from onward.models.families import qwen_moe

    def ignore(fields: ConfigFields, kinds: tuple[LayerKind, ...], num_layers: int) -> tuple[LayerKind, ...]:
        fields.ignore("mlp_only_layers", "decoder_sparse_step")
        return kinds

    patch.put(qwen_moe, "_with_dense_layers", ignore)


def _halves_of_a_byte_swapped(patch: Patches) -> None:
    from onward.models.families import gpt_oss

    def swapped(original: Callable, blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
        return original(blocks << 4 | blocks >> 4, scales)

    patch.around(gpt_oss, "dequantize", swapped)


def _experts_of_a_file_in_the_wrong_order(patch: Patches) -> None:
    from onward.models.loader import gguf_file

    def tensors(original: Callable, info: Any, num_bytes: int, num_experts: int) -> Any:
        found = list(original(info, num_bytes, num_experts))
        return [(name, location) for (name, _), (_, location) in zip(found, reversed(found), strict=True)]

    patch.around(gguf_file, "canonical_tensors", tensors)


def _blocks_of_mxfp4_in_the_stored_order(patch: Patches) -> None:
    from onward.models.families import gpt_oss

    def blocks(blocks: np.ndarray, scales: np.ndarray) -> tuple[str, np.ndarray]:
        rows = np.concatenate([scales[..., None], blocks], axis=-1)
        return "MXFP4", rows.reshape(len(rows), -1)

    patch.put(gpt_oss, "kernel_blocks", blocks)


def _experts_of_every_group(patch: Patches) -> None:
    from onward.models.layers import expert_routing

    patch.put(expert_routing, "_in_best_groups", lambda ranks, experts: ranks)


def _a_selection_bias_in_the_weights(patch: Patches) -> None:
    from onward.models.layers import expert_routing

    def choose(original: Callable, scores: Any, experts: Experts, bias: Any) -> Any:
        return original(scores if bias is None else scores + bias, experts, None)

    patch.around(expert_routing, "_choose_by_sigmoid", choose)


def _experts_on_cuda(patch: Patches) -> None:
    patch.put(device_support, "IMPLEMENTED", device_support.IMPLEMENTED | {"cuda": device_support.IMPLEMENTED["torch"]})


TABLE = [
    Sabotage(
        "experts-ties-to-the-last",
        "of experts with equal scores, those with the highest index are chosen",
        _ties_to_the_highest_index,
        [f"{TIES}[cpu float]", f"{TIES}[torch]"],
    ),
    Sabotage(
        "experts-ties-to-the-last-in-int8",
        "of experts with equal scores, int8 kernels choose those with the highest index",
        _ties_to_the_highest_index_in_int8,
        [f"{TIES}[cpu int8]"],
    ),
    Sabotage(
        "expert-sum-by-batch",
        "a row's expert outputs are added in an order that follows from its place in the batch",
        _a_sum_in_the_order_of_the_batch,
        [f"{EXACT}[experts]"],
    ),
    Sabotage(
        "experts-not-renormalized",
        "the weights of the chosen experts are those of the softmax over all",
        _weights_of_experts_not_renormalized,
        [LOGITS + "[mixtral]", LOGITS + "[qwen3moe]"],
    ),
    Sabotage(
        "experts-in-dense-layers",
        "mlp_only_layers and decoder_sparse_step are passed over",
        _dense_layers_with_experts,
        [
            CONFIGS + f"a_config_becomes_the_data_that_its_family_stands_for[{name}]"
            for name in ("qwen2moe", "qwen3moe-step")
        ],
    ),
    Sabotage(
        "mxfp4-halves-swapped",
        "the two values of a byte of MXFP4 are swapped",
        _halves_of_a_byte_swapped,
        [STORED_EXPERTS + "a_checkpoint_in_mxfp4_has_the_logits_of_transformers"],
    ),
    Sabotage(
        "gguf-experts-reversed",
        "the experts of a GGUF file's fused tensor are read in reverse order",
        _experts_of_a_file_in_the_wrong_order,
        ["tests/models/test_gguf_experts.py::test_every_tensor_and_field_of_each_architecture_comes_back[qwen3moe]"],
    ),
    Sabotage(
        "mxfp4-blocks-as-stored",
        "the codes of gpt-oss's MXFP4 get to the kernels in the order in which they are stored",
        _blocks_of_mxfp4_in_the_stored_order,
        [STORED_EXPERTS + "experts_in_mxfp4_keep_their_bits_on_the_cpu"],
    ),
    Sabotage(
        "experts-of-every-group",
        "experts are chosen from all groups",
        _experts_of_every_group,
        [LOGITS + "[glm4moe]"],
    ),
    Sabotage(
        "selection-bias-in-weights",
        "the selection bias of experts is a part of their weights",
        _a_selection_bias_in_the_weights,
        [LOGITS + "[glm4moe]", LOGITS + "[glm4moe-plain]"],
    ),
    Sabotage(
        "experts-on-cuda",
        "a CUDA device takes models with experts, whose operations cannot be captured in a graph",
        _experts_on_cuda,
        [EXPERTS + "what_a_device_does_not_compute_is_refused_by_name[cuda-change0-experts]"],
    ),
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
