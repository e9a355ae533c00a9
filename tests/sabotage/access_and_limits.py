"""Deliberate bugs in authentication, ownership of streams, limits of callers, and what is read as data."""

import logging
import math
import resource
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from onward.api.engine_link.request_tracker import ChoiceSubmission
from onward.api.lifecycle import generation_runner as api_generation
from onward.api.lifecycle import request_builder
from onward.api.lifecycle import stream_registry as api_streams
from onward.api.process import ApiProcess
from onward.engine import admission
from onward.engine import caller_limiter as engine_callers
from onward.engine.caller_limiter import TokenBucket
from onward.engine.live_requests import CallerInFlight, LiveRequests
from onward.engine.request import Request, RequestStatus
from onward.engine.scheduling.request_queue import RequestQueue
from onward.models.loader import gguf_header, safetensors_header
from onward.models.loader.gguf_file import GgufFile
from onward.proto.engine import CallerLimits
from onward.proto.stream_store import LiveStreamReply
from onward.router import core as router_core
from onward.router import resumable_streams as router_records
from onward.router.endpoints import generation as router_generation
from onward.router.main import RouterProcess
from onward.router.stream_runner import StreamRunner
from onward.stream_store import core as stream_store_core
from onward.stream_store import entries as store_entries
from onward.stream_store.core import StreamStoreCore
from onward.stream_store.entries import EntryTable
from onward.text import bounded_template
from onward.web import http_responses
from onward.web.auth import api_key_table, authenticator
from onward.web.auth.api_key_table import ApiKeyTable, Caller
from onward.web.auth.authenticator import Authenticator, ConnectionLimitMiddleware
from tests.sabotage.patches import Patches, Sabotage

ADMISSION = "tests/engine/test_admission.py::"
SCALE = "tests/engine/test_scale.py::"
LIMITER = "tests/engine/test_caller_limiter.py::"
DEADLINES = "tests/engine/test_deadlines.py::"
SECOND_STOP = "test_a_second_stop_ends_streams_at_once_and_says_how_many"
HOSTILE = "tests/models/test_hostile_files.py::"
TEMPLATES = "tests/text/test_chat_template.py::"
SANDBOX = "tests/web/test_template_sandbox.py::test_a_hostile_template_is_refused_and_harms_nobody_after_it"
STORE = "tests/stream_store/test_stream_store_core.py::"
ENTRIES = "tests/stream_store/test_entries.py::"
AT_INSTANCE = "tests/api/test_roles.py::"
AT_ROUTER = "tests/router/test_roles.py::"
CALLERS = "tests/web/test_authenticator.py::"
TWO_PROCESSES = "tests/api/test_two_processes.py::"

_logger = logging.getLogger(__name__)


# Stopping.


def _cut_streams_without_a_word(patch: Patches) -> None:
    patch.put(ApiProcess, "_end_streams", lambda self: self._runtime.exit_now())


# Keys.


def _nobody_asks_for_an_admin(patch: Patches) -> None:
    def refusal(original: Callable, self: Authenticator, scope: Any) -> Any:
        refused = original(self, scope)
        return None if refused is authenticator._NOT_ADMIN else refused

    patch.around(Authenticator, "check", refusal)


def _what_is_at_no_route_is_open(patch: Patches) -> None:
    def access(original: Callable, self: Authenticator, scope: Any) -> authenticator.RouteAccess:
        return original(self, scope) if scope["path"] in self._by_path else authenticator.RouteAccess.OPEN

    patch.around(Authenticator, "_access", access)


def _probes_are_told_the_reason(patch: Patches) -> None:
    patch.put(http_responses, "is_authenticated", lambda scope: True)


def _the_beginning_of_a_digest_will_do(patch: Patches) -> None:
    def find(original: Callable, self: ApiKeyTable, bearer: str) -> Caller | None:
        given = api_key_table._digest(bearer)
        return next((caller for digest, caller in self._callers if digest[:2] == given[:2]), None)

    patch.around(ApiKeyTable, "find", find)


def _keys_are_logged(patch: Patches) -> None:
    def find(original: Callable, self: ApiKeyTable, bearer: str) -> Caller | None:
        _logger.warning("a key was shown: %s", bearer)
        return original(self, bearer)

    patch.around(ApiKeyTable, "find", find)


def _a_broken_file_accepts_everybody(patch: Patches) -> None:
    def reload_keys(original: Callable, self: RouterProcess) -> None:
        self._keyring.keys = ApiKeyTable()
        original(self)

    patch.around(RouterProcess, "reload_keys", reload_keys)


def _connections_are_not_counted(patch: Patches) -> None:
    async def serve(original: Callable, self: ConnectionLimitMiddleware, *exchange: Any) -> None:
        await self._app(*exchange)

    patch.around(ConnectionLimitMiddleware, "__call__", serve)


# Owners of streams.


def _anybody_may_ask_for_any_id(patch: Patches) -> None:
    for module in (api_generation, router_generation):
        patch.put(module, "owns_request_id", lambda caller, request_id: True)


def _the_stream_store_ignores_the_caller(patch: Patches) -> None:
    for module in (stream_store_core, store_entries):
        patch.put(module, "is_visible_to", lambda record, caller: True)


def _what_another_process_shows_is_everybodys(patch: Patches) -> None:
    def shown(original: Callable, self: StreamStoreCore, api: str, message: LiveStreamReply, now_s: float) -> Any:
        question = self._pending.get(message.query_id)
        if question is not None and message.entry is not None:
            question.best = message.entry
        return original(self, api, message, now_s)

    patch.around(StreamStoreCore, "_on_live_stream", shown)


def _any_later_attempt_takes_the_place(patch: Patches) -> None:
    patch.put(api_streams, "_may_replace_attempt", lambda epoch, caller, live: epoch > live.attempt.attempt_epoch)


def _the_engine_lets_anybody_take_over(patch: Patches) -> None:
    patch.put(admission, "check_same_caller", lambda known, request: None)


def _an_api_ends_everybodys_by_name(patch: Patches) -> None:
    def is_meant(
        original: Callable, self: ChoiceSubmission, names: Collection[str], everything: bool, _: str | None
    ) -> bool:
        return original(self, names, everything, None)

    patch.around(ChoiceSubmission, "matches", is_meant)


def _the_engine_ends_everybodys_by_name(patch: Patches) -> None:
    def named(original: Callable, self: LiveRequests, name: str, caller: str | None) -> list[Request]:
        return [request for request in self.values() if name in (request.external_id, request.spec.client_request_id)]

    patch.around(LiveRequests, "find_by_name", named)
    patch.around(LiveRequests, "of_caller", lambda original, self, caller: self.values())


def _a_router_ends_everybodys_by_name(patch: Patches) -> None:
    meant = router_records.matches
    for module in (router_core, router_records):
        patch.put(module, "matches", lambda origin, names, caller: meant(origin, names, None))


def _an_abort_leaves_what_instances_have_kept(patch: Patches) -> None:
    async def at_instances(original: Callable, self: StreamRunner, asked: dict[str, Any]) -> set[str]:
        return set()

    patch.around(StreamRunner, "_abort_at_instances", at_instances)


# Limits.


def _ended_requests_stay_in_flight(patch: Patches) -> None:
    def remove(original: Callable, self: LiveRequests, request: Request) -> None:
        original(self, request)
        self._by_caller.setdefault(request.caller, {})[request.request_id] = request

    patch.around(LiveRequests, "remove", remove)


def _waiting_requests_are_not_in_flight(patch: Patches) -> None:
    def beside(original: Callable, self: LiveRequests, request: Request) -> CallerInFlight:
        num_requests = sum(one.status is not RequestStatus.WAITING for one in self.of_caller(request.caller))
        return replace(original(self, request), num_requests=num_requests)

    patch.around(LiveRequests, "in_flight_of_caller", beside)


def _a_caller_s_requests_are_found_by_a_scan(patch: Patches) -> None:
    def beside(original: Callable, self: LiveRequests, request: Request) -> CallerInFlight:
        num_requests = sum(one.caller == request.caller for one in self.values())
        return replace(original(self, request), num_requests=num_requests)

    patch.around(LiveRequests, "in_flight_of_caller", beside)


def _a_bucket_is_never_refilled(patch: Patches) -> None:
    def refill(original: Callable, self: TokenBucket, capacity: float, now_s: float) -> None:
        self.at_s = now_s
        original(self, capacity, now_s)

    patch.around(TokenBucket, "refill", refill)


def _a_bucket_grows_for_ever(patch: Patches) -> None:
    def refill(original: Callable, self: TokenBucket, capacity: float, now_s: float) -> None:
        level, at_s = self.level, self.at_s
        original(self, capacity, now_s)
        self.level = level + max(0.0, now_s - at_s) * self.per_s

    patch.around(TokenBucket, "refill", refill)


def _each_choice_pays_for_the_prompt(patch: Patches) -> None:
    def beside(original: Callable, self: LiveRequests, request: Request) -> CallerInFlight:
        return replace(original(self, request), has_sibling_choice=False)

    patch.around(LiveRequests, "in_flight_of_caller", beside)


def _a_resubmission_is_a_new_request(patch: Patches) -> None:
    patch.put(admission, "counts_as_new", lambda submit: True)


def _tokens_that_a_client_brings_pass_admission(patch: Patches) -> None:
    patch.around(
        admission, "counts_as_new", lambda original, submit: original(submit) and not submit.generated_token_ids
    )


def _outputs_are_free(patch: Patches) -> None:
    def charge(
        original: Callable, self: Any, caller: str, limits: CallerLimits | None, count: int, now_s: float
    ) -> None:
        if count > 1:
            original(self, caller, limits, count, now_s)

    patch.around(engine_callers.CallerLimiter, "charge", charge)


def _who_leaves_the_queue_leaves_its_tokens(patch: Patches) -> None:
    def remove(original: Callable, self: RequestQueue, request: Request) -> None:
        original(self, request)
        self.num_prompt_tokens += request.num_prompt

    patch.around(RequestQueue, "remove", remove)


def _deadlines_are_for_those_that_run(patch: Patches) -> None:
    def take_overdue(original: Callable, self: LiveRequests, now_s: float) -> list[Request]:
        return [one for one in original(self, now_s) if one.status is not RequestStatus.WAITING]

    patch.around(LiveRequests, "take_past_deadline", take_overdue)


def _a_request_chooses_its_priority(patch: Patches) -> None:
    def priority_within(original: Callable, asked: int | None, best: int | None) -> int:
        return asked or 0

    patch.around(request_builder, "clamp_priority", priority_within)


# The stream store.


def _the_last_record_put_counts(patch: Patches) -> None:
    def put(original: Callable, self: EntryTable, record: Any, now_s: float) -> int:
        self.drop(record.request_id)
        return original(self, record, now_s)

    patch.around(EntryTable, "put", put)


def _a_later_record_is_forgotten_too(patch: Patches) -> None:
    def forget(original: Callable, self: EntryTable, record_id: str, epoch: int, caller: str, now_s: float) -> None:
        original(self, record_id, 1 << 60, caller, now_s)

    patch.around(EntryTable, "drop_superseded", forget)


# What is read as data.


def _steps_without_end(patch: Patches) -> None:
    def take(original: Callable, self: Any, num_steps: int = 1) -> None:
        if self.left > 0:
            original(self, num_steps)
        else:
            self.left = max(self.left, 1)

    patch.around(bounded_template._StepBudget, "take", take)


def _a_templates_output_is_measured_when_it_is_there(patch: Patches) -> None:
    def render(original: Callable, template: Any, names: Any, max_chars: int, *rest: int) -> str:
        return original(template, names, 1 << 60, *rest)[:max_chars]

    patch.around(bounded_template, "render", render)


def _a_clients_template_has_all_memory(patch: Patches) -> None:
    # What the child's own module is called depends on who starts it.
    patch.put(resource, "setrlimit", lambda which, limits: None)


def _a_count_needs_only_to_fit_into_the_file(patch: Patches) -> None:
    def count(original: Callable, self: Any, smallest_bytes: int, what: str, _: int) -> int:
        return original(self, smallest_bytes, what, math.inf)

    patch.around(gguf_header._Cursor, "count", count)


def _gguf_tensors_may_lie_in_one_place(patch: Patches) -> None:
    patch.put(GgufFile, "_check_places", lambda self, tensors: None)


def _safetensors_may_overlap(patch: Patches) -> None:
    patch.put(safetensors_header, "_check_contiguous", lambda path, places, start, size: None)


UNKNOWN_TO_OTHERS = (
    AT_INSTANCE + "test_nobody_learns_whether_another_callers_stream_runs_is_kept_was_aborted_or_never_was"
)
ROUTES = "test_every_route_and_method_is_closed_as_the_table_says"
OWN_ABORTS = "test_an_abort_reaches_the_callers_own_"

TABLE = [
    Sabotage(
        "admins-unasked",
        "F61: what is for admins is for every key",
        _nobody_asks_for_an_admin,
        [AT_INSTANCE + ROUTES, AT_ROUTER + ROUTES, CALLERS + "test_each_route_asks_for_what_it_says"],
    ),
    Sabotage(
        "routes-forgotten",
        "F61: a path that is not in a list is open",
        _what_is_at_no_route_is_open,
        [AT_INSTANCE + ROUTES, AT_ROUTER + ROUTES],
    ),
    Sabotage(
        "probes-told-why",
        "F61: /health tells a caller without a key why it is not well",
        _probes_are_told_the_reason,
        [AT_INSTANCE + "test_health_tells_a_probe_its_status_and_a_caller_with_a_key_the_reason"],
    ),
    Sabotage(
        "digest-prefix",
        "keys: the beginning of a digest is compared, not all of it",
        _the_beginning_of_a_digest_will_do,
        ["tests/web/test_keys.py::test_a_key_whose_digest_begins_like_a_known_one_is_another"],
    ),
    Sabotage(
        "keys-logged",
        "keys: what a client shows stands in the log",
        _keys_are_logged,
        [AT_ROUTER + "test_a_router_reads_its_keys_again_on_sighup_and_never_tells_them"],
    ),
    Sabotage(
        "broken-file-opens",
        "keys: a file that cannot be read leaves no key, and every request is accepted",
        _a_broken_file_accepts_everybody,
        [AT_ROUTER + "test_keys_are_read_again_and_a_broken_file_changes_nothing"],
    ),
    Sabotage(
        "connections-uncounted",
        "F62: a key may hold as many exchanges open as it likes",
        _connections_are_not_counted,
        [CALLERS + "test_a_caller_has_no_more_exchanges_open_than_its_key_says"],
    ),
    Sabotage(
        "ids-of-anybody",
        "owner: a caller that has an id may ask for it, although it is another's",
        _anybody_may_ask_for_any_id,
        [UNKNOWN_TO_OTHERS, AT_ROUTER + "test_nobody_else_learns_that_a_stream_was_aborted"],
    ),
    Sabotage(
        "store-ignores-caller",
        "owner: the stream store finds and drops the entries of any caller",
        _the_stream_store_ignores_the_caller,
        [STORE + "test_nobody_finds_what_is_anothers", ENTRIES + "test_nobody_replaces_or_drops_what_is_anothers"],
    ),
    Sabotage(
        "shown-to-everybody",
        "owner: what runs in another process is shown to everybody",
        _what_another_process_shows_is_everybodys,
        [STORE + "test_nobody_finds_what_is_anothers"],
    ),
    Sabotage(
        "claims-of-anybody",
        "owner: a later attempt takes the place of another caller's",
        _any_later_attempt_takes_the_place,
        [TWO_PROCESSES + "test_nobody_takes_the_place_of_another_callers_attempt"],
    ),
    Sabotage(
        "engine-takeover",
        "owner: the engine lets a newer epoch of any caller take over",
        _the_engine_lets_anybody_take_over,
        [ADMISSION + "test_nobody_takes_over_the_stream_of_another_caller"],
    ),
    Sabotage(
        "tracker-aborts-all",
        "owner: an api process ends by name what is another's",
        _an_api_ends_everybodys_by_name,
        ["tests/api/test_request_tracker.py::test_a_caller_s_abort_is_about_its_own_requests"],
    ),
    Sabotage(
        "engine-aborts-all",
        "owner: the engine ends by name what is another's",
        _the_engine_ends_everybodys_by_name,
        [
            ADMISSION + "test_a_caller_aborts_its_own_requests_and_nobody_else_s",
            ADMISSION + "test_a_caller_without_a_name_does_not_abort_what_peers_ask_of_us",
        ],
    ),
    Sabotage(
        "router-aborts-all",
        "owner: a router ends by name what is another's",
        _a_router_ends_everybodys_by_name,
        [AT_ROUTER + OWN_ABORTS + "streams_only"],
    ),
    Sabotage(
        "records-outlive-aborts",
        "owner: an abort at a router leaves the record that an instance has",
        _an_abort_leaves_what_instances_have_kept,
        [AT_ROUTER + "test_an_abort_of_a_stream_whose_client_has_gone_reaches_what_an_instance_has_kept_of_it"],
    ),
    Sabotage(
        "in-flight-for-ever",
        "F64: what has ended counts as in flight",
        _ended_requests_stay_in_flight,
        [ADMISSION + "test_a_caller_has_no_more_in_flight_than_its_limit"],
    ),
    Sabotage(
        "waiting-is-free",
        "F64: what waits does not count as in flight",
        _waiting_requests_are_not_in_flight,
        [
            ADMISSION + "test_a_caller_has_no_more_in_flight_than_its_limit",
            ADMISSION + "test_a_caller_s_limit_holds_over_all_api_processes",
        ],
    ),
    Sabotage(
        "bucket-never-refilled",
        "limits: a bucket that was emptied stays empty",
        _a_bucket_is_never_refilled,
        [
            LIMITER + "test_an_empty_bucket_says_when_there_is_something_in_it",
            ADMISSION + "test_prompts_and_outputs_are_charged_and_an_empty_bucket_refuses_the_next_one",
        ],
    ),
    Sabotage(
        "bucket-without-bottom",
        "limits: a quiet day may be spent in one minute",
        _a_bucket_grows_for_ever,
        [LIMITER + "test_a_pause_fills_the_bucket_up_to_a_minute_s_tokens_and_no_further"],
    ),
    Sabotage(
        "choices-pay-each",
        "limits: the prompt is charged for each choice",
        _each_choice_pays_for_the_prompt,
        [LIMITER + "test_the_choices_of_a_request_are_let_in_or_refused_together_and_have_one_prompt"],
    ),
    Sabotage(
        "resubmissions-pay",
        "limits: what goes on is charged and refused as if it were new",
        _a_resubmission_is_a_new_request,
        [
            ADMISSION + "test_a_resubmission_is_neither_refused_nor_charged_twice",
            ADMISSION + "test_what_is_resumed_is_let_in_over_the_limit_and_counts",
        ],
    ),
    Sabotage(
        "brought-tokens-open",
        "limits: a request that brings tokens along is admitted past the queue",
        _tokens_that_a_client_brings_pass_admission,
        [ADMISSION + "test_tokens_that_a_client_has_brought_along_do_not_pass_admission"],
    ),
    Sabotage(
        "scan-of-live-requests",
        "limits: each submission looks at every live request",
        _a_caller_s_requests_are_found_by_a_scan,
        [SCALE + "test_an_event_costs_the_same_however_many_requests_are_live[refusals]"],
    ),
    Sabotage(
        "outputs-are-free",
        "limits: only prompts are charged",
        _outputs_are_free,
        [ADMISSION + "test_prompts_and_outputs_are_charged_and_an_empty_bucket_refuses_the_next_one"],
    ),
    Sabotage(
        "queue-keeps-tokens",
        "F64: the prompt tokens of requests that have left the queue still count",
        _who_leaves_the_queue_leaves_its_tokens,
        [ADMISSION + "test_the_queue_is_bounded_by_the_tokens_of_the_prompts_that_wait_in_it"],
    ),
    Sabotage(
        "deadlines-of-the-running",
        "F64: a deadline does not pass in the queue",
        _deadlines_are_for_those_that_run,
        [
            DEADLINES + "test_a_deadline_ends_a_request_in_this_state_and_others_go_on[RequestStatus.WAITING]",
            DEADLINES + "test_a_deadline_passes_while_the_worker_is_away[RequestStatus.WAITING]",
        ],
    ),
    Sabotage(
        "priority-for-all",
        "limits: a request asks for a better place than its key may",
        _a_request_chooses_its_priority,
        [AT_INSTANCE + "test_limits_and_priority_of_a_key_reach_the_engine"],
    ),
    Sabotage(
        "last-entry-counts",
        "stream store: the entry of an earlier attempt replaces that of a later one",
        _the_last_record_put_counts,
        [
            ENTRIES + "test_of_two_with_one_id_the_later_attempt_counts_whichever_comes_first",
            ENTRIES + "test_nobody_replaces_or_drops_what_is_anothers",
        ],
    ),
    Sabotage(
        "later-entries-dropped",
        "stream store: an attempt that continues drops the entry of a later one",
        _a_later_record_is_forgotten_too,
        [ENTRIES + "test_an_earlier_attempt_is_forgotten_and_a_later_one_is_not"],
    ),
    Sabotage(
        "steps-uncounted",
        "F63: a template may take as many steps as it likes",
        _steps_without_end,
        [TEMPLATES + "test_steps_are_counted_to_the_bound", TEMPLATES + "test_variables_cannot_reach_the_counter"],
    ),
    Sabotage(
        "prompts-cut",
        "F63: a prompt that is too long is cut, when it lies in memory",
        _a_templates_output_is_measured_when_it_is_there,
        [TEMPLATES + "test_a_prompt_has_a_bound"],
    ),
    Sabotage(
        "sandbox-without-limits",
        "F63: a client's template has all of the memory and time",
        _a_clients_template_has_all_memory,
        [f"{SANDBOX}[more memory than it may have]"],
    ),
    Sabotage(
        "gguf-counts-believed",
        "F62: a count is good if the file is large enough, and files are large for nothing",
        _a_count_needs_only_to_fit_into_the_file,
        [HOSTILE + "test_a_large_gguf_file_can_claim_no_more_than_a_model_has[head-1073741824 metadata fields]"],
    ),
    Sabotage(
        "gguf-overlaps",
        "F62: two tensors of a GGUF file may lie in one place",
        _gguf_tensors_may_lie_in_one_place,
        [HOSTILE + "test_two_gguf_tensors_in_one_place_are_refused"],
    ),
    Sabotage(
        "safetensors-overlap",
        "F62: tensors of a safetensors file may overlap, or leave gaps",
        _safetensors_may_overlap,
        [
            HOSTILE + "test_a_safetensors_head_that_cannot_be_is_refused_by_name[header0-b overlaps]",
            HOSTILE + "test_a_safetensors_head_that_cannot_be_is_refused_by_name[header1-b lies behind a gap]",
        ],
    ),
    Sabotage(
        "cut-without-a-word",
        "streams that a stop cuts get no error event, and their number is not logged",
        _cut_streams_without_a_word,
        ["tests/api/test_recovery.py::" + SECOND_STOP],
    ),
]
