"""Deliberate bugs of the supervisor's rules: which process is started, killed and informed, and when."""

import os
import socket
from collections.abc import Callable
from typing import Any

from onward.proto.control import ApiGone, EngineGone, EngineUp, StreamStoreUp, WorkerGone
from onward.proto.worker_wire_address import ShmWireAddress
from onward.supervisor import core
from onward.supervisor.child_process import ChildProcess
from onward.supervisor.children import Child, ProcessRole
from onward.supervisor.core import Phase, RemoveProcess, SendMessage, SupervisorCore
from onward.supervisor.restart_policy import RestartPolicy
from onward.supervisor.supervisor import Supervisor
from onward.transport import shm_wire
from tests.sabotage.patches import Patches, Sabotage

CORE = "tests/supervisor/test_core.py::"
FOUND = "tests/sim/test_regressions.py::"
RESTARTS = "tests/supervisor/test_restarts.py::"


def _without_messages(patch: Patches, name: str, kind: type) -> None:
    """The method `name` of the core sends no message of this kind."""

    def filtered(original: Callable, *args: Any, **named: Any) -> list:
        return [a for a in original(*args, **named) if not (isinstance(a, SendMessage) and isinstance(a.message, kind))]

    patch.around(SupervisorCore, name, filtered)


def _keep_a_dead_engine_s_worker(patch: Patches) -> None:
    def announce(original: Callable, self: SupervisorCore, child: Child, *args: Any, **named: Any) -> list:
        workers = self.children_of(ProcessRole.WORKER) if child.role is ProcessRole.ENGINE else []
        actions = original(self, child, *args, **named)
        self.children.update((worker.incarnation, worker) for worker in workers)
        return [action for action in actions if not isinstance(action, RemoveProcess)]

    patch.around(SupervisorCore, "_announce_exit", announce)


def _never_restart_workers(patch: Patches) -> None:
    def restart_due(original: Callable, self: SupervisorCore, now_s: float) -> list:
        self._restart_at_s.pop((ProcessRole.WORKER, 0), None)
        return original(self, now_s)

    patch.around(SupervisorCore, "_restart_due", restart_due)


def _restart_without_delay(patch: Patches) -> None:
    patch.put(RestartPolicy, "record_death", lambda self, now_s, progress, isolated_request_id: 0.0)


def _count_every_death_under_an_isolated_request(patch: Patches) -> None:
    patch.put(SupervisorCore, "_isolated_request_of", lambda self, child: None)


def _count_no_death_under_an_isolated_request(patch: Patches) -> None:
    def record_death(
        original: Callable, self: RestartPolicy, now_s: float, progress: int, isolated_request_id: str | None = None
    ) -> float:
        return original(self, now_s, progress, isolated_request_id and "any")

    patch.around(RestartPolicy, "record_death", record_death)


def _judge_a_worker_s_death_before_the_engine_s_announcement(patch: Patches) -> None:
    def reap(original: Callable, self: Supervisor) -> None:
        dead = {child for child, process in self._processes.items() if process.process.poll() is not None}
        read_messages = self._read_messages
        self._read_messages = lambda child: read_messages(child) if child in dead else None
        try:
            original(self)
        finally:
            del self._read_messages

    patch.around(Supervisor, "_reap", reap)


def _one_policy_for_all_processes(patch: Patches) -> None:
    def init(original: Callable, self: SupervisorCore, *args: Any) -> None:
        original(self, *args)
        self._stream_store_restart_policy = self._restart_policy

    patch.around(SupervisorCore, "__init__", init)


def _announce_a_dead_worker_to_no_engine(patch: Patches) -> None:
    _without_messages(patch, "_announce_exit", WorkerGone)


def _announce_a_dead_engine_to_no_api_process(patch: Patches) -> None:
    _without_messages(patch, "_announce_exit", EngineGone)


def _announce_a_dead_api_process_to_nobody(patch: Patches) -> None:
    _without_messages(patch, "_announce_exit", ApiGone)


def _start_api_processes_without_the_engine_s_address(patch: Patches) -> None:
    _without_messages(patch, "on_started", EngineUp)


def _announce_no_new_stream_store(patch: Patches) -> None:
    _without_messages(patch, "on_started", StreamStoreUp)


def _let_processes_be_silent(patch: Patches) -> None:
    patch.put(SupervisorCore, "_unresponsive", lambda self, now_s: [])


def _judge_by_silence_while_suspended(patch: Patches) -> None:
    patch.put(core, "SUSPENDED_AFTER_S", float("inf"))


def _replace_any_worker(patch: Patches) -> None:
    def on_message(original: Callable, self: SupervisorCore, child: Child, message: Any, now_s: float) -> list:
        if isinstance(message, core.ReplaceWorker):
            return [core.KillProcess(worker, message.cause) for worker in self.children_of(ProcessRole.WORKER)]
        return original(self, child, message, now_s)

    patch.around(SupervisorCore, "on_message", on_message)


def _give_streams_their_grace_at_a_second_signal(patch: Patches) -> None:
    def stop(original: Callable, self: SupervisorCore, now_s: float) -> list:
        return [] if self.phase is Phase.STOPPING_APIS else original(self, now_s)

    patch.around(SupervisorCore, "stop", stop)


def _wait_for_processes_that_start(patch: Patches) -> None:
    def stop_role(original: Callable, self: SupervisorCore, role: ProcessRole, grace_s: float) -> list:
        return [SendMessage(child, core.StopChild(grace_s)) for child in self.children_of(role)]

    patch.around(SupervisorCore, "_stop_role", stop_role)


def _leave_a_worker_that_could_not_be_told_to_start(patch: Patches) -> None:
    def discard(original: Callable, self: ChildProcess) -> None:
        self.close()
        self.process.returncode = 0  # no warning that it still runs

    patch.around(ChildProcess, "discard", discard)


def _leave_memory_of_a_wire_that_failed(patch: Patches) -> None:
    def create_ring(original: Callable, address: ShmWireAddress) -> tuple[int, socket.socket, socket.socket]:
        fd = os.memfd_create("onward", os.MFD_CLOEXEC)
        os.ftruncate(fd, shm_wire.ring_layout(address).memory_bytes)
        return fd, *socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    patch.around(shm_wire, "create_ring", create_ring)


NO_START = "tests/supervisor/test_no_start.py::"

TABLE = [
    Sabotage(
        "worker-left-unwatched",
        "a worker that could not be told to start is left running",
        _leave_a_worker_that_could_not_be_told_to_start,
        [NO_START + "test_a_worker_that_cannot_be_told_to_start_is_ended_and_leaves_nothing"],
    ),
    Sabotage(
        "wire-memory-leaks",
        "the memory of a wire stays open if its sockets are refused",
        _leave_memory_of_a_wire_that_failed,
        [NO_START + "test_a_wire_that_the_system_does_not_allow_leaves_nothing[1]"],
    ),
    Sabotage(
        "worker-outlives-its-engine",
        "the worker of a dead engine goes on beside the next one",
        _keep_a_dead_engine_s_worker,
        [CORE + "test_the_worker_of_a_dead_engine_is_gone_before_the_next_engine_starts"],
    ),
    Sabotage(
        "worker-not-restarted",
        "a worker that died is not replaced",
        _never_restart_workers,
        [CORE + "test_the_engine_is_informed_of_a_dead_worker_before_the_next_one_starts"],
    ),
    Sabotage(
        "restart-without-delay",
        "a process that dies again and again is restarted at once each time",
        _restart_without_delay,
        [
            CORE + "test_restarts_are_delayed_more_and_more_and_progress_ends_the_delay",
            RESTARTS + "test_the_first_death_is_answered_at_once_and_later_ones_more_slowly",
        ],
    ),
    Sabotage(
        "isolated-deaths-counted-singly",
        "every death under an isolated request counts towards the cool-down, which comes before the request is refused",
        _count_every_death_under_an_isolated_request,
        [
            CORE + "test_deaths_of_engine_or_worker_under_isolated_requests_bring_no_cool_down",
            FOUND + "test_what_was_found_does_not_happen_again[deaths_under_isolated_requests_bring_a_cool_down]",
        ],
    ),
    Sabotage(
        "isolated-deaths-not-counted",
        "an instance under which every isolated request dies never cools down",
        _count_no_death_under_an_isolated_request,
        [RESTARTS + "test_five_isolated_requests_that_die_one_after_the_other_bring_a_cool_down"],
    ),
    Sabotage(
        "worker-death-before-announcement",
        "a worker's death is judged before the engine's announcement of an isolated request is read",
        _judge_a_worker_s_death_before_the_engine_s_announcement,
        [RESTARTS + "test_the_engine_s_announcement_is_read_before_the_death_of_its_worker_is_judged"],
    ),
    Sabotage(
        "stream-store-delays-others",
        "deaths of the stream store delay the restart of the other processes",
        _one_policy_for_all_processes,
        [CORE + "test_a_stream_store_that_dies_often_does_not_delay_the_others"],
    ),
    Sabotage(
        "worker-death-not-announced",
        "the engine is not informed that its worker died",
        _announce_a_dead_worker_to_no_engine,
        [CORE + "test_the_engine_is_informed_of_a_dead_worker_before_the_next_one_starts"],
    ),
    Sabotage(
        "engine-death-not-announced",
        "api processes are not informed that the engine died",
        _announce_a_dead_engine_to_no_api_process,
        [CORE + "test_the_worker_of_a_dead_engine_is_gone_before_the_next_engine_starts"],
    ),
    Sabotage(
        "api-death-not-announced",
        "engine and stream store are not informed that an api process died",
        _announce_a_dead_api_process_to_nobody,
        [CORE + "test_engine_and_stream_store_are_informed_of_a_dead_api_process"],
    ),
    Sabotage(
        "api-without-engine",
        "an api process that starts later is not told of the engine",
        _start_api_processes_without_the_engine_s_address,
        [CORE + "test_an_api_process_that_starts_later_is_told_of_stream_store_engine_and_drain"],
    ),
    Sabotage(
        "stream-store-not-announced",
        "api processes are not told of a new stream store",
        _announce_no_new_stream_store,
        [CORE + "test_api_processes_are_informed_of_a_dead_stream_store_and_of_the_next_one"],
    ),
    Sabotage(
        "silence-tolerated",
        "a process that stops answering is left alone",
        _let_processes_be_silent,
        [CORE + "test_a_process_that_stops_answering_is_killed"],
    ),
    Sabotage(
        "suspended-counts-as-silence",
        "a supervisor that was suspended kills all processes for their silence meanwhile",
        _judge_by_silence_while_suspended,
        [CORE + "test_a_supervisor_that_was_suspended_kills_no_process_for_its_silence_meanwhile"],
    ),
    Sabotage(
        "any-worker-replaced",
        "a late request to replace a worker ends its successor",
        _replace_any_worker,
        [CORE + "test_the_engine_may_ask_for_another_worker_and_only_for_its_present_one"],
    ),
    Sabotage(
        "second-signal-waits",
        "a second signal leaves the streams their grace period",
        _give_streams_their_grace_at_a_second_signal,
        [CORE + "test_a_second_signal_leaves_the_api_processes_no_grace"],
    ),
    Sabotage(
        "starting-processes-waited-for",
        "a stop waits for a process that is still starting",
        _wait_for_processes_that_start,
        [CORE + "test_a_process_that_is_still_starting_is_killed_instead_of_asked"],
    ),
]
