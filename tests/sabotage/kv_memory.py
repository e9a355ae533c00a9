"""Deliberate bugs of KV memory that outlives workers and engines: which deaths keep it, and what is found in it."""

import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from onward.engine.core import EngineCore
from onward.engine.handoff.remote_prefill import RemotePrefillClient
from onward.engine.request import Request
from onward.engine.scheduling import persisted_block_hashes
from onward.engine.scheduling.block_pool import BlockPool
from onward.engine.scheduling.outgoing_handoffs import OutgoingHandoffs
from onward.engine.scheduling.peer_write_leases import PeerWriteLeases
from onward.engine.scheduling.persisted_block_hashes import PersistedBlockHashes
from onward.engine.scheduling.scheduler import Scheduler
from onward.engine.scheduling.slot_and_block_allocator import SlotAndBlockAllocator, SlotPool
from onward.pd.transfer import shm_backend
from onward.pd.transfer.backend import RemoteMemoryInfo
from onward.pd.transfer.shm_backend import ShmSenderBackend
from onward.proto.block_hash import BLOCK_HASH_BYTES, BlockHash
from onward.proto.step import WorkerHello
from onward.supervisor import core, supervisor
from onward.supervisor.child_process import ChildProcess
from onward.supervisor.children import Child, ChildState, ProcessRole
from onward.supervisor.core import SupervisorCore
from onward.supervisor.kv_memory_owner import KvMemoryOwner
from onward.supervisor.pd_config import PdConfig
from onward.supervisor.worker_deaths import WorkerDeath, keeps_memory
from onward.worker import kv_pool
from onward.worker.cpu_device import CpuDevice
from tests.sabotage.patches import Patches, Sabotage

DEATHS = "tests/supervisor/test_worker_deaths.py::"
ENGINE = "tests/engine/test_kept_memory.py::"
HASHES = "tests/engine/test_persisted_block_hashes.py::"
OWNER = "tests/supervisor/test_kv_memory_owner.py::"
WORKER = "tests/worker/test_kept_memory.py::"
STANDBY = "tests/supervisor/test_standby.py::"


def _flip(death: WorkerDeath) -> Callable[[Patches], None]:
    def apply(patch: Patches) -> None:
        patch.around(core, "keeps_memory", lambda original, other: original(other) != (other is death))

    return apply


def _flip_row(death: WorkerDeath) -> Sabotage:
    name = death.name.lower()
    verb = "ends" if keeps_memory(death) else "keeps"
    return Sabotage(
        f"memory-of-{name.replace('_', '-')}",
        f"a worker's death {verb} its KV memory: {death.value}",
        _flip(death),
        [DEATHS + f"test_the_next_worker_gets_the_memory_if_this_death_keeps_it[{name}]"],
    )


def _ignore_why_the_supervisor_killed(patch: Patches) -> None:
    def classify(original: Callable, return_code: int, kill_reason: object, **circumstances: bool) -> WorkerDeath:
        return original(return_code, None, **circumstances)

    patch.around(core, "classify_death", classify)


def _do_not_look_how_the_worker_of_a_dead_engine_ended(patch: Patches) -> None:
    patch.put(SupervisorCore, "on_removed", lambda self, child, return_code, *, peer_may_write=False: None)


def _keep_the_memory_of_an_engine_that_died_while_starting(patch: Patches) -> None:
    def on_exit(original: Callable, self: SupervisorCore, child: Child, *args: Any, **named: bool) -> list:
        if child.role is ProcessRole.ENGINE:
            child.state = ChildState.READY
        return original(self, child, *args, **named)

    patch.around(SupervisorCore, "on_exit", on_exit)


def _keep_memory_however_often_workers_die(patch: Patches) -> None:
    patch.put(core, "MEMORY_DOUBT_DELAY_S", float("inf"))


def _activate_a_standby_with_other_memory(patch: Patches) -> None:
    def start_worker(original: Callable, self: SupervisorCore) -> list:
        standby = self._ready(ProcessRole.STANDBY)
        return [core.ActivateStandby(standby[0])] if standby else original(self)

    patch.around(SupervisorCore, "_start_worker", start_worker)


def _never_activate_a_standby(patch: Patches) -> None:
    patch.put(SupervisorCore, "_start_worker", lambda self: [core.StartProcess(ProcessRole.WORKER, 0)])


def _forgive_a_crashed_standby(patch: Patches) -> None:
    def on_standby_exit(original: Callable, self: SupervisorCore, standby: Child, *args: Any) -> list:
        original(self, standby, *args)
        return []

    patch.around(SupervisorCore, "_on_standby_exit", on_standby_exit)


def _start_no_second_standby(patch: Patches) -> None:
    def on_activated(original: Callable, self: SupervisorCore, child: Child, now_s: float) -> None:
        original(self, child, now_s)
        self.give_up_standby()

    patch.around(SupervisorCore, "on_activated", on_activated)


def _wait_for_an_activated_standby_for_ever(patch: Patches) -> None:
    patch.put(core, "ACTIVATION_TIMEOUT_S", float("inf"))


def _leave_the_standby_at_a_shutdown(patch: Patches) -> None:
    patch.put(SupervisorCore, "_remove_standby", lambda self: [])


def _keep_memory_that_is_not_owned(patch: Patches) -> None:
    def keep(original: Callable, self: SupervisorCore, *args: Any, **named: Any) -> bool:
        original(self, *args, **named)
        return True

    patch.around(SupervisorCore, "_keep_or_end_memory", keep)


def _keep_what_was_planned(patch: Patches) -> None:
    def reassign(original: Callable, self: SlotAndBlockAllocator, request: Request) -> None:
        request.num_computed = min(request.planned_computed, len(request.token_ids) - 1)
        original(self, request)

    patch.around(SlotAndBlockAllocator, "reassign", reassign)


def _keep_old_epochs(patch: Patches) -> None:
    def reassign(original: Callable, self: SlotAndBlockAllocator, request: Request) -> None:
        request.planned_runs.clear()

    patch.around(SlotAndBlockAllocator, "reassign", reassign)


def _leave_fences(patch: Patches) -> None:
    for owner in (BlockPool, SlotPool):
        patch.around(owner, "lift_fences", lambda original, self, step: None if step is None else original(self, step))


def _leave_preempting_requests(patch: Patches) -> None:
    def detach(original: Callable, self: Scheduler) -> None:
        preempting, self.preempting = self.preempting, type(self.preempting)()
        original(self)
        self.preempting = preempting

    patch.around(Scheduler, "detach_worker", detach)


def _go_on_with_means(patch: Patches) -> None:
    def detach(original: Callable, self: Scheduler) -> None:
        means = [request for request in self.running if request.spec.sampling_params.pooling == "mean"]
        for request in means:
            self.running.remove(request)
        original(self)
        for request in means:
            self.allocator.reassign(request)
            self.running.add(request)

    patch.around(Scheduler, "detach_worker", detach)


def _drop_prompt_logprobs(patch: Patches) -> None:
    def reassign(original: Callable, self: SlotAndBlockAllocator, request: Request) -> None:
        request.prompt_logprobs = None
        original(self, request)

    patch.around(SlotAndBlockAllocator, "reassign", reassign)


def _charge_nobody_for_a_kill(patch: Patches) -> None:
    def lost(original: Callable, self: EngineCore, now_s: float, *, keeps_memory: bool = False) -> None:
        if keeps_memory:
            self.scheduler.steps_in_flight.clear()
        original(self, now_s, keeps_memory=keeps_memory)

    patch.around(EngineCore, "on_worker_lost", lost)


def _trust_the_promise_of_memory(patch: Patches) -> None:
    def ready(original: Callable, self: EngineCore, worker: WorkerHello, now_s: float, *args: Any) -> None:
        if self._kv_memory:
            self._kv_memory = worker.kv_memory
        original(self, worker, now_s, *args)

    patch.around(EngineCore, "on_worker_ready", ready)


def _never_break_seals(patch: Patches) -> None:
    patch.put(PersistedBlockHashes, "break_seal", lambda self, block: None)


def _adopt_torn_rows(patch: Patches) -> None:
    def sealed(original: Callable, self: PersistedBlockHashes) -> Iterator[tuple[int, BlockHash]]:
        row_bytes = persisted_block_hashes.table_bytes(1)
        for block in range(self._num_blocks):
            block_hash = bytes(self._rows[block * row_bytes : block * row_bytes + BLOCK_HASH_BYTES])
            if any(block_hash):
                yield block, block_hash

    patch.around(PersistedBlockHashes, "sealed", sealed)


def _adopt_nothing(patch: Patches) -> None:
    patch.put(BlockPool, "_adopt", lambda self, persisted_hashes: None)


def _adopt_free_blocks(patch: Patches) -> None:
    def adopt(original: Callable, self: BlockPool, persisted_hashes: PersistedBlockHashes) -> None:
        free = self._free
        original(self, persisted_hashes)
        self._free = free

    patch.around(BlockPool, "_adopt", adopt)


def _warm_up_in_block_0(patch: Patches) -> None:
    patch.put(CpuDevice, "scratch_block", property(lambda self: 0))


def _count_existing_memory_against_free_memory(patch: Patches) -> None:
    patch.around(kv_pool, "num_blocks_in", lambda original, *args: 0)


def _keep_ended_memory_open(patch: Patches) -> None:
    def close_kv(original: Callable, self: KvMemoryOwner) -> None:
        self._fds, self._name = None, ""

    patch.around(KvMemoryOwner, "_close_kv", close_kv)


def _attach_one_memory_for_ever(patch: Patches) -> None:
    def fds_of(original: Callable, self: KvMemoryOwner, name: str) -> object:
        return original(self, self._name or name)

    patch.around(KvMemoryOwner, "fds_of", fds_of)


def _keep_memory_that_a_peer_may_write(patch: Patches) -> None:
    def classify(original: Callable, *args: Any, peer_may_write: bool = False, **named: bool) -> WorkerDeath:
        return original(*args, **named)

    patch.around(core, "classify_death", classify)


def _forget_peers_of_a_dead_engine_s_worker(patch: Patches) -> None:
    def on_removed(
        original: Callable, self: SupervisorCore, child: Child, return_code: int, *, peer_may_write: bool = False
    ) -> None:
        original(self, child, return_code)

    patch.around(SupervisorCore, "on_removed", on_removed)


def _hand_over_memory_that_a_peer_may_write(patch: Patches) -> None:
    def on_exit(original: Callable, self: SupervisorCore, *args: Any, peer_may_write: bool = False) -> object:
        return original(self, *args, peer_may_write=peer_may_write and self.is_running)

    patch.around(SupervisorCore, "on_exit", on_exit)


def _leave_quarantined_blocks(patch: Patches) -> None:
    patch.put(PeerWriteLeases, "release_revoked", PeerWriteLeases.reset)


def _leave_blocks_of_stopping_pushes(patch: Patches) -> None:
    patch.put(OutgoingHandoffs, "release_stopping", OutgoingHandoffs.reset)


def _go_on_with_handoffs(patch: Patches) -> None:
    def on_worker_lost(original: Callable, self: RemotePrefillClient, now_s: float) -> None:
        pass

    patch.around(RemotePrefillClient, "on_worker_lost", on_worker_lost)


def _close_the_token_at_once(patch: Patches) -> None:
    def init(original: Callable, self: ShmSenderBackend, *args: Any) -> None:
        original(self, *args)
        self._close_writer_token()

    patch.around(ShmSenderBackend, "__init__", init)


def _never_close_the_token(patch: Patches) -> None:
    patch.put(ShmSenderBackend, "_close_writer_token", lambda self: None)


def _map_memory_without_its_token(patch: Patches) -> None:
    def map_remote(original: Callable, invitation: RemoteMemoryInfo) -> mmap.mmap:
        return original(invitation._replace(fds=(invitation.fds * 2)[:2]))

    patch.around(shm_backend, "_map_remote", map_remote)


def _give_peers_no_token(patch: Patches) -> None:
    def spawn_worker(original: Callable, role: ProcessRole, start: object, fds: tuple, pd: PdConfig) -> ChildProcess:
        return original(role, start, fds, replace(pd, kv_backend=None))

    patch.around(supervisor, "spawn_worker", spawn_worker)


LATE_WRITES = "tests/pd/transfer/test_late_writes.py::"
PEERS = "tests/engine/test_kept_memory_of_peers.py::"
PEERS_E2E = "tests/e2e/test_kept_memory_of_peers.py::"

TABLE = [
    Sabotage(
        "late-writes-reach-kept-memory",
        "memory that a peer may still write is kept",
        _keep_memory_that_a_peer_may_write,
        [DEATHS + "test_the_next_worker_gets_the_memory_if_this_death_keeps_it[peer_may_write]"],
    ),
    Sabotage(
        "late-writes-behind-an-engine",
        "memory of a worker whose engine died is kept although a peer may still write it",
        _forget_peers_of_a_dead_engine_s_worker,
        [DEATHS + "test_memory_ends_if_a_peer_may_still_write_that_of_the_worker_of_a_dead_engine"],
    ),
    Sabotage(
        "late-writes-behind-a-new-server",
        "memory is handed over to a new server although a peer may still write it",
        _hand_over_memory_that_a_peer_may_write,
        ["tests/supervisor/test_adoption_of_core.py::test_memory_that_a_peer_may_still_write_is_not_handed_over"],
    ),
    Sabotage(
        "quarantine-outlives-worker",
        "quarantined blocks stay so when their worker is dead and its writers are quiet",
        _leave_quarantined_blocks,
        [PEERS + "test_blocks_of_a_revoked_lease_are_free_again_when_the_worker_is_dead_and_its_writers_are_quiet"],
    ),
    Sabotage(
        "sending-outlives-worker",
        "blocks of a push stay in its hands when the worker that pushed is dead",
        _leave_blocks_of_stopping_pushes,
        [PEERS + "test_a_stopping_push_is_over_with_its_worker"],
    ),
    Sabotage(
        "leases-outlive-worker",
        "a decode engine goes on with leases of a dead worker whose memory is kept",
        _go_on_with_handoffs,
        [
            PEERS + "test_a_decode_worker_s_death_costs_running_streams_the_steps_in_flight_and_ends_every_lease",
            PEERS + "test_the_request_whose_lease_ended_asks_its_peer_again",
        ],
    ),
    Sabotage(
        "token-closed-early",
        "a writer gives its token back while it has the memory mapped",
        _close_the_token_at_once,
        [LATE_WRITES + "test_a_writer_keeps_its_token_until_it_has_unmapped_the_memory"],
    ),
    Sabotage(
        "token-never-closed",
        "a writer keeps its token for ever",
        _never_close_the_token,
        [
            LATE_WRITES + "test_a_writer_keeps_its_token_until_it_has_unmapped_the_memory",
            LATE_WRITES + "test_a_writer_that_cannot_map_the_memory_gives_its_token_back",
        ],
    ),
    Sabotage(
        "token-not-needed",
        "a writer maps memory although its token has not come",
        _map_memory_without_its_token,
        [LATE_WRITES + "test_a_writer_that_got_the_memory_without_the_token_does_not_map_it"],
    ),
    Sabotage(
        "no-token-for-peers",
        "peers of a decode worker get no token, so a late one is not noticed",
        _give_peers_no_token,
        [PEERS_E2E + "test_memory_that_a_stopped_peer_has_mapped_is_given_up_and_its_late_write_changes_nothing"],
    ),
    *map(_flip_row, WorkerDeath),
    Sabotage(
        "kill-reason-ignored",
        "a worker that the supervisor has killed for its silence keeps its memory, as one killed from outside",
        _ignore_why_the_supervisor_killed,
        [
            DEATHS + "test_the_next_worker_gets_the_memory_if_this_death_keeps_it[silent]",
            DEATHS + "test_the_next_worker_gets_the_memory_if_this_death_keeps_it[replaced]",
            DEATHS + "test_memory_ends_if_the_worker_of_a_dead_engine_was_to_be_killed_for_its_silence",
        ],
    ),
    Sabotage(
        "crash-hidden-by-engine",
        "memory of a crashed worker is kept if its engine dies before the worker is reaped",
        _do_not_look_how_the_worker_of_a_dead_engine_ended,
        [DEATHS + "test_memory_ends_if_the_worker_of_a_dead_engine_had_died_of_a_fault_before"],
    ),
    Sabotage(
        "starting-engine-keeps-memory",
        "an engine that dies while it starts leaves its memory to the next one",
        _keep_the_memory_of_an_engine_that_died_while_starting,
        [DEATHS + "test_memory_ends_if_an_engine_fails_while_it_starts"],
    ),
    Sabotage(
        "dying-keeps-memory",
        "workers die again and again, and each gets the memory of the one before",
        _keep_memory_however_often_workers_die,
        [DEATHS + "test_memory_ends_with_the_third_death_without_a_completed_step"],
    ),
    Sabotage(
        "standby-of-other-memory",
        "a standby takes over that has attached memory which was given up",
        _activate_a_standby_with_other_memory,
        [STANDBY + "test_a_worker_that_may_have_damaged_the_memory_is_followed_by_a_cold_start_with_other_memory[1]"],
    ),
    Sabotage(
        "standby-unused",
        "a standby waits, and a new worker starts all the same",
        _never_activate_a_standby,
        [STANDBY + "test_the_standby_takes_over_from_a_killed_worker_and_another_one_starts"],
    ),
    Sabotage(
        "crashed-standby-forgiven",
        "memory beside a standby that crashed is used on",
        _forgive_a_crashed_standby,
        [STANDBY + "test_a_standby_that_dies_of_a_fault_costs_the_memory_that_it_may_have_damaged[signal]"],
    ),
    Sabotage(
        "one-standby-ever",
        "no standby follows the first one",
        _start_no_second_standby,
        [STANDBY + "test_the_standby_takes_over_from_a_killed_worker_and_another_one_starts"],
    ),
    Sabotage(
        "silent-standby-waited-for",
        "a standby that is activated may take for ever to serve",
        _wait_for_an_activated_standby_for_ever,
        [STANDBY + "test_a_standby_that_is_activated_and_stays_silent_is_killed_soon"],
    ),
    Sabotage(
        "standby-outlives-shutdown",
        "a shutdown leaves the standby",
        _leave_the_standby_at_a_shutdown,
        [STANDBY + "test_a_shutdown_begins_with_the_standby"],
    ),
    Sabotage(
        "foreign-memory-kept",
        "the engine is told that memory is kept which the supervisor does not own",
        _keep_memory_that_is_not_owned,
        [DEATHS + "test_no_death_keeps_memory_that_the_supervisor_does_not_own[killed_from_outside]"],
    ),
    Sabotage(
        "planned-length-kept",
        "a request goes on behind what was planned, although only what is committed is certainly written",
        _keep_what_was_planned,
        [
            ENGINE + "test_the_next_worker_is_told_of_what_was_committed_and_of_the_same_blocks[3]",
            ENGINE + "test_streams_are_exact_wherever_a_worker_is_killed",
        ],
    ),
    Sabotage(
        "kept-without-assignment",
        "a request that keeps its KV is not assigned to the next worker",
        _keep_old_epochs,
        [ENGINE + "test_only_the_steps_in_flight_are_computed_again_when_a_worker_is_killed"],
    ),
    Sabotage(
        "fences-outlive-worker",
        "fences of steps in flight are not lifted when their worker is killed",
        _leave_fences,
        [
            ENGINE + "test_blocks_of_requests_that_ended_in_a_step_in_flight_are_free_at_once",
            ENGINE + "test_slots_of_requests_that_ended_in_a_step_in_flight_are_free_at_once",
        ],
    ),
    Sabotage(
        "preempting-for-ever",
        "a request waits for a dead worker's reply to its preemption",
        _leave_preempting_requests,
        [ENGINE + "test_a_request_that_is_being_preempted_goes_back_to_the_queue_at_once"],
    ),
    Sabotage(
        "means-go-on",
        "a mean goes on with another worker, which has no sum of the rows before",
        _go_on_with_means,
        [ENGINE + "test_a_mean_starts_again_and_a_last_row_goes_on[mean-0]"],
    ),
    Sabotage(
        "prompt-logprobs-cut",
        "prompt logprobs that came before a kill are dropped",
        _drop_prompt_logprobs,
        [ENGINE + "test_prompt_logprobs_that_were_gathered_before_a_kill_are_kept_and_complete[2]"],
    ),
    Sabotage(
        "kills-not-charged",
        "a death that keeps the memory is charged to no request",
        _charge_nobody_for_a_kill,
        [ENGINE + "test_a_request_in_flight_at_three_kills_fails_and_others_do_not"],
    ),
    Sabotage(
        "unattached-memory-trusted",
        "requests go on although the new worker has other memory",
        _trust_the_promise_of_memory,
        [
            ENGINE + "test_memory_that_could_not_be_attached_after_all_is_computed_again",
            ENGINE + "test_cached_blocks_of_memory_that_could_not_be_attached_are_forgotten",
        ],
    ),
    Sabotage(
        "seal-never-broken",
        "a block keeps its hash in the table when it is handed out again",
        _never_break_seals,
        [
            ENGINE + "test_a_block_that_was_handed_out_again_is_not_adopted_by_the_next_engine",
            HASHES + "test_a_pool_seals_hashes_when_it_gives_them_and_breaks_them_when_it_hands_out_the_block",
            HASHES + "test_a_row_that_was_written_in_part_has_no_hash",
        ],
    ),
    Sabotage(
        "torn-rows-adopted",
        "a row of the table counts whatever its seal is",
        _adopt_torn_rows,
        [
            HASHES + "test_a_row_that_was_written_in_part_has_no_hash",
            ENGINE + "test_a_row_whose_seal_does_not_fit_is_not_adopted",
        ],
    ),
    Sabotage(
        "nothing-adopted",
        "a new engine does not look for the blocks of the last one",
        _adopt_nothing,
        [ENGINE + "test_a_new_engine_finds_the_blocks_of_the_last_one_and_computes_one_block_again_at_most"],
    ),
    Sabotage(
        "adopted-and-free",
        "an adopted block is also handed out as one without a hash",
        _adopt_free_blocks,
        [HASHES + "test_adopted_blocks_are_handed_out_last"],
    ),
    Sabotage(
        "warm-up-in-block-0",
        "a worker that starts writes a block that may be a request's",
        _warm_up_in_block_0,
        [WORKER + "test_a_second_worker_changes_no_byte_of_a_block_that_may_be_handed_out"],
    ),
    Sabotage(
        "kept-memory-counted-twice",
        "a pool that exists is counted against the memory that is free",
        _count_existing_memory_against_free_memory,
        [WORKER + "test_memory_that_exists_is_not_counted_against_what_is_free"],
    ),
    Sabotage(
        "ended-memory-stays-open",
        "the supervisor keeps memory open that has ended",
        _keep_ended_memory_open,
        [
            OWNER + "test_another_name_is_other_memory_and_the_old_one_is_closed",
            OWNER + "test_close_closes_the_memory_and_may_be_called_twice",
        ],
    ),
    Sabotage(
        "ended-memory-attached",
        "the next worker gets memory that has ended",
        _attach_one_memory_for_ever,
        [OWNER + "test_another_name_is_other_memory_and_the_old_one_is_closed"],
    ),
]
