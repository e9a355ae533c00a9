"""Deliberate bugs in how models are found, fetched, kept and described, and the tests that notice."""

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from onward.cli import serve, start_summary
from onward.models import checkpoint_quantization
from onward.models.loader import (
    cached_models,
    cuda_probe,
    gguf_file,
    hf_hub,
    model_store,
    quantized_layout,
    quantized_tensors,
    text_metadata,
    tokenizer_files,
    weight_conversion,
    weights,
)
from onward.models.loader.hf_hub import EarlyChecks
from onward.text import byte_level_bpe, sentencepiece_tokenizer
from onward.text.sentencepiece_model import PieceType
from onward.text.tokenizer import Tokenizer
from onward.text.tokenizer_config import AddedTokenConfig
from tests.sabotage.patches import Patches, Sabotage

PUBLISHED = "tests/models/test_published_checkpoints.py::test_"
SYMMETRIC = PUBLISHED + ("a_symmetric_gptq_checkpoint_has_its_zero_points_in_the_middle_whatever_its_layout_is_called")
DAMAGED = (
    "tests/models/test_damaged_quantization.py::test_tensors_that_do_not_fit_each_other_are_refused_by_file_and_name"
)
INT8_ARRAYS = "tests/models/test_loading.py::test_an_int8_array_of_another_size_is_refused_by_file_and_name"
HUB = "tests/models/test_hub.py::"
MODELS = "tests/cli/test_models.py::"
REFERENCES = "tests/text/test_tokenizer_references.py::"


def _all_files_first(patch: Patches) -> None:
    def fetch_all(original: Callable, self: Any) -> str:
        self._fetch_files(["*.json", "*.safetensors"], self._revision)
        return original(self)

    patch.around(hf_hub._Download, "_fetch_config", fetch_all)


def _tokenizers_after_weights(patch: Patches) -> None:
    def without_check(original: Callable, *args: Any, checks: EarlyChecks | None = None, **named: Any) -> object:
        return original(*args, checks=checks and EarlyChecks(check_config=checks.check_config), **named)

    patch.around(model_store, "resolve_source", without_check)


def _flags_after_weights(patch: Patches) -> None:
    patch.put(model_store, "_check_config", lambda config, kind, max_model_len: None)


def _any_file_name_will_do(patch: Patches) -> None:
    patch.put(hf_hub, "_check_names", lambda names, model_id, with_weights: None)


def _main_for_every_revision(patch: Patches) -> None:
    patch.around(
        hf_hub, "fetch", lambda original, model_id, revision, *rest, **named: original(model_id, "main", *rest, **named)
    )


def _hub_at_every_start(patch: Patches) -> None:
    patch.put(hf_hub, "_is_complete", lambda folder, receipt_path, with_weights: False)


def _tokenizer_built_at_every_start(patch: Patches) -> None:
    patch.put(tokenizer_files, "_key", lambda source: uuid4().hex)


def _high_bits_lost(patch: Patches) -> None:
    from onward.kernels import block_packing

    patch.around(block_packing, "_bits", lambda original, h: original(h) * 0)


def _blocks_quantized_anew(patch: Patches) -> None:
    patch.put(gguf_file.GgufFile, "blocks", {})


def _tables_dequantized(patch: Patches) -> None:
    patch.put(gguf_file, "_UNSUPPORTED_PREFIXES", ("no such type",))


def _zero_points_as_stored(patch: Patches) -> None:
    def without_offset(original: Callable, fields: Any) -> Any:
        return msgspec.structs.replace(original(fields), zeros_minus_one=False)

    patch.around(checkpoint_quantization, "_gptq", without_offset)


def _parts_unchecked(patch: Patches) -> None:
    patch.put(quantized_layout, "_check", lambda location, name, types, shape: None)


def _arrays_unchecked(patch: Patches) -> None:
    patch.put(weights, "check_int8_arrays", lambda found, config, source: None)


def _values_unchecked(patch: Patches) -> None:
    patch.put(weight_conversion, "_FiniteTensors", lambda tensors, source: tensors)


def _symmetry_ignored(patch: Patches) -> None:
    def without_symmetry(original: Callable, fields: Any) -> Any:
        return msgspec.structs.replace(original(fields), is_symmetric=False)

    patch.around(checkpoint_quantization, "_gptq", without_symmetry)


def _awq_in_order(patch: Patches) -> None:
    patch.put(quantized_tensors, "_AWQ_ORDER", tuple(range(8)))


def _cuda_takes_all(patch: Patches) -> None:
    patch.put(model_store, "_check_scheme", lambda scheme, device: None)


def _scales_unchecked(patch: Patches) -> None:
    from onward.kernels import block_packing

    patch.put(block_packing, "_check_finite", lambda scales, tensor: None)


def _device_unasked(patch: Patches) -> None:
    patch.put(cuda_probe, "require_cuda_device", lambda: None)


def _remove_what_is_in_use(patch: Patches) -> None:
    def always_free(folders: Iterable[Path], mapped: Collection[bytes]) -> AbstractContextManager[bool]:
        return nullcontext(True)

    patch.put(cached_models, "claim", always_free)


def _maps_unread(patch: Patches) -> None:
    patch.put(cached_models, "mapped_files", set)


def _no_lock_of_servers(patch: Patches) -> None:
    patch.put(serve, "hold_model", lambda folder: nullcontext())
    patch.put(cached_models, "mapped_files", set)


def _hub_models_pruned_unasked(patch: Patches) -> None:
    patch.put(cached_models.ModelCacheEntry, "is_pruned_by_default", True)


def _chat_disabled_unsaid(patch: Patches) -> None:
    for module in (start_summary, serve):
        patch.put(module, "chat_disabled", lambda model: None)


def _first_template_of_many(patch: Patches) -> None:
    patch.put(text_metadata, "_template_of_named", lambda entries, source: entries[0]["template"])


def _space_before_every_stretch(patch: Patches) -> None:
    patch.around(
        sentencepiece_tokenizer,
        "configure_spaces",
        lambda original, tokenizer, prefix, **named: original(
            tokenizer, sentencepiece_tokenizer.Prefix.STRETCH, **named
        ),
    )


def _no_space_before_texts(patch: Patches) -> None:
    patch.around(
        Tokenizer,
        "_encoding",
        lambda original, self, text, special: (setattr(self, "_prefix", ""), original(self, text, special))[1],
    )


def _bytes_found_in_texts(patch: Patches) -> None:
    def score(original: Callable, piece: str, score: float, kind: int, best: float) -> float:
        return score if kind == PieceType.BYTE else original(piece, score, kind, best)

    patch.around(sentencepiece_tokenizer, "_unigram_score", score)


def _flags_of_added_tokens_lost(patch: Patches) -> None:
    def plain(original: Callable, self: AddedTokenConfig, *, is_special: bool) -> object:
        return original(AddedTokenConfig(self.content, normalized=self.normalized), is_special=is_special)

    patch.around(AddedTokenConfig, "to_library", plain)


def _one_pattern_for_all_tiktoken_files(patch: Patches) -> None:
    patch.put(byte_level_bpe, "TIKTOKEN_SPLITS", {})


TABLE = [
    Sabotage(
        "weights-before-config",
        "the weights of a model that cannot be served are downloaded before it is refused",
        _all_files_first,
        [HUB + "test_a_config_that_cannot_be_served_is_refused_before_anything_else_is_fetched"],
    ),
    Sabotage(
        "weights-before-tokenizer",
        "the weights of a model whose tokenizer cannot be used are downloaded before it is refused",
        _tokenizers_after_weights,
        [HUB + "test_a_description_that_cannot_be_used_is_refused_before_weights_are_fetched"],
    ),
    Sabotage(
        "weights-before-flags",
        "a context that the model has not is refused when its weights were read",
        _flags_after_weights,
        ["tests/models/test_store.py::test_a_context_that_the_model_has_not_is_refused_before_weights_are_read"],
    ),
    Sabotage(
        "repository-unlooked",
        "files of a repository without a model are downloaded",
        _any_file_name_will_do,
        [HUB + "test_a_repository_without_a_model_is_refused_by_its_list_of_files"],
    ),
    Sabotage(
        "revision-ignored",
        "--revision serves the branch main",
        _main_for_every_revision,
        [HUB + "test_a_revision_is_fetched_and_kept_beside_others"],
    ),
    Sabotage(
        "hub-at-every-start",
        "a model that is in the cache needs the hub, and changes with it",
        _hub_at_every_start,
        [
            HUB + "test_the_second_time_no_request_is_made",
            HUB + "test_a_branch_that_moves_does_not_change_what_is_served",
        ],
    ),
    Sabotage(
        "tokenizer-at-every-start",
        "a start with a complete cache writes into it, and fails where it is read-only",
        _tokenizer_built_at_every_start,
        [HUB + "test_a_complete_read_only_cache_is_enough[none]"],
    ),
    Sabotage(
        "high-bits-lost",
        "the highest bit of weights of five bits is lost",
        _high_bits_lost,
        [
            f"tests/kernels/test_packing.py::test_blocks_stand_for_the_weights_that_the_package_reads_in_them[{name}]"
            for name in ("Q5_0", "Q5_1")
        ],
    ),
    Sabotage(
        "blocks-quantized-anew",
        "the blocks of a GGUF file are dequantized and quantized again",
        _blocks_quantized_anew,
        ["tests/models/test_store.py::test_a_quantized_gguf_is_served_in_int8_with_the_bits_of_its_blocks"],
    ),
    Sabotage(
        "tables-dequantized",
        "a GGUF file with IQ2 and IQ3 types is converted instead of refused",
        _tables_dequantized,
        [
            f"tests/models/test_gguf_file.py::test_types_whose_blocks_are_indices_into_tables_are_refused_by_name[{name}]"
            for name in ("IQ3_XXS", "IQ2_XXS")
        ],
    ),
    Sabotage(
        "block-scales-unchecked",
        "a block with an infinite scale is served",
        _scales_unchecked,
        ["tests/models/test_store.py::test_a_block_whose_scale_is_not_finite_is_refused_by_the_name_of_its_tensor"],
    ),
    Sabotage(
        "gptq-zero-points",
        "zero points of a GPTQ checkpoint are taken as they are stored",
        _zero_points_as_stored,
        [PUBLISHED + "floats_of_a_published_checkpoint_are_those_that_its_layout_defines[gptq-4-asymmetric]"],
    ),
    Sabotage(
        "gptq-symmetry",
        "zero points of a symmetric GPTQ checkpoint depend on the name of its layout",
        _symmetry_ignored,
        [f"{SYMMETRIC}[{name}]" for name in ("4 bits", "v2", "8 bits")],
    ),
    Sabotage(
        "quantized-parts-unchecked",
        "types and shapes of scales and integers are not compared",
        _parts_unchecked,
        [f"{DAMAGED}[{name}-auto]" for name in ("awq: fewer outputs", "gptq: order as floats", "int4: fewer outputs")],
    ),
    Sabotage(
        "values-unchecked",
        "a model with a weight that is not a number is converted",
        _values_unchecked,
        [DAMAGED + "[norm that is no number-auto]", DAMAGED + "[fp8: weight that is no number-none]"],
    ),
    Sabotage(
        "int8-arrays-unchecked",
        "an array of a converted model may be smaller than its config says",
        _arrays_unchecked,
        [f"{INT8_ARRAYS}[{name}]" for name in ("layers.1.down-half_outputs", "norm-other_type")],
    ),
    Sabotage(
        "awq-order",
        "the outputs in a word of an AWQ checkpoint are read one after the other",
        _awq_in_order,
        [PUBLISHED + "floats_of_a_published_checkpoint_are_those_that_its_layout_defines[awq]"],
    ),
    Sabotage(
        "quantized-checkpoint-on-cuda",
        "a quantized checkpoint is fetched for a CUDA device, which cannot serve it",
        _cuda_takes_all,
        [PUBLISHED + "a_quantized_checkpoint_is_refused_on_a_cuda_device_by_its_config"],
    ),
    Sabotage(
        "device-unasked",
        "a model is fetched for a CUDA device that is not there",
        _device_unasked,
        [HUB + "test_a_device_that_is_not_there_is_reported_before_the_hub_is_asked"],
    ),
    Sabotage(
        "prune-in-use",
        "onward models prune removes a model that is being served",
        _remove_what_is_in_use,
        [
            MODELS + "test_a_model_that_a_server_holds_is_not_removed",
            MODELS + "test_a_model_whose_weights_a_process_has_mapped_is_not_removed",
        ],
    ),
    Sabotage(
        "prune-mapped",
        "onward models prune removes weights that a process has mapped",
        _maps_unread,
        [MODELS + "test_a_model_whose_weights_a_process_has_mapped_is_not_removed"],
    ),
    Sabotage(
        "served-folder-not-held",
        "a server does not hold the folder that it serves",
        _no_lock_of_servers,
        ["tests/e2e/test_model_from_hub.py::test_a_model_of_the_hub_is_served_and_not_removed_meanwhile"],
    ),
    Sabotage(
        "prune-hub-unasked",
        "onward models prune removes models of the hub's cache that were not named",
        _hub_models_pruned_unasked,
        [MODELS + "test_pruning_without_names_removes_what_can_be_made_again"],
    ),
    Sabotage(
        "chat-disabled-unsaid",
        "a start says nothing about a model without a chat template",
        _chat_disabled_unsaid,
        [
            "tests/cli/test_start_summary.py::test_a_start_says_that_chat_is_disabled",
            "tests/e2e/test_model_from_hub.py::test_a_model_of_the_hub_is_served_and_not_removed_meanwhile",
        ],
    ),
    Sabotage(
        "first-of-many-templates",
        "of several chat templates the first is used, whatever it is for",
        _first_template_of_many,
        ["tests/models/test_texts.py::test_of_several_templates_the_default_is_taken"],
    ),
    Sabotage(
        "space-before-every-stretch",
        "text behind a special token begins with a space that the model was not trained on",
        _space_before_every_stretch,
        [REFERENCES + "test_a_sentencepiece_bpe_model", REFERENCES + "test_a_sentencepiece_model_in_transformers"],
    ),
    Sabotage(
        "no-space-before-texts",
        "a SentencePiece text lacks the space before it",
        _no_space_before_texts,
        [REFERENCES + "test_a_sentencepiece_bpe_model", REFERENCES + "test_a_sentencepiece_unigram_model"],
    ),
    Sabotage(
        "byte-pieces-in-texts",
        "a text that says <0x41> becomes the token of a byte",
        _bytes_found_in_texts,
        [REFERENCES + "test_a_sentencepiece_unigram_model"],
    ),
    Sabotage(
        "added-token-flags-lost",
        "spaces beside an added token are tokenized otherwise than the config says",
        _flags_of_added_tokens_lost,
        [REFERENCES + "test_vocab_and_merges", REFERENCES + "test_tokenizer_json_with_its_config"],
    ),
    Sabotage(
        "one-pattern-for-tiktoken",
        "text for a tiktoken vocabulary is cut by the pattern of another one",
        _one_pattern_for_all_tiktoken_files,
        [REFERENCES + f"test_a_tiktoken_file[{name}-]" for name in ("cl100k_base", "o200k_base", "qwen")],
    ),
]
