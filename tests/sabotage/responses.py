"""Deliberate bugs about responses: their events, records, cancellation and retries."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec

from onward.api.endpoints import attempts
from onward.api.engine_link.request_tracker import ABORTED
from onward.api.lifecycle import generation_runner, request_builder, stream_registry
from onward.api.lifecycle.stream_registry import LiveStream, StreamRegistry
from onward.api.responses import chat_request as response_chat_request
from onward.api.responses import event_builder, response_formatters, response_store
from onward.api.responses.create_endpoint import CreateResponseEndpoint
from onward.api.responses.response_formatters import ResponseFormatter
from onward.fair_record_store import FairRecordStore
from onward.proto.router import ChoiceSnapshot, StreamRecord
from onward.proto.stream_store import EntryKind, StoreEntry
from onward.router import core as router_core
from onward.router.endpoints.responses import ResponseEventWriter
from onward.router.record_lookup import find_records
from onward.router.response_store import ClusterResponseStore
from onward.router.stream_routing_state import StreamRoutingState
from onward.stream_store import entries as store_entries
from onward.stream_store.core import StreamStoreCore
from onward.stream_store.entries import EntryTable
from onward.text.tool_calls.custom_input import CustomCallConverter
from onward.web import task_pool
from onward.web.auth.api_key_table import Caller
from onward.web.openai_api import response_endpoint
from onward.web.openai_api.response_ids import PREFIX, response_not_found
from onward.web.task_pool import TaskPool
from tests.sabotage.patches import Patches, Sabotage

STORED = "tests/api/responses/test_stored.py::"
CUTS = "tests/api/responses/test_cuts.py::"
ROUTED = "tests/api/responses/test_behind_router.py::"
ABORTS = "tests/api/responses/test_aborted.py::"
ABORTS_ROUTED = "tests/api/responses/test_aborted_behind_router.py::"
FAILS_AFTER_RETURN = "test_a_stream_that_fails_after_a_client_came_back_has_the_next_number_and_the_output_so_far"
ABORTED_AFTER_RETURN = "test_a_response_that_is_aborted_after_its_client_came_back_is_told_again_with_its_logprobs"
ABORTED_STREAM = "test_a_streamed_response_that_is_aborted_ends_as_one_that_is_cancelled_and_is_told_again_the_same"
FOR_EVER_S = 1e9
STORE = "tests/stream_store/test_stream_store_core.py::"
CLAIMS = "tests/api/test_claims.py::"
RESUMED_AND_CANCELLED = "test_a_response_that_is_resumed_and_cancelled_at_once_has_one_end"
_ENDS = ("complete", "cancelled")
_ENDED_FOR_GOOD = ("cancelled", "deleted")


AGENTS = "tests/api/responses/test_agent_tools.py::"


def _name_no_dropped_tools(patch: Patches) -> None:
    patch.put(response_chat_request, "ignored_tool_fields", lambda tools: ())


def _forget_namespaces(patch: Patches) -> None:
    patch.put(event_builder, "namespaced_names", lambda tools: {})


def _leave_custom_inputs_encoded(patch: Patches) -> None:
    patch.put(CustomCallConverter, "convert", lambda self, events: events)


def _show_it_and_let_it_run(patch: Patches) -> None:
    async def take_away(original: Callable, self: StreamRegistry, record: StreamRecord) -> StreamRecord:
        return record if record.attempt.request_id in self._live else await original(self, record)

    patch.around(StreamRegistry, "claim_to_finalize", take_away)


def _count_events_from_the_break(patch: Patches) -> None:
    def opening(original: Callable, self: ResponseFormatter) -> list[bytes]:
        events = original(self)
        if self.active.prepared.is_resumed:
            self._event_builder.num_events -= 1
        return events

    patch.around(ResponseFormatter, "format_opening", opening)


def _tell_the_last_event_again(patch: Patches) -> None:
    patch.around(response_endpoint, "starting_after", lambda original, query: max(-1, original(query) - 1))


def _keep_them_for_ever(patch: Patches) -> None:
    def entry_of_record(
        original: Callable, self: StreamRegistry, record: StreamRecord, kind: EntryKind, **more: bool
    ) -> StoreEntry:
        kept = original(self, record, kind, **more)
        return msgspec.structs.replace(kept, ttl_s=FOR_EVER_S) if kind == "response" else kept

    patch.around(StreamRegistry, "_entry_of_record", entry_of_record)


def _find_anybody_s(patch: Patches) -> None:
    def own(original: Callable, caller: Caller, response_id: str, param: str) -> str:
        return response_id.removeprefix(PREFIX)

    async def find(
        original: Callable,
        self: StreamRegistry,
        request_id: str,
        epoch: int = 0,
        caller: str | None = None,
        **more: bool,
    ) -> Any:
        return await original(self, request_id, epoch, **more)

    patch.around(response_store, "request_id_of_response", own)
    patch.around(StreamRegistry, "find", find)


def _tie_it_to_its_creator(patch: Patches) -> None:
    begun: list[Any] = []

    def start(original: Callable, self: TaskPool, work: Any, caller: str) -> Any:
        begun.append(original(self, work, caller))
        return begun[-1]

    async def generate(original: Callable, self: CreateResponseEndpoint, *args: Any) -> None:
        try:
            await original(self, *args)
        finally:
            while begun:
                begun.pop().cancel()

    patch.around(TaskPool, "start", start)
    patch.around(CreateResponseEndpoint, "generate", generate)
    _keep_none_that_runs(patch)


def _keep_none_that_runs(patch: Patches) -> None:
    patch.put(StreamRegistry, "store_started", lambda self, stream: None)


def _keep_only_streams(patch: Patches) -> None:
    def is_of_use(original: Callable, route: StreamRoutingState) -> bool:
        return route.stream.request.is_streaming and original(route)

    patch.around(router_core, "_is_resumable", is_of_use)
    _copy_none(patch)


def _say_unknown_too_soon(patch: Patches) -> None:
    async def find(
        original: Callable, self: ClusterResponseStore, caller: Caller, response_id: str, param: str = "response_id"
    ) -> StreamRecord:
        request_id = response_id.removeprefix(PREFIX)
        record = self._most_advanced(caller, request_id, (await find_records(self._runner, request_id)).records)
        if record is None:
            raise response_not_found(response_id, param)
        return record

    patch.around(ClusterResponseStore, "find", find)


def _of(kinds: tuple[str, ...], test: str) -> list[str]:
    return [f"{CUTS}{test}[{kind}]" for kind in kinds]


_WORDY = ("words", "thoughts", "two calls and words")


def _let_others_start_what_is_ended(patch: Patches) -> None:
    patch.put(StreamStoreCore, "_finalized_epoch", lambda self, record_id, now_s: None)


def _let_attempts_start_during_a_cancel(patch: Patches) -> None:
    patch.put(StreamRegistry, "_block_attempts", lambda self, request_id: nullcontext())


def _grant_what_has_ended_meanwhile(patch: Patches) -> None:
    def reply(original: Callable, self: StreamStoreCore, *of: Any) -> Any:
        self._blocking_epoch = lambda query, now_s: None
        try:
            return original(self, *of)
        finally:
            del self._blocking_epoch

    patch.around(StreamStoreCore, "_reply", reply)


def _let_attempts_outlive_a_cancel(patch: Patches) -> None:
    patch.put(StreamStoreCore, "_release_ended", lambda self, *of: [])


def _replace_an_end(patch: Patches) -> None:
    patch.put(store_entries, "_may_replace", lambda known, record: known.attempt_epoch <= record.attempt_epoch)


def _forget_it_between_two_attempts(patch: Patches) -> None:
    patch.around(EntryTable, "drop_superseded", lambda original, self, record_id, *rest: self.drop(record_id))


def _copy_none(patch: Patches) -> None:
    async def keep_end(original: Callable, self: ClusterResponseStore, *end: Any) -> None:
        pass

    patch.around(ClusterResponseStore, "store_final", keep_end)


def _number_a_failure_from_the_break(patch: Patches) -> None:
    patch.put(ResponseFormatter, "has_sequence_numbers", False)


FOUND = "tests/sim/test_regressions.py::test_what_was_found_does_not_happen_again"


def _evict_the_oldest_of_all(patch: Patches) -> None:
    def evict(original: Callable, self: FairRecordStore, usage: Any) -> None:
        self.drop(next(iter(self._records)))

    patch.around(FairRecordStore, "_evict", evict)


def _keep_the_raw_body(patch: Patches) -> None:
    patch.put(request_builder, "compact_json", lambda body: body)


def _let_a_caller_take_all(patch: Patches) -> None:
    patch.put(
        task_pool,
        "within_fair_share",
        lambda amount, own, of_others, bound, is_named: own + of_others + amount <= bound,
    )


def _an_abort_fails_a_response(patch: Patches) -> None:
    patch.put(event_builder.ResponseEventBuilder, "cancel", lambda self: self.fail(ABORTED))


def _an_abort_drops_a_response(patch: Patches) -> None:
    def worth(original: Callable, stream: LiveStream) -> EntryKind | None:
        return None if stream.request.output.aborted else original(stream)

    patch.around(stream_registry, "_entry_kind", worth)


def _an_abort_leaves_what_nobody_runs(patch: Patches) -> None:
    patch.put(EntryTable, "open_named", lambda self, *named: {})


def _a_failure_passes_what_waits_for_scores(patch: Patches) -> None:
    patch.put(
        ResponseFormatter,
        "format_error",
        lambda self, info: [response_formatters.event_bytes(self._event_builder.fail(info))],
    )


def _an_attempt_begins_without_logprobs(patch: Patches) -> None:
    for module in (attempts, generation_runner, response_store):
        patch.put(module, "with_prior_logprobs", lambda prepared, record: prepared)


def _a_router_drops_logprobs(patch: Patches) -> None:
    for module in (stream_registry, response_store):
        patch.put(module, "with_longest_logprobs", lambda record, other: record)


def _each_instance_cancels_what_it_keeps(patch: Patches) -> None:
    async def abort_kept(
        original: Callable, self: StreamRegistry, *what: Any, leaves_idle: bool
    ) -> stream_registry.AbortOutcome:
        return await original(self, *what, leaves_idle=False)

    patch.around(StreamRegistry, "abort_kept", abort_kept)


def _a_router_leaves_what_nobody_runs(patch: Patches) -> None:
    async def cancel_idle(original: Callable, self: ClusterResponseStore, *what: Any) -> bool:
        return False

    patch.around(ClusterResponseStore, "cancel_idle", cancel_idle)


def _a_router_fails_an_aborted_response(patch: Patches) -> None:
    async def cancelled(original: Callable, self: ResponseEventWriter, info: object) -> None:
        return None

    patch.around(ResponseEventWriter, "_cancelled", cancelled)


def _an_aborted_response_runs_again(patch: Patches) -> None:
    def entry_of(original: Callable, self: StreamRegistry, record: StreamRecord, *of: object, **more: object) -> object:
        return original(self, msgspec.structs.replace(record, is_cancelled=False), *of, **more)

    patch.around(StreamRegistry, "_entry_of_record", entry_of)


def _each_instance_cancels_what_the_router_has(patch: Patches) -> None:
    """The instances are told of the record that the router has found, and not of what the first of them keeps."""
    found: dict[str, list[ChoiceSnapshot]] = {}

    async def keep(
        original: Callable, self: ClusterResponseStore, record: StreamRecord, urls: Sequence[str]
    ) -> list[StreamRecord]:
        attempt = record.attempt
        attempt = msgspec.structs.replace(attempt, choices=found.setdefault(attempt.request_id, attempt.choices))
        return await original(self, msgspec.structs.replace(record, attempt=attempt), urls)

    patch.around(ClusterResponseStore, "_store_at", keep)


def _a_delete_only_drops(patch: Patches) -> None:
    def delete(original: Callable, self: EntryTable, record_id: str, caller: str, now_s: float) -> bool:
        was_there = self.get(record_id, now_s) is not None
        self.drop(record_id)
        return was_there

    patch.around(EntryTable, "delete", delete)


TABLE = [
    Sabotage(
        "aborted-response-fails",
        "an aborted response has failed, and is not cancelled",
        _an_abort_fails_a_response,
        [ABORTS + "test_a_whole_response_that_is_aborted_is_cancelled_and_has_its_output[3-stored]"],
    ),
    Sabotage(
        "aborted-response-dropped",
        "the record of an aborted response is dropped",
        _an_abort_drops_a_response,
        [
            ABORTS + "test_a_whole_response_that_is_aborted_is_cancelled_and_has_its_output[3-stored]",
            ABORTS + f"{ABORTED_STREAM}[3-plain]",
        ],
    ),
    Sabotage(
        "aborted-response-open",
        "the record of an aborted response does not say that it was cancelled",
        _an_aborted_response_runs_again,
        [ABORTS + "test_a_whole_response_that_is_aborted_is_cancelled_and_has_its_output[3-stored]"],
    ),
    Sabotage(
        "abort-reaches-runs-only",
        "a response that nothing runs is not cancelled by an abort, and is taken up again",
        _an_abort_leaves_what_nobody_runs,
        [
            ABORTS + "test_a_background_response_whose_process_has_died_is_cancelled_by_an_abort",
            ABORTS + "test_a_stored_stream_whose_client_has_gone_is_cancelled_by_an_abort",
        ],
    ),
    Sabotage(
        "failure-before-scores",
        "a response that fails while its tokens are rescored gives an earlier sequence number",
        _a_failure_passes_what_waits_for_scores,
        [CUTS + FAILS_AFTER_RETURN + "[words, scored, not stored-GET]"],
    ),
    Sabotage(
        "resumed-without-logprobs",
        "a response that is aborted before a resumed attempt has computed anything is told again without its logprobs",
        _an_attempt_begins_without_logprobs,
        [ABORTS + f"{ABORTED_AFTER_RETURN}[{way}]" for way in ("GET", "POST", "by number", "router")],
    ),
    Sabotage(
        "router-drops-logprobs",
        "a response that a router ends loses the logprobs that an instance has kept",
        _a_router_drops_logprobs,
        [
            ABORTS + "test_a_response_that_a_router_ends_keeps_the_logprobs_that_its_instance_has[cancelled]",
            ABORTS + "test_a_response_that_a_router_ends_keeps_the_logprobs_that_its_instance_has[failed]",
        ],
    ),
    Sabotage(
        "older-record-cancelled",
        "an abort at a router cancels an older record of a response that another instance has completed",
        _each_instance_cancels_what_it_keeps,
        [ABORTS_ROUTED + "test_an_abort_of_a_completed_response_does_not_cancel_an_older_record_of_it"],
    ),
    Sabotage(
        "router-aborts-runs-only",
        "a response that nothing runs is not cancelled by an abort at a router",
        _a_router_leaves_what_nobody_runs,
        [ABORTS_ROUTED + "test_an_abort_of_a_response_that_nothing_runs_cancels_all_records_of_it"],
    ),
    Sabotage(
        "router-fails-aborted-response",
        "a router ends an aborted response as one that has failed",
        _a_router_fails_an_aborted_response,
        [ABORTS_ROUTED + "test_a_whole_response_is_cancelled_and_has_its_output[stored-2-router]"],
    ),
    Sabotage(
        "instances-cancel-apart",
        "a router has each instance keep a cancelled response with the tokens that the router knows of",
        _each_instance_cancels_what_the_router_has,
        [ABORTS_ROUTED + "test_a_response_is_cancelled_with_the_same_tokens_at_all_instances"],
    ),
    Sabotage(
        "deleted-response-comes-back",
        "a response that is deleted while it runs is kept when its run ends",
        _a_delete_only_drops,
        [
            ABORTS + "test_a_response_that_is_deleted_while_it_runs_is_not_kept_as_cancelled",
            "tests/stream_store/test_entries.py::test_a_deleted_response_does_not_come_back",
        ],
    ),
    Sabotage(
        "oldest-of-all-evicted",
        "a caller that stores much evicts the records of others",
        _evict_the_oldest_of_all,
        [
            "tests/stream_store/test_entries.py::test_a_caller_that_fills_the_store_evicts_none_of_another_caller",
            "tests/test_fair_record_store.py::test_a_caller_that_fills_the_store_loses_its_own_oldest_records",
        ],
    ),
    Sabotage(
        "raw-body-kept",
        "spaces in a request's body are stored with it",
        _keep_the_raw_body,
        [STORED + "test_spaces_in_a_body_are_not_stored"],
    ),
    Sabotage(
        "background-taken-by-one",
        "one caller takes all places of background responses",
        _let_a_caller_take_all,
        ["tests/web/test_task_pool.py::test_a_caller_leaves_room_for_others"],
    ),
    Sabotage(
        "end-replaced",
        "a later attempt replaces the record of a response that was completed or cancelled",
        _replace_an_end,
        [f"tests/stream_store/test_entries.py::test_a_record_that_has_ended_is_never_replaced[{one}]" for one in _ENDS],
    ),
    Sabotage(
        "response-dropped-between-attempts",
        "the record of a response is dropped when its next attempt starts, and not when that one has put its own",
        _forget_it_between_two_attempts,
        [
            "tests/stream_store/test_entries.py::test_a_response_is_kept_until_a_later_attempt_replaces_its_record",
            f"{FOUND}[a_response_is_forgotten_between_two_attempts]",
        ],
    ),
    Sabotage(
        "finished-not-copied",
        "a finished response is kept by the instance that made it alone",
        _copy_none,
        [ROUTED + "test_a_finished_response_outlives_its_instance_and_no_other_is_unknown_meanwhile"],
    ),
    Sabotage(
        "failure-numbered-from-the-break",
        "a response that is regenerated and fails before its reader's position gives a sequence number again",
        _number_a_failure_from_the_break,
        [f"{FOUND}[a_failure_is_numbered_before_the_place_of_its_client]"],
    ),
    Sabotage(
        "cancel-not-told",
        "a cancelled response is shown as such, and computed to its end",
        _show_it_and_let_it_run,
        [STORED + "test_a_background_response_is_cancelled_from_either_process"],
    ),
    Sabotage(
        "cancel-undone",
        "a reader of a response starts its next attempt while it is being cancelled",
        _let_others_start_what_is_ended,
        [
            STORE + "test_what_somebody_is_about_to_end_is_not_taken_up_meanwhile",
            STORE + "test_no_attempt_starts_while_its_response_is_finalized_however_late_its_epoch_is",
            f"{CLAIMS}{RESUMED_AND_CANCELLED}[cancel first-2-later epoch]",
        ],
    ),
    Sabotage(
        "resume-during-cancel",
        "a reader of a response starts its next attempt in the api process that is cancelling it",
        _let_attempts_start_during_a_cancel,
        [
            f"{CLAIMS}{RESUMED_AND_CANCELLED}[resume first-1-next epoch]",
            CLAIMS + "test_an_attempt_whose_claim_is_not_answered_does_not_start_after_a_cancel",
            f"{FOUND}[a_cancel_passes_a_resume_in_the_same_process]",
        ],
    ),
    Sabotage(
        "ended-while-claimed",
        "an attempt starts although its response ended while other api processes were asked about its claim",
        _grant_what_has_ended_meanwhile,
        [
            f"{STORE}test_a_claim_is_refused_if_its_response_ends_while_other_processes_are_asked[{one}]"
            for one in _ENDED_FOR_GOOD
        ],
    ),
    Sabotage(
        "runs-on-after-its-end",
        "an attempt that started by a late or missing reply runs on after its response was cancelled or deleted",
        _let_attempts_outlive_a_cancel,
        [
            STORE + "test_a_cancel_ends_an_attempt_in_a_process_that_did_not_answer_the_claim",
            *(
                f"{STORE}test_an_attempt_that_started_when_its_response_had_ended_is_released[{one}]"
                for one in _ENDED_FOR_GOOD
            ),
        ],
    ),
    Sabotage(
        "number-told-twice",
        "an attempt that continues a stream gives a sequence number again",
        _count_events_from_the_break,
        [
            *_of(_WORDY, "test_a_client_goes_on_by_its_last_event_id"),
            *_of(_WORDY, "test_another_instance_goes_on_for_a_router"),
        ],
    ),
    Sabotage(
        "starting-at",
        "a client that asks for the events after a number gets that one again",
        _tell_the_last_event_again,
        [CUTS + "test_a_client_that_comes_back_is_told_the_events_behind_its_last_one"],
    ),
    Sabotage(
        "response-kept-for-ever",
        "a stored response is not dropped when its time is over",
        _keep_them_for_ever,
        [STORED + "test_a_response_is_kept_for_a_while_only"],
    ),
    Sabotage(
        "responses-of-anybody",
        "a caller that knows its id sees another caller's response",
        _find_anybody_s,
        [STORED + "test_each_caller_has_its_own_responses"],
    ),
    Sabotage(
        "tied-to-its-creator",
        "a background response ends with the connection that asked for it",
        _tie_it_to_its_creator,
        [STORED + "test_a_background_response_is_seen_while_it_runs_and_when_it_is_over"],
    ),
    Sabotage(
        "started-not-stored",
        "a background response is lost with the process that runs it",
        _keep_none_that_runs,
        [STORED + "test_a_background_response_whose_process_dies_is_taken_up_by_the_next_that_is_asked"],
    ),
    Sabotage(
        "router-keeps-only-streams",
        "a response that was not streamed is lost with the instance that finished it",
        _keep_only_streams,
        [ROUTED + "test_what_has_ended_is_found_although_the_instance_that_finished_it_has_gone"],
    ),
    Sabotage(
        "unknown-too-soon",
        "a router that has just started answers 404 for a response, before any instance has registered",
        _say_unknown_too_soon,
        [ROUTED + "test_a_router_that_has_just_started_waits_for_instances_before_it_says_unknown"],
    ),
    Sabotage(
        "dropped-tools-unnamed",
        "tools that the model does not see are dropped silently",
        _name_no_dropped_tools,
        [
            AGENTS + "test_tools_of_the_server_are_dropped_and_named",
            AGENTS + "test_a_strict_server_refuses_what_it_would_drop",
        ],
    ),
    Sabotage(
        "call-without-its-namespace",
        "a call of a tool in a namespace has the name of the prompt, which the client does not know",
        _forget_namespaces,
        [AGENTS + "test_a_call_names_its_namespace_and_can_be_sent_back"],
    ),
    Sabotage(
        "custom-input-as-json",
        "the call of a custom tool has JSON arguments in place of its input",
        _leave_custom_inputs_encoded,
        [
            AGENTS + "test_a_custom_call_is_answered_and_the_talk_goes_on",
            AGENTS + "test_a_chat_has_custom_calls_and_takes_them_back",
        ],
    ),
]
