"""Deliberate bugs of a new server that takes over from an old one (`onward serve --adopt`), and of processes that a signal
has stopped."""

from collections.abc import Callable
from typing import Any

import msgspec

from onward.engine.handoff.peer_links import PeerLinks
from onward.proto.adoption import MemoryFormat, MemoryReleased
from onward.router.retry_policy import RetryPolicy
from onward.supervisor import adoption_socket, memory_format, stopped_processes, takeover
from onward.supervisor.adoption_socket import AdoptionPeer
from onward.supervisor.children import ProcessRole
from onward.supervisor.core import StartProcess, SupervisorAction, SupervisorCore
from onward.supervisor.predecessor import Predecessor, Release
from onward.supervisor.stopped_processes import StoppedProcesses
from onward.supervisor.successor import SuccessorListener
from onward.supervisor.supervisor import Supervisor
from tests.sabotage.patches import Patches, Sabotage

CORE = "tests/supervisor/test_adoption_of_core.py::"
FORMAT = "tests/supervisor/test_memory_format.py::"
SOCKET = "tests/supervisor/test_adoption_socket.py::"
TAKEOVER = "tests/supervisor/test_takeover.py::"
PEERS = "tests/engine/test_peer_links.py::"
ROUTER = "tests/router/test_replaced_instance.py::"


def _start_a_worker_in_memory_of_the_old_server(patch: Patches) -> None:
    patch.put(SupervisorCore, "_start_worker", lambda self: [StartProcess(ProcessRole.WORKER, 0)])


def _use_memory_that_was_not_released(patch: Patches) -> None:
    def begin(original: Callable, self: SupervisorCore, *, keeps_memory: bool) -> list[SupervisorAction]:
        return original(self, keeps_memory=True)

    patch.around(SupervisorCore, "begin_serving", begin)


def _use_released_memory_again(patch: Patches) -> None:
    def again(original: Callable, self: SupervisorCore, now_s: float, *, keeps_memory: bool) -> list[SupervisorAction]:
        return original(self, now_s, keeps_memory=True)

    patch.around(SupervisorCore, "start_again", again)


def _release_memory_of_a_worker_that_crashed_in_the_shutdown(patch: Patches) -> None:
    def keep(original: Callable, self: SupervisorCore, *worker: Any, has_engine: bool) -> bool:
        return original(self, *worker, has_engine=has_engine) if self.is_running else True

    patch.around(SupervisorCore, "_keep_or_end_memory", keep)


def _give_streams_a_grace_when_replaced(patch: Patches) -> None:
    patch.put(SupervisorCore, "stop_for_successor", lambda self, now_s: self.stop(now_s))


def _keep_suspect_memory(patch: Patches) -> None:
    patch.put(SupervisorCore, "give_up_memory", lambda self, cause: [])


def _ignore_field(name: str) -> Sabotage:
    def apply(patch: Patches) -> None:
        fields = tuple(field for field in MemoryFormat.__struct_fields__ if field != name)
        patch.put(memory_format, "COMPARED_FIELDS", fields)

    return Sabotage(
        f"adopt-whatever-{name.replace('_', '-')}",
        f"memory of another {name} is adopted",
        apply,
        [FORMAT + f"test_each_field_that_differs_is_named[{name}]"],
    )


def _speak_to_every_user(patch: Patches) -> None:
    def trust(original: Callable, sock: Any, message_type: object) -> AdoptionPeer | None:
        own = adoption_socket.os.geteuid
        _, uid, _ = adoption_socket.credentials_of(sock)
        adoption_socket.os.geteuid = lambda: uid
        try:
            return original(sock, message_type)
        finally:
            adoption_socket.os.geteuid = own

    patch.around(adoption_socket, "_checked_peer", trust)


def _use_memory_of_any_name(patch: Patches) -> None:
    def released(original: Callable, self: Predecessor, now_s: float) -> Release | None:
        self._adopted_name = "memory-2"
        return original(self, now_s)

    patch.around(Predecessor, "released", released)


def _release_to_nobody(patch: Patches) -> None:
    patch.around(
        SuccessorListener, "release", lambda original, self, name: original(self, name) or bool(MemoryReleased(name))
    )


def _do_not_wait_for_the_new_server(patch: Patches) -> None:
    patch.put(RetryPolicy, "_has_successor", lambda self, routing: True)


def _take_every_stop_for_good(patch: Patches) -> None:
    def record(original: Callable, self: StoppedProcesses, stopped: Any, now_s: float) -> None:
        original(self, {*stopped, *self._since_s}, now_s)

    patch.around(StoppedProcesses, "record", record)


def _count_the_time_of_a_suspended_supervisor(patch: Patches) -> None:
    patch.put(stopped_processes, "MAX_SAMPLE_GAP_S", float("inf"))


def _let_stopped_processes_be(patch: Patches) -> None:
    patch.put(SupervisorCore, "replace_stopped", lambda self, children: [])


def _ignore_the_stop_of_a_new_server(patch: Patches) -> None:
    patch.put(Supervisor, "_withdraw", lambda self, predecessor: None)


def _do_not_report_a_crashed_standby(patch: Patches) -> None:
    patch.around(Supervisor, "_end_processes", lambda original, self: bool(original(self)) and False)


def _take_over_once_it_was_ready(patch: Patches) -> None:
    patch.put(SupervisorCore, "is_prepared", property(lambda self: self.was_ready))


def _accept_connections_with_the_old_server(patch: Patches) -> None:
    def init(original: Callable, self: PeerLinks, wires: Any, start: Any) -> None:
        original(self, wires, msgspec.structs.replace(start, awaits_turn=False))

    patch.around(PeerLinks, "__init__", init)


def _keep_the_keys_of_the_start(patch: Patches) -> None:
    patch.put(Supervisor, "_reload_keys", lambda self: None)


def _open_the_port_of_the_old_worker(patch: Patches) -> None:
    patch.put(takeover, "needs_port_of_predecessor", lambda predecessor, config, pd: False)


STOPPED = "tests/supervisor/test_stopped_processes.py::"
TABLE = [
    Sabotage(
        "stopped-once-stopped-for-good",
        "a process that was stopped and continues is killed all the same",
        _take_every_stop_for_good,
        [STOPPED + "test_a_process_that_continues_in_between_begins_anew"],
    ),
    Sabotage(
        "stopped-while-suspended",
        "a process is killed because it was stopped together with its supervisor",
        _count_the_time_of_a_suspended_supervisor,
        [STOPPED + "test_what_was_seen_before_the_supervisor_was_suspended_does_not_count"],
    ),
    Sabotage(
        "stopped-left-alone",
        "a process that stays stopped is not replaced",
        _let_stopped_processes_be,
        [STOPPED + "test_a_supervisor_kills_a_process_that_stays_stopped"],
    ),
    Sabotage(
        "adopt-writes-beside-the-old-server",
        "a new server starts a worker with an engine in memory that the old server still writes",
        _start_a_worker_in_memory_of_the_old_server,
        [CORE + "test_only_a_standby_worker_maps_the_memory_of_an_old_server"],
    ),
    Sabotage(
        "adopt-memory-not-released",
        "a new server uses memory although the old one has not released it",
        _use_memory_that_was_not_released,
        [CORE + "test_without_the_memory_a_new_server_begins_with_a_worker_of_its_own"],
    ),
    Sabotage(
        "released-memory-used-again",
        "an old server that starts again uses memory that it has released",
        _use_released_memory_again,
        [CORE + "test_an_old_server_starts_again_when_the_new_one_has_failed[False]"],
    ),
    Sabotage(
        "adopt-after-a-crash-in-the-stop",
        "memory of a worker that crashed while it was told to stop is released",
        _release_memory_of_a_worker_that_crashed_in_the_shutdown,
        [CORE + "test_a_worker_that_dies_of_a_fault_while_it_is_told_to_stop_costs_the_memory"],
    ),
    Sabotage(
        "adopt-after-the-grace",
        "an old server waits for its streams before it hands over",
        _give_streams_a_grace_when_replaced,
        [CORE + "test_an_old_server_ends_its_streams_at_once_and_says_that_it_is_replaced"],
    ),
    Sabotage(
        "adopt-suspect-memory-kept",
        "an old server keeps memory that a new server's worker may have damaged",
        _keep_suspect_memory,
        [CORE + "test_memory_that_a_new_servers_worker_may_have_damaged_is_given_up"],
    ),
    Sabotage(
        "adopt-after-a-stop-signal",
        "a new server that was told to stop goes on with the takeover",
        _ignore_the_stop_of_a_new_server,
        [TAKEOVER + "test_a_new_server_that_is_told_to_stop_leaves_the_address_to_the_old_one[memory released]"],
    ),
    Sabotage(
        "adopt-crash-not-reported",
        "a new server that ends does not report that its standby has crashed",
        _do_not_report_a_crashed_standby,
        [
            TAKEOVER
            + "test_a_new_server_that_ends_for_another_reason_still_reports_the_crash_of_its_standby[told to stop]"
        ],
    ),
    Sabotage(
        "adopt-without-an-engine",
        "a new server takes over while its engine restarts",
        _take_over_once_it_was_ready,
        [CORE + "test_a_new_server_does_not_take_over_while_one_of_its_processes_restarts[ProcessRole.ENGINE]"],
    ),
    Sabotage(
        "adopt-connections-too-early",
        "the engine of a new prefill instance accepts connections while the old server serves",
        _accept_connections_with_the_old_server,
        [PEERS + "test_an_engine_that_awaits_its_turn_leaves_connections_to_the_old_server"],
    ),
    Sabotage(
        "adopt-with-old-keys",
        "a new server accepts a key that was revoked while it started",
        _keep_the_keys_of_the_start,
        [TAKEOVER + "test_a_key_that_was_revoked_while_the_new_server_started_is_refused_by_it"],
    ),
    Sabotage(
        "adopt-port-in-use",
        "a new worker opens the KV port that the old one still has open",
        _open_the_port_of_the_old_worker,
        [TAKEOVER + "test_a_worker_whose_port_is_the_old_ones_starts_as_a_standby"],
    ),
    *map(_ignore_field, MemoryFormat.__struct_fields__),
    Sabotage(
        "adopt-foreign-user",
        "a server hands its memory to processes of other users, and takes theirs",
        _speak_to_every_user,
        [SOCKET + "test_a_connection_of_another_user_is_closed", SOCKET + "test_a_server_of_another_user_is_refused"],
    ),
    Sabotage(
        "adopt-memory-of-another-name",
        "a new server uses memory that the old one gave up after it had offered it",
        _use_memory_of_any_name,
        [SOCKET + "test_memory_of_another_name_than_the_offered_one_is_not_used"],
    ),
    Sabotage(
        "released-to-nobody",
        "an old server ends although the new one is gone",
        _release_to_nobody,
        [SOCKET + "test_a_new_server_that_is_gone_gets_no_memory"],
    ),
    Sabotage(
        "replaced-stream-does-not-wait",
        "a router sends a stream elsewhere while a new server takes over",
        _do_not_wait_for_the_new_server,
        [ROUTER + "test_a_stream_waits_for_the_new_server_although_another_instance_is_ready"],
    ),
]
