"""Deliberate bugs about files and batches: answers after a kill, and whose files they are."""

from collections.abc import Callable
from typing import Any

import msgspec

from onward.api import app as api_app
from onward.batches import app_sender, batch_files, batch_routes, batch_service, batch_store, file_endpoints
from onward.batches.batch_files import BatchOutputFile
from onward.batches.batch_results import BatchResults
from onward.batches.batch_service import BatchService
from onward.batches.batch_store import BatchStore
from onward.batches.caller_turns import CallerTurns, complete_in_thread
from onward.batches.model_waits import ModelWaits
from onward.proto.engine import ErrorInfo
from onward.web.auth import cross_site
from onward.web.auth.api_key_table import Caller
from onward.web.auth.cross_site import CrossSiteGuard
from tests.sabotage.patches import Patches, Sabotage

KILLS = "tests/api/test_batches_after_kills.py::"
TENANTS = "tests/api/test_batch_tenants.py::"
SERVICE = "tests/batches/test_batch_service.py::"
BATCHES = "tests/api/test_batches.py::"
LATE_MODEL = "test_after_a_restart_a_batch_waits_for_a_model_that_registers_later_than_others"
TAKEOVER = "test_another_process_takes_over_when_the_one_that_runs_a_batch_is_killed"


def _the_server_chooses_another_seed_each_time(patch: Patches) -> None:
    patch.put(app_sender, "with_seed", lambda request, _: request)


def _results_of_earlier_runs_are_forgotten(patch: Patches) -> None:
    patch.put(BatchResults, "has", lambda self, custom_id: False)


def _a_partial_line_is_kept(patch: Patches) -> None:
    def keep(self: BatchOutputFile) -> None:
        if self.num_bytes and not self._path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")

    patch.put(BatchOutputFile, "_truncate_partial_line", keep)


def _the_end_is_decided_again(patch: Patches) -> None:
    def run(original: Callable, self: Any) -> Any:
        self._record = msgspec.structs.replace(self._record, ending=None)
        return original(self)

    patch.around(batch_service._Run, "run", run)


def _a_process_runs_batches_without_the_lock(patch: Patches) -> None:
    patch.put(BatchStore, "try_lock_runner", lambda self: (self._root / "unlocked").open("ab"))


def _any_key_may_see_any_file(patch: Patches) -> None:
    patch.put(batch_store, "owns_request_id", lambda caller, _: True)
    patch.put(batch_store, "may_access", lambda caller, _: True)

    def find(original: Callable, self: BatchStore, caller: Caller, *rest: Any) -> Any:
        return original(self, Caller(caller.name, "admin"), *rest)

    patch.around(BatchStore, "_find", find)


def _batches_run_as_nobody(patch: Patches) -> None:
    patch.put(batch_service, "caller_of_batches", lambda caller: Caller("", "user"))


def _batches_have_the_priority_of_other_requests(patch: Patches) -> None:
    patch.put(batch_service, "caller_of_batches", lambda caller: caller)


def _results_have_no_limit(patch: Patches) -> None:
    def add(self: BatchResults, result: batch_files.BatchResult) -> None:
        (self._errors if result.failed else self._output).add(result)

    patch.put(BatchResults, "add", add)


def _a_removed_key_goes_on(patch: Patches) -> None:
    def early_end(original: Callable, self: Any) -> Any:
        self._active_keys = type("Keys", (), {"keys": type("Table", (), {"named": lambda _, name: Caller(name)})()})()
        return original(self)

    patch.around(batch_service._Run, "_early_end", early_end)


def _models_are_known_at_once(patch: Patches) -> None:
    patch.put(batch_routes, "MODEL_GRACE_S", 0.0)


def _forms_are_accepted_anywhere(patch: Patches) -> None:
    def check(original: Callable, scope: Any) -> ErrorInfo | None:
        refusal = original(scope)
        content_type = dict(scope["headers"]).get(b"content-type", b"")
        return None if content_type.startswith(b"multipart/") else refusal

    patch.around(api_app, "check_content_type", check)


def _the_origin_of_a_form_is_not_checked(patch: Patches) -> None:
    def refusal(original: Callable, self: CrossSiteGuard, scope: Any) -> ErrorInfo | None:
        return None if scope["path"] == cross_site.FILES_PATH else original(self, scope)

    patch.around(CrossSiteGuard, "refusal", refusal)


def _a_file_s_own_type_is_sent(patch: Patches) -> None:
    original = file_endpoints.StreamingResponse
    patch.put(file_endpoints, "StreamingResponse", lambda chunks, headers, media_type: original(chunks))


def _results_are_not_synced(patch: Patches) -> None:
    patch.put(BatchResults, "sync", lambda self: None)


def _blank_lines_have_no_limit(patch: Patches) -> None:
    patch.put(batch_files, "MAX_BLANK_LINES", 1 << 40)


def _only_the_oldest_batch_may_end(patch: Patches) -> None:
    patch.put(BatchService, "_is_over", lambda self, record: False)


def _callers_take_no_turns(patch: Patches) -> None:
    patch.put(CallerTurns, "run", lambda self, caller, call, *args: complete_in_thread(call, *args))


def _a_model_that_has_answered_is_not_remembered(patch: Patches) -> None:
    patch.put(ModelWaits, "add_answer", lambda self, model: None)


TABLE = [
    Sabotage(
        "batch-unsynced",
        "a loss of power leaves a completed batch without all its answers",
        _results_are_not_synced,
        [SERVICE + "test_results_are_on_disk_before_a_record_says_that_the_batch_has_ended"],
    ),
    Sabotage(
        "batch-blank-lines",
        "a file of blank lines occupies the server",
        _blank_lines_have_no_limit,
        [SERVICE + "test_a_file_of_blank_lines_is_refused"],
    ),
    Sabotage(
        "batch-waiting-cancelled",
        "a batch that waits behind another one cannot be cancelled",
        _only_the_oldest_batch_may_end,
        [SERVICE + "test_batches_that_wait_are_cancelled_and_expire_without_their_turn"],
    ),
    Sabotage(
        "batch-caller-turns",
        "one caller occupies all threads of the pool",
        _callers_take_no_turns,
        ["tests/batches/test_caller_turns.py::test_a_caller_that_waits_for_its_lock_occupies_one_thread"],
    ),
    Sabotage(
        "batch-model-restart",
        "requests of a batch fail while the last instance of their model restarts",
        _a_model_that_has_answered_is_not_remembered,
        [SERVICE + "test_a_model_that_has_answered_in_a_batch_is_waited_for_and_one_that_never_has_for_a_while[False]"],
    ),
    Sabotage(
        "batch-seed",
        "a request of a batch that is sent again has another answer",
        _the_server_chooses_another_seed_each_time,
        [KILLS + TAKEOVER],
    ),
    Sabotage(
        "batch-results-forgotten",
        "a batch that goes on after a kill has answers twice",
        _results_of_earlier_runs_are_forgotten,
        [KILLS + TAKEOVER],
    ),
    Sabotage(
        "batch-partial-line",
        "a line that was cut by a kill stays in the output of a batch",
        _a_partial_line_is_kept,
        ["tests/batches/test_batch_results.py::test_a_line_that_was_cut_is_no_result_and_is_removed"],
    ),
    Sabotage(
        "batch-end-decided-again",
        "a process that takes over decides anew how a batch has ended",
        _the_end_is_decided_again,
        [KILLS + "test_a_process_that_takes_over_while_a_batch_is_finished_finishes_it"],
    ),
    Sabotage(
        "batch-without-lock",
        "several processes run the same batch",
        _a_process_runs_batches_without_the_lock,
        [KILLS + TAKEOVER],
    ),
    Sabotage(
        "batch-of-others",
        "a caller reads another caller's files and batches",
        _any_key_may_see_any_file,
        [TENANTS + "test_a_caller_sees_its_own_files_and_batches_only_and_an_admin_all"],
    ),
    Sabotage(
        "batch-as-nobody",
        "requests of a batch count for no caller",
        _batches_run_as_nobody,
        [TENANTS + "test_requests_of_a_batch_are_their_caller_s"],
    ),
    Sabotage(
        "batch-priority",
        "requests of a batch are served like those of clients that wait",
        _batches_have_the_priority_of_other_requests,
        [BATCHES + "test_requests_of_a_batch_have_a_low_priority"],
    ),
    Sabotage(
        "batch-results-unlimited",
        "the results of a batch fill the disk",
        _results_have_no_limit,
        [TENANTS + "test_a_batch_whose_results_would_be_too_large_fails_and_keeps_those_it_has"],
    ),
    Sabotage(
        "batch-removed-key",
        "a batch goes on although its key was removed",
        _a_removed_key_goes_on,
        [TENANTS + "test_a_batch_of_a_key_that_is_removed_fails_and_runs_nothing_more"],
    ),
    Sabotage(
        "batch-late-model",
        "after a restart, requests fail whose model registers later than others",
        _models_are_known_at_once,
        ["tests/router/test_batches.py::" + LATE_MODEL],
    ),
    Sabotage(
        "forms-anywhere",
        "pages of other sites can send forms to every route",
        _forms_are_accepted_anywhere,
        [BATCHES + "test_forms_are_accepted_for_files_only"],
    ),
    Sabotage(
        "form-origin",
        "pages of other sites can upload files to a server without keys",
        _the_origin_of_a_form_is_not_checked,
        [BATCHES + "test_a_form_of_another_site_s_page_is_refused"],
    ),
    Sabotage(
        "file-as-page",
        "a browser shows a caller's file as a page of the server",
        _a_file_s_own_type_is_sent,
        [BATCHES + "test_a_downloaded_file_is_never_shown_as_a_page"],
    ),
]
