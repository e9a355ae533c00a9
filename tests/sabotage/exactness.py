"""Deliberate bugs in the order of operations, and the tests that notice each: what a row gives would depend on the step
that computes it, on the batch, on the plan of a GPU kernel, or on the SIMD level of the machine.

A kernel is broken before it is compiled: numba looks names up in their module when it compiles what uses them. It is then
compiled in every run and never written to the cache, where a healthy run would find it. Rows about SIMD levels break this
process only; the child of another level that it is compared with is whole. Rows about GPU kernels need no device: the
compiled code is read. Triton also looks names up when it compiles.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.sabotage.patches import Patches, Sabotage

LOGITS = "tests/worker/test_exact_int8.py::test_no_element_of_the_logits_differs_"
TILE = "tests/kernels/test_int8_tile.py::test_a_product_has_the_bits_of_its_reference_in_any_company"
ANY_PATH = LOGITS + "on_any_path_for_any_shape_of_head"
WHOLE_CONTEXT = LOGITS + "up_to_the_end_of_the_context"
LEVELS = "tests/kernels/test_cpu_exactness.py::test_no_element_that_any_kernel_gives_differs_on_a_forced_level[plain]"
SAMPLING = "tests/worker/test_exact_sampling.py::"
BATCH = SAMPLING + "test_a_batch_of_every_kind_of_sampling_gives_each_request_what_it_gets_alone"
RESUMED = SAMPLING + "test_requests_that_are_resumed_in_a_batch_go_on_with_the_same_tokens_and_logprobs"
COMPILED = "tests/kernels/test_compiled_order.py::test_"
SCORED = SAMPLING + "test_an_output_that_is_scored_again_has_the_logprobs_that_were_told_with_its_tokens"


def compile_anew(patch: Patches) -> None:
    import numba

    def cfunc(original: Callable, *args: Any, **options: Any) -> Any:
        return original(*args, **(options | {"cache": False}))

    patch.around(numba, "cfunc", cfunc)


def _softmax_over_the_keys_of_the_tile(patch: Patches) -> None:
    from onward.kernels.cpu import int8_attention, simd
    from onward.kernels.cpu.jit import inlined_kernel_function

    weigh_group = int8_attention._weigh_group

    def softmax(scores, at, num_valid, num_groups, value_scales, scales, scales_at):
        lowest, zero = np.float32(-np.inf), np.float32(0.0)
        filled, groups = (num_valid + 15) // 16, (num_valid + 63) // 64
        tail = at + (filled - 1) * 16
        high = simd.splat(lowest)
        for block in range(filled):  # before the keys behind the row's own are left out
            high = simd.maximum(high, simd.load(scores, at + block * 16))
        simd.store(scores, tail, simd.keep_first(simd.load(scores, tail), num_valid - (filled - 1) * 16, lowest))
        for block in range(filled, groups * 4):
            simd.store(scores, at + block * 16, simd.splat(lowest))
        top, total, weights = simd.splat(simd.max_lanes(high)), simd.splat(zero), simd.as_bytes(scores, at)
        for group in range(groups):
            scale, total = weigh_group(scores, at + group * 64, top, value_scales, group * 64,
                                       weights, group * 64, total)  # fmt: skip
            scales[scales_at + group] = scale
        for group in range(groups, num_groups):
            scales[scales_at + group] = zero
            for i in range(64):
                weights[group * 64 + i] = 0
        return np.float32(1.0) / simd.sum_lanes(total)

    compile_anew(patch)
    patch.put(int8_attention, "_softmax", inlined_kernel_function(softmax))


def _blocks_of_a_decoding_row_in_another_order(patch: Patches) -> None:
    from onward.kernels.cpu import int8_attention
    from onward.kernels.cpu.jit import inlined_kernel_function

    add_values = int8_attention._add_values

    def swapped(pairs, records, first, count, values_at, head_dim, weights, weights_at, step, scales, scales_at,
                scales_step, sums):  # fmt: skip
        """The second group of 64 positions, then the first; both are full where there is a third."""
        shift = 0
        if pairs < 8 and scales_step > 2 and scales_at < 2:
            shift = 1 - 2 * scales_at
        add_values(pairs, records, first + 4 * shift, count, values_at, head_dim, weights, weights_at + 64 * shift, step,
                   scales, scales_at + shift, scales_step, sums)  # fmt: skip

    compile_anew(patch)
    patch.put(int8_attention, "_add_values", inlined_kernel_function(swapped))


def _a_lone_row_s_product_in_another_order(patch: Patches) -> None:
    from onward.kernels.cpu import int8_matmul_tile, weight_kernels

    def in_tile_order(original: Callable, e: Any, rows: Any, headers: Any, groups: Any, group: Any, sums: dict) -> None:
        """A single row's scales are multiplied with each other first."""
        if e.num_rows > 1:
            original(e, rows, headers, groups, group, sums)
            return
        starts = [e.centered(correction) for correction in rows.values("corrections", group)]
        integers = e.group_sums(groups, rows.inputs(group), starts, list(range(8)))
        (input_scale,), (total,) = rows.values("scales", group), rows.values("totals", group)
        for cell, integer in integers.items():
            scale, offset = e.scale_and_offset(headers[cell[1]], groups[cell[1]])
            both = e.b.fmul(scale, int8_matmul_tile.splat_value(e.b, input_scale))
            value = e.b.fmul(e.b.sitofp(integer, int8_matmul_tile.F32X16), both)
            result = e.b.fadd(e.b.load(sums[cell]), value)
            if offset is not None:
                result = e.b.fadd(result, e.b.fmul(offset, int8_matmul_tile.splat_value(e.b, total)))
            e.b.store(result, sums[cell])

    compile_anew(patch)
    patch.around(int8_matmul_tile, "_add_group", in_tile_order)
    weight_kernels.multiply_kernel.cache_clear()


def _halves_of_a_group_in_another_order(patch: Patches) -> None:
    from onward.kernels.cpu import int8_matmul_tile, weight_kernels

    def without_small_scales(original: Callable, e: Any, group: Any) -> Any:
        """A single row's small scales are those of the first half."""
        scales = original(e, group)
        return [scales[0], scales[0]] if e.num_rows == 1 else scales

    compile_anew(patch)
    patch.around(int8_matmul_tile._Emitter, "half_scales", without_small_scales)
    weight_kernels.multiply_kernel.cache_clear()


def _the_first_row_s_norm_in_another_order(patch: Patches) -> None:
    from onward.kernels.cpu import int8_forward, simd
    from onward.kernels.cpu.jit import inlined_kernel_function
    from onward.kernels.cpu.quantized_rows import quantize_group
    from onward.kernels.cpu.rope import mean_square

    def normalize_row(hidden, at, width, weight, eps, target, target_row):
        square = mean_square(hidden, at, width)
        if target_row == 0:
            total = simd.splat(np.float32(0.0))
            for i in range(width - 16, -1, -16):
                v = simd.load(hidden, at + i)
                total = simd.fma(v, v, total)
            square = simd.sum_lanes(total) / np.float32(width)
        inverse = simd.splat(np.float32(1.0) / np.sqrt(square + eps))
        for group in range(width // 32):
            i = group * 32
            low = simd.load(hidden, at + i) * inverse * simd.load(weight, i)
            high = simd.load(hidden, at + i + 16) * inverse * simd.load(weight, i + 16)
            quantize_group(low, high, target, target_row * (width // 32) + group)

    compile_anew(patch)
    patch.put(int8_forward, "_normalize_row", inlined_kernel_function(normalize_row))


def _multiply_and_add_in_two_roundings(patch: Patches) -> None:
    from onward.kernels.cpu import int8_attention_loops, outer_product, simd

    compile_anew(patch)
    for module in (simd, outer_product, int8_attention_loops):
        patch.put(module, "fma_value", lambda builder, a, b, c: builder.fadd(builder.fmul(a, b), c))


def _fold_neighbouring_lanes_first(patch: Patches) -> None:
    from llvmlite import ir

    from onward.kernels.cpu import simd
    from onward.kernels.cpu.llvm_vectors import I32, I32X16, LANES

    def fold(builder: Any, vector: Any, combine: Any) -> Any:
        for width in (1, 2, 4, 8):
            order = ir.Constant(I32X16, [(lane + width) % LANES for lane in range(LANES)])
            vector = combine(vector, builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), order))
        return builder.extract_element(vector, ir.Constant(I32, 0))

    compile_anew(patch)
    patch.put(simd, "_fold", fold)


def _top_p_before_top_k(patch: Patches) -> None:
    from onward.kernels.cpu import sampling
    from onward.kernels.cpu.jit import kernel_function

    cut, drop_below = sampling._cut, sampling._drop_below
    mass_from, token_at = sampling._mass_from, sampling._token_at

    def draw_from(weights, size, top_k, top_p, min_p, number):
        zero = np.float32(0.0)
        if top_p < 1.0:
            drop_below(weights, size, cut(weights, size, 0, top_p * mass_from(weights, size, zero)))
        if top_k > 0:
            drop_below(weights, size, cut(weights, size, top_k, 0.0))
        if min_p > zero:
            drop_below(weights, size, min_p)
        return token_at(weights, size, number * mass_from(weights, size, zero))

    compile_anew(patch)
    patch.put(sampling, "_draw_from", kernel_function(draw_from))


def _noise_of_the_row_in_the_batch(patch: Patches) -> None:
    from onward.worker.sampler import Sampler, SamplingRow

    def take(original: Callable, self: Sampler, row: int, params: SamplingRow) -> None:
        original(self, row, params)
        self._choices[row] += row

    patch.around(Sampler, "_set_row", take)


def _rules_before_logprobs(patch: Patches) -> None:
    from onward.worker.logits_processors.penalties import LogitsProcessor
    from onward.worker.step_sampler import StepSampler

    apply = LogitsProcessor.apply

    def sample(original: Callable, self: StepSampler, logits: np.ndarray, spans: Any, *args: Any) -> Any:
        for row, span in enumerate(spans):
            if span.slot_state.logits_processor is not None:
                apply(span.slot_state.logits_processor, logits[row, : self._vocab_size])
        return original(self, logits, spans, *args)

    patch.put(LogitsProcessor, "apply", lambda self, logits: None)
    patch.around(StepSampler, "sample", sample)


def _sums_of_scored_rows_from_the_last_token(patch: Patches) -> None:
    from onward.worker import cpu_device, token_logprobs

    def with_backward_sum(original: Callable, logits: np.ndarray, token: int, num_top: int) -> Any:
        told = original(logits, token, num_top)
        backwards = token_logprobs._log_sum_exp(logits[::-1].copy())
        return type(told)(float(logits[token]) - backwards, told.rank, told.top)

    patch.around(cpu_device, "token_logprobs", with_backward_sum)


def _numpy_s_logarithm_and_exponential(patch: Patches) -> None:
    from onward.worker import token_logprobs

    def log_sum_exp(logits: np.ndarray) -> float:
        peak = logits.max()
        return float(peak + np.log(np.exp(logits - peak).sum(dtype=np.float64)))

    patch.put(token_logprobs, "_log_sum_exp", log_sum_exp)


def _numpy_s_powers_and_cosines(patch: Patches) -> None:
    from onward.models.layers import rotary_table

    def cos_and_sin(angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.cos(angles.astype(np.float32)), np.sin(angles.astype(np.float32))

    patch.put(rotary_table, "_powers", lambda base, exponents: base**exponents)
    patch.put(rotary_table, "_cos_and_sin", cos_and_sin)


def _one_reduction_over_a_whole_axis(patch: Patches) -> None:
    import triton
    import triton.language as tl

    from onward.kernels.triton import head_rotation, split_softmax

    @triton.jit
    def whole_sum(x, AXIS: tl.constexpr):
        return tl.sum(x, AXIS)

    patch.put(split_softmax, "halving_sum", whole_sum)
    patch.put(head_rotation, "halving_sum", whole_sum)


def _a_mass_of_floating_point_weights(patch: Patches) -> None:
    import triton
    import triton.language as tl

    from onward.kernels.triton import sampling

    @triton.jit
    def mass_of(weights, lowest):
        mass = tl.sum(tl.sum(tl.where(weights >= lowest, weights, 0.0), 1), 0)
        return (mass * 1073741824.0).to(tl.int64)

    patch.put(sampling, "_mass_of", mass_of)


def _contraction_in_decode(patch: Patches) -> None:
    from onward.kernels.triton import decode_attention

    def launch(original: Callable, *args: Any, **options: Any) -> None:
        original(*args, **(options | {"enable_fp_fusion": True}))

    patch.around(decode_attention, "launch", launch)


def _a_norm_with_more_warps_for_few_rows(patch: Patches) -> None:
    from onward.kernels.triton import rms_norm

    def launch(original: Callable, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        original(kernel, grid, *args, **(options | ({"num_warps": 16} if grid[0] < 64 else {})))

    patch.around(rms_norm, "launch", launch)


ON_GPU = [
    Sabotage(
        "gpu-sum-by-layout",
        "attention adds up positions and dimensions in the order in which threads hold them",
        _one_reduction_over_a_whole_axis,
        [
            COMPILED + f"sums_in_attention_have_two_operands_in_every_plan[{heads}]"
            for heads in ("128-2-16", "256-8-16")
        ],
    ),
    Sabotage(
        "gpu-sampling-floats",
        "a mass of weights is added up in floating point when tokens are cut",
        _a_mass_of_floating_point_weights,
        [COMPILED + "sampling_adds_up_integers_only"],
    ),
    Sabotage(
        "gpu-contraction",
        "the compiler fuses multiplications and additions of decode attention as it likes",
        _contraction_in_decode,
        [
            COMPILED + "attention_is_compiled_without_contraction[128-2-16]",
            COMPILED + "every_kernel_of_a_fixed_order_step_is_compiled_without_contraction_or_says_why_it_may",
        ],
    ),
    Sabotage(
        "gpu-norm-by-rows",
        "a norm's warps depend on the number of rows",
        _a_norm_with_more_warps_for_few_rows,
        [COMPILED + f"one_kernel_serves_every_number_of_rows[{norm}]" for norm in ("_norm", "_residual_norm")],
    ),
]
TABLE = [
    *ON_GPU,
    Sabotage(
        "softmax-peak-of-the-tile",
        "attention scales a row's weights by a score that only the rows behind it may see",
        _softmax_over_the_keys_of_the_tile,
        [ANY_PATH + "[64-3]", ANY_PATH + "[256-8]", WHOLE_CONTEXT + "[64-3]"],
    ),
    Sabotage(
        "attention-block-order",
        "attention of a single row adds up its blocks in another order than that of a chunk",
        _blocks_of_a_decoding_row_in_another_order,
        [ANY_PATH + f"[{shape}]" for shape in ("32-1", "64-3", "128-7")] + [WHOLE_CONTEXT + "[64-3]"],
    ),
    Sabotage(
        "product-in-another-order",
        "the scales of a single row's product are multiplied in another order than those of several rows",
        _a_lone_row_s_product_in_another_order,
        [ANY_PATH + "[64-3]", ANY_PATH + "[96-2]", WHOLE_CONTEXT + "[64-3]", TILE + "[avx2-Q5_1]"],
    ),
    Sabotage(
        "halves-of-a-group",
        "a single row's product takes the scale of a group's first half for both halves",
        _halves_of_a_group_in_another_order,
        [TILE + "[avx2-Q6_K]", TILE + "[avx2-Q2_K]"],
    ),
    Sabotage(
        "norm-order-by-row",
        "the squares of a batch's first row are added up in another order than those of the others",
        _the_first_row_s_norm_in_another_order,
        [ANY_PATH + "[64-3]", ANY_PATH + "[32-8]"],
    ),
    Sabotage(
        "fma-in-two-roundings",
        "a fused multiply-add is rounded twice on one SIMD level",
        _multiply_and_add_in_two_roundings,
        [LEVELS],
    ),
    Sabotage(
        "lanes-fold-by-neighbours",
        "the lanes of a vector are added up in the order of narrower registers",
        _fold_neighbouring_lanes_first,
        [LEVELS, "tests/kernels/test_simd.py::test_lanes_fold_in_a_fixed_order"],
    ),
    Sabotage(
        "rotary-by-numpy",
        "frequencies and cosines of positions are those of the CPU's vector instructions",
        _numpy_s_powers_and_cosines,
        [LEVELS],
    ),
    Sabotage(
        "logprobs-by-numpy",
        "logprobs are those of the CPU's vector instructions",
        _numpy_s_logarithm_and_exponential,
        [LEVELS],
    ),
    Sabotage(
        "top-p-before-top-k",
        "the share that top-p keeps is taken of all tokens, and top-k cuts afterwards",
        _top_p_before_top_k,
        [
            "tests/worker/test_sampler.py::test_tokens_are_sampled_as_often_as_they_are_likely"
            "[{'top_k': 30, 'top_p': 0.8, 'min_p': 0.05, 'temperature': 1.5}]"
        ],
    ),
    Sabotage(
        "noise-of-the-row",
        "a request's noise depends on its row in the batch",
        _noise_of_the_row_in_the_batch,
        [BATCH, RESUMED],
    ),
    Sabotage(
        "rules-before-logprobs",
        "logprobs are told after penalties and biases have changed the logits",
        _rules_before_logprobs,
        [SCORED + f"[{kind}]" for kind in ("penalties", "biases")],
    ),
    Sabotage(
        "scored-sums-backwards",
        "logprobs of an output that is scored again are added up in another order than when it was sampled",
        _sums_of_scored_rows_from_the_last_token,
        [SCORED],
    ),
]
