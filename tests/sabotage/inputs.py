"""Deliberate bugs in how input is read (requests, messages of peers, log fields, key files), and the tests that notice."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import msgspec
from rich.measure import Measurement

from onward import log
from onward.api.endpoints import attempts, chat, completions
from onward.api.lifecycle import generation_runner, request_builder
from onward.api.lifecycle.request_builder import RequestBuilder
from onward.api.requests import structured_outputs, unsupported_fields, validation
from onward.api.requests.schemas import GenerationRequest, TextGenerationRequest, ValidationContext
from onward.cli import flag_groups, serve
from onward.cli import main as command_line
from onward.engine import main as engine_main
from onward.engine.core import EngineCore
from onward.engine.recording import replayer, token_anonymizer
from onward.engine.recording.recorder import RecordingEngineCore
from onward.engine.recording.recording_file import RecordingWriter
from onward.grammar import structural_format
from onward.obs import tables
from onward.proto.router import Attempt
from onward.proto.sampling_params import SamplingParams
from onward.router import client_request
from onward.router.endpoints import generation as router_generation
from onward.supervisor import supervisor
from onward.supervisor.children import Child
from onward.supervisor.supervisor import Supervisor
from onward.text import prompt_tokenizer
from onward.text.stop_patterns import StopPatternMatcher
from onward.text.truncation import Truncation
from onward.transport import api_sockets
from onward.web.auth import api_key_file
from onward.worker.logits_processors import constraint_factory
from onward.worker.logits_processors.penalties import LogitsProcessor
from tests.sabotage.patches import Patches, Sabotage

TAG_FAULT = "test_an_end_tag_that_min_tokens_forbids_is_a_fault_of_the_request_and_not_of_the_model"
ARRIVAL = "test_an_attempt_at_a_time_that_is_none_is_refused_and_the_engine_goes_on"
ROUTER = "tests/router/test_app.py::"
RECORDING = "tests/engine/test_recording.py::"
LOG = "tests/test_log.py::"
FLAGS = "tests/cli/test_flags.py::"
TABLES = "tests/obs/test_tables.py::"
CLIENT_FIELDS = "tests/api/test_client_fields.py::"
KEYS = "tests/web/test_keys.py::"
ALIAS = "tests/api/test_completion_token_ids.py::"
FIELDS = "tests/api/test_unknown_fields.py::"
ROUTED_FIELDS = "tests/router/test_unknown_fields.py::"
STRUCTURED = "tests/api/test_structured.py::"
CHILD_NUMBERS = "tests/supervisor/test_child_numbers.py::"


def _log_into_the_progress_bar(patch: Patches) -> None:
    patch.put(log, "ERASE_LINE", "")


def _print_tables_as_wide_as_the_console(patch: Patches) -> None:
    patch.put(tables.Measurement, "get", lambda console, options, table: Measurement(0, 0))


def _know_no_similar_flags(patch: Patches) -> None:
    patch.put(command_line.difflib, "get_close_matches", lambda *_, **__: [])


def _leave_a_knob_out_of_the_groups(patch: Patches) -> None:
    groups = {title: names for title, names in flag_groups.SERVE.items() if "dtype" not in names}
    patch.put(flag_groups, "SERVE", groups)


def _take_any_block_size(patch: Patches) -> None:
    patch.put(serve, "BLOCK_MULTIPLE", 1)


def _forget_the_fields_of_other_servers(patch: Patches) -> None:
    patch.put(unsupported_fields, "_NO_EFFECT_VALUES", {})


def _ignore_the_schema_of_a_json_object(patch: Patches) -> None:
    def of_response_format(original: Callable, given: Any) -> Any:
        is_object = given is not None and given.get("type") == "json_object"
        return original({"type": "json_object"} if is_object else given)

    patch.around(structured_outputs, "_from_response_format", of_response_format)


def _say_nothing_of_ignored_fields(patch: Patches) -> None:
    patch.put(generation_runner, "ignored_fields_header", lambda names: {})


def _accept_unknown_fields_although_strict(patch: Patches) -> None:
    patch.put(request_builder, "reject_unknown_fields", lambda names: None)


def _router_forgets_to_be_strict(patch: Patches) -> None:
    def origin_of(original: Callable, path: str, body: bytes, arrival: Any, place: Any = None) -> Any:
        return original(path, body, replace(arrival, strict_fields=False), place)

    patch.around(router_generation, "build_client_request", origin_of)


def _ignore_the_alias(patch: Patches) -> None:
    patch.put(GenerationRequest, "resumed_field", "generated_token_ids")


def _let_the_two_names_disagree(patch: Patches) -> None:
    def check(original: Callable, request: GenerationRequest, bounds: ValidationContext) -> None:
        if request.generated_token_ids is None:
            original(request, bounds)

    patch.around(validation, "_check_generated", check)


def _router_ignores_the_alias(patch: Patches) -> None:
    def given(original: Callable, sketch: object) -> object:
        return original(sketch) if getattr(sketch, "generated_token_ids", None) else ()

    patch.around(client_request, "_generated_token_ids", given)


def _log_values_as_they_are(patch: Patches) -> None:
    patch.put(log, "_quoted", lambda value: f'"{value}"' if " " in str(value) else str(value))


def _log_continued_lines_unmarked(patch: Patches) -> None:
    patch.put(log, "CONTINUATION_INDENT", "")


def _write_keys_without_a_lock(patch: Patches) -> None:
    patch.put(api_key_file, "_only_writer", nullcontext)


def _take_any_arrival(patch: Patches) -> None:
    def decoded(original: Callable, decoder: Any, message: bytes) -> Any:
        tree = msgspec.msgpack.decode(message)
        waited_s, tree["waited_s"] = tree.get("waited_s"), 0.0
        made = original(decoder, msgspec.msgpack.encode(tree))
        return msgspec.structs.replace(made, waited_s=waited_s)

    patch.around(attempts, "decode_cluster_message", decoded)


def _end_with_what_cannot_be_read(patch: Patches) -> None:
    def end(sender: str, fault: msgspec.DecodeError) -> None:
        raise fault

    patch.put(api_sockets, "_log_dropped", end)


def _let_min_tokens_forbid_the_end_tag(patch: Patches) -> None:
    patch.put(request_builder, "check_forced_end", lambda rule, end_token_ids, min_tokens: None)
    patch.put(constraint_factory, "find_forbidden_forced_token", lambda rule, end_token_ids, min_tokens: None)


def _write_delete_as_it_is(patch: Patches) -> None:
    patch.put(structural_format, "_without_delete", lambda source: source)


def _record_true_vectors(patch: Patches) -> None:
    patch.put(token_anonymizer, "_zeroed", lambda vector: vector)


def _record_names_of_blocks(patch: Patches) -> None:
    for module in (token_anonymizer, replayer):
        patch.put(module, "anonymize_block_hashes", lambda message: message)


def _do_not_record_the_end(patch: Patches) -> None:
    patch.put(RecordingEngineCore, "close", EngineCore.close)


def _an_unusable_recording_stops_the_engine(patch: Patches) -> None:
    patch.put(engine_main, "open_recording", RecordingWriter)


def _add_up_whatever_children_report(patch: Patches) -> None:
    patch.put(supervisor, "usable", lambda families: (list(families), []))


def _let_a_message_of_a_child_end_the_supervisor(patch: Patches) -> None:
    def read_one(self: Supervisor, child: Child) -> bool:
        if (message := self._processes[child].channel.receive()) is not None:
            self._on_message(child, message)
        return message is not None

    patch.put(Supervisor, "_read_one", read_one)


def _use_the_whole_prompt(patch: Patches) -> None:
    patch.put(TextGenerationRequest, "truncation", None)


def _keep_the_last_tokens(patch: Patches) -> None:
    patch.put(Truncation, "cut", lambda truncation, token_ids: token_ids[-truncation.max_tokens :])


def _allow_every_token_when_resumed(patch: Patches) -> None:
    def initialize(
        original: Callable, self: LogitsProcessor, sampling: SamplingParams, prompt: Any, output: Any, vocab_size: int
    ) -> None:
        known = msgspec.structs.replace(sampling, allowed_token_ids=()) if len(output) else sampling
        original(self, known, prompt, output, vocab_size)

    patch.around(LogitsProcessor, "__init__", initialize)


def _hold_nothing_of_a_pattern(patch: Patches) -> None:
    def scan(original: Callable, self: StopPatternMatcher, text: str, *, ignore_matches: bool) -> str:
        released = original(self, text, ignore_matches=ignore_matches)
        held, self._held = self._held, ""
        return released + held

    patch.around(StopPatternMatcher, "_scan", scan)


def _accept_roles_that_are_left_out(patch: Patches) -> None:
    patch.put(prompt_tokenizer, "_check_custom_roles", lambda messages, options, renderer: None)


def _cut_to_this_instances_context(patch: Patches) -> None:
    def prepare(original: Callable, self: RequestBuilder, attempt: Attempt, *rest: Any, **flags: Any) -> Any:
        return original(self, msgspec.structs.replace(attempt, max_prompt_tokens=None), *rest, **flags)

    patch.around(RequestBuilder, "_prepare", prepare)


def _name_every_end(patch: Patches) -> None:
    for module in (chat, completions):
        patch.around(module, "matched_stop_fields", lambda original, update, _: original(update, {update.matched_stop}))


TABLE = [
    Sabotage(
        "unusable-metrics-added",
        "a NaN that one process reports stays in the sums of the instance",
        _add_up_whatever_children_report,
        [
            CHILD_NUMBERS + "test_a_metric_that_is_no_number_is_left_out_and_counted",
            CHILD_NUMBERS + "test_what_a_dead_process_counted_is_a_number",
        ],
    ),
    Sabotage(
        "undecodable-ends-supervisor",
        "a message that cannot be decoded ends the supervisor, and the instance with it",
        _let_a_message_of_a_child_end_the_supervisor,
        [CHILD_NUMBERS + "test_a_message_with_a_number_out_of_range_is_dropped_and_the_supervisor_lives"],
    ),
    Sabotage(
        "vectors-recorded",
        "a disguised recording has the true vectors of texts",
        _record_true_vectors,
        [RECORDING + "test_what_is_computed_from_the_text_is_not_in_a_disguised_recording"],
    ),
    Sabotage(
        "block-names-recorded",
        "a disguised recording has hashes of the true tokens",
        _record_names_of_blocks,
        [RECORDING + "test_what_is_computed_from_the_text_is_not_in_a_disguised_recording"],
    ),
    Sabotage(
        "end-not-recorded",
        "that the engine was told to leave is not in its recording",
        _do_not_record_the_end,
        [RECORDING + "test_an_eventful_run_replays_with_the_same_answers[False]"],
    ),
    Sabotage(
        "recording-stops-engine",
        "an engine whose recording cannot be written does not start",
        _an_unusable_recording_stops_the_engine,
        [
            RECORDING + "test_an_engine_that_is_started_anew_serves_though_the_recording_s_folder_is_unusable[gone]",
            RECORDING + "test_an_engine_that_is_started_anew_serves_though_the_recording_s_folder_is_unusable[a file]",
        ],
    ),
    Sabotage(
        "end-tag-forbidden",
        "thinking_budget forces an end tag that min_tokens forbids, and the model's logits are blamed",
        _let_min_tokens_forbid_the_end_tag,
        [
            "tests/api/test_tools.py::test_an_end_tag_that_min_tokens_forbids_is_refused_and_names_the_fields",
            "tests/worker/test_thinking.py::" + TAG_FAULT,
            "tests/worker/cuda/test_answers_on_host.py::" + TAG_FAULT,
        ],
    ),
    Sabotage(
        "delete-in-choice",
        "a choice or a tag with U+007F is refused",
        _write_delete_as_it_is,
        ["tests/grammar/test_matcher.py::test_a_choice_or_a_tag_may_have_any_character[007f]"],
    ),
    Sabotage(
        "arrival-not-a-number",
        "a router's NaN as the time of arrival reaches the engine's queue",
        _take_any_arrival,
        ["tests/api/test_attempts.py::" + ARRIVAL + f"[waited_s-{value}]" for value in ("nan", "inf", "-inf")],
    ),
    Sabotage(
        "unreadable-message-ends-engine",
        "a message that cannot be decoded ends the process that reads it",
        _end_with_what_cannot_be_read,
        ["tests/transport/test_zmq.py::test_a_message_that_cannot_be_read_is_dropped_and_the_next_one_is_read"],
    ),
    Sabotage(
        "log-values-unescaped",
        "a value with a line break or a quote forges a line or a field of the log",
        _log_values_as_they_are,
        [
            LOG + "test_a_line_break_in_a_value_begins_no_line",
            LOG + "test_a_quote_in_a_value_ends_no_field",
        ],
    ),
    Sabotage(
        "log-lines-unmarked",
        "a further line of a message or traceback looks like an event of its own",
        _log_continued_lines_unmarked,
        [LOG + "test_an_instance_s_id_forges_no_audit_line"],
    ),
    Sabotage(
        "keys-without-lock",
        "of keys that are added at the same time only some are in the file",
        _write_keys_without_a_lock,
        [KEYS + "test_keys_that_are_added_at_the_same_time_are_all_in_the_file"],
    ),
    Sabotage(
        "foreign-fields-ignored",
        "a field of another server that would change the answer is ignored",
        _forget_the_fields_of_other_servers,
        [FIELDS + "test_a_field_of_another_server_that_changes_the_answer_is_refused_by_name[chat]"],
    ),
    Sabotage(
        "json-object-schema-ignored",
        "the schema of a response_format of the type json_object is ignored",
        _ignore_the_schema_of_a_json_object,
        [STRUCTURED + "test_the_schema_of_a_json_object_is_kept"],
    ),
    Sabotage(
        "ignored-fields-unsaid",
        "a response does not name the fields of the request that were ignored",
        _say_nothing_of_ignored_fields,
        [FIELDS + "test_a_response_names_the_fields_that_were_ignored"],
    ),
    Sabotage(
        "strict-fields-accepted",
        "a server that was started with --strict-fields accepts unknown fields",
        _accept_unknown_fields_although_strict,
        [FIELDS + "test_a_strict_server_refuses_unknown_fields_and_takes_all_others"],
    ),
    Sabotage(
        "router-not-strict",
        "a router that was started with --strict-fields does not ask instances to refuse unknown fields",
        _router_forgets_to_be_strict,
        [ROUTED_FIELDS + "test_a_strict_router_asks_instances_to_refuse_unknown_fields"],
    ),
    Sabotage(
        "log-in-progress-bar",
        "a log line begins in the line of another process's progress bar",
        _log_into_the_progress_bar,
        [LOG + "test_on_a_terminal_a_line_replaces_the_progress_bar_of_another_process"],
    ),
    Sabotage(
        "tables-cut",
        "a table that is wider than the terminal, or than 80 columns in a pipe, loses figures",
        _print_tables_as_wide_as_the_console,
        [TABLES + "test_no_figure_is_cut_or_dropped_and_a_row_is_a_line[80-False]"],
    ),
    Sabotage(
        "flags-without-hint",
        "an unknown flag is refused without the flag that may be meant",
        _know_no_similar_flags,
        [FLAGS + "test_a_mistake_names_the_flag_that_may_be_meant"],
    ),
    Sabotage(
        "flag-in-no-group",
        "a flag is in no group of the help",
        _leave_a_knob_out_of_the_groups,
        [FLAGS + "test_every_knob_is_in_one_group_of_the_help_and_the_first_has_ten"],
    ),
    Sabotage(
        "block-size-unchecked",
        "a block size that no worker takes is refused only after the model was fetched and converted",
        _take_any_block_size,
        [FLAGS + "test_a_block_size_that_no_worker_takes_is_refused_before_anything_is_fetched"],
    ),
    Sabotage(
        "completion-ids-ignored",
        "completion_token_ids in a request is ignored, and generation starts over",
        _ignore_the_alias,
        [ALIAS + "test_an_answer_s_tokens_are_taken_back_by_the_name_they_have_there"],
    ),
    Sabotage(
        "token-fields-disagree",
        "a request whose two lists of tokens so far differ is served from one of them",
        _let_the_two_names_disagree,
        [ALIAS + "test_a_request_in_which_the_two_names_disagree_is_refused_and_told_both"],
    ),
    Sabotage(
        "router-misses-completion-ids",
        "a router does not count the tokens that a client sent as completion_token_ids",
        _router_ignores_the_alias,
        [ROUTER + "test_tokens_that_the_client_brought_are_kept_when_their_instance_fails[completion_token_ids]"],
    ),
    Sabotage(
        "prompt-not-cut",
        "truncate_prompt_tokens is accepted, and the whole prompt is used",
        _use_the_whole_prompt,
        [CLIENT_FIELDS + f"test_a_prompt_may_be_cut_to_its_last_tokens[{is_routed}]" for is_routed in (False, True)],
    ),
    Sabotage(
        "other-tokens-after-a-resume",
        "a resumed request may have tokens that it does not allow",
        _allow_every_token_when_resumed,
        [
            "tests/worker/test_step_sampler.py::"
            "test_a_resumed_request_draws_the_same_tokens_and_logprobs_wherever_it_was_cut[sampling1]"
        ],
    ),
    Sabotage(
        "beginning-of-a-match-is-sent",
        "text is sent that turns out to begin a match of stop_regex",
        _hold_nothing_of_a_pattern,
        ["tests/text/test_stop_patterns.py::test_the_result_is_the_definitions_however_the_text_is_cut"],
    ),
    Sabotage(
        "role-left-out",
        "a message is accepted whose role the chat template leaves out",
        _accept_roles_that_are_left_out,
        ["tests/api/test_tools.py::test_a_role_that_the_template_leaves_out_is_refused"],
    ),
    Sabotage(
        "prompt-cut-anew",
        "an instance with another context cuts the prompt of a stream that continues to another length",
        _cut_to_this_instances_context,
        [CLIENT_FIELDS + "test_a_prompt_may_be_cut_to_what_fits_and_stays_so_in_every_attempt[True]"],
    ),
    Sabotage(
        "truncation-side-ignored",
        "truncation_side: right is accepted, and the prompt's last tokens are kept",
        _keep_the_last_tokens,
        [CLIENT_FIELDS + f"test_a_prompt_may_be_cut_to_its_first_tokens[{is_routed}]" for is_routed in (False, True)],
    ),
    Sabotage(
        "every-end-matches",
        "an output that ended by itself says which stop token of the request ended it",
        _name_every_end,
        [
            CLIENT_FIELDS + f"test_the_stop_string_or_token_that_ended_an_output_is_named[{is_chat}]"
            for is_chat in (True, False)
        ],
    ),
]
