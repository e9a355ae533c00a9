"""Deliberate bugs in handoffs between prefill and decode instances."""

from collections.abc import Callable
from dataclasses import replace

from onward.engine.handoff import prefill_service
from onward.engine.handoff.prefill_peers import PrefillPeers, PrefillPeerState
from onward.engine.handoff.prefill_service import PrefillService
from onward.engine.handoff.remote_prefill import RemotePrefillClient
from onward.engine.main import EngineProcess
from onward.engine.outbox import ApiOutbox
from onward.engine.request import FinishReason, Request
from onward.engine.scheduling.block_pool import BlockPool
from onward.engine.scheduling.outgoing_handoffs import OutgoingHandoffs
from onward.engine.scheduling.peer_write_leases import PeerWriteLeases
from onward.engine.scheduling.slot_and_block_allocator import PlannedAllocation, SlotAndBlockAllocator
from onward.engine.step_result_processor import StepResultProcessor
from onward.pd import decode_handoff_protocol, prefill_handoff_protocol
from onward.pd.decode_handoff_protocol import DecodeHandoffProtocol
from onward.pd.prefill_handoff_protocol import PrefillHandoffProtocol
from onward.proto.control import StopChild, ToChild
from onward.proto.engine import WorkerCrashReport
from onward.proto.handoff import CancelHandoff, HandoffHeartbeat, RefuseHandoff
from onward.transport.handoff_sockets import HandoffClientSocket
from tests.sabotage.patches import Patches, Sabotage

KV = "tests/failures/test_kv_between_machines.py::"
PROPERTIES = "tests/engine/test_handoff_properties.py::"


def _free_leased_blocks_at_once(patch: Patches) -> None:
    def quarantine(original: Callable, self: BlockPool, blocks: list[int]) -> None:
        original(self, blocks)
        self.end_quarantine(blocks)

    patch.around(BlockPool, "start_quarantine", quarantine)
    patch.around(
        BlockPool, "end_quarantine", lambda original, self, blocks: original(self, self._quarantined & set(blocks))
    )


def _say_goodbye_before_the_last_turn(patch: Patches) -> None:
    def on_control(original: Callable, self: EngineProcess, message: ToChild, now_s: float) -> None:
        if isinstance(message, StopChild):
            self._announce_shutdown()
        original(self, message, now_s)

    patch.around(EngineProcess, "_on_control", on_control)


def _report_no_crashes(patch: Patches) -> None:
    def send(original: Callable, self: ApiOutbox, api_id: str, message: object) -> None:
        if not isinstance(message, WorkerCrashReport):
            original(self, api_id, message)

    patch.around(ApiOutbox, "send", send)


def _no_heartbeats(patch: Patches) -> None:
    def send(original: Callable, self: PrefillHandoffProtocol, decode: str, message: object) -> None:
        if not isinstance(message, HandoffHeartbeat):
            original(self, decode, message)

    patch.around(PrefillHandoffProtocol, "_send", send)


def _decode_ends_without_a_word(patch: Patches) -> None:
    def send(original: Callable, self: DecodeHandoffProtocol, peer: str, message: object) -> None:
        if not isinstance(message, (CancelHandoff, RefuseHandoff)):
            original(self, peer, message)

    patch.around(DecodeHandoffProtocol, "_send", send)


def _a_failed_push_is_only_logged(patch: Patches) -> None:
    patch.around(PrefillService, "_fail", lambda original, self, job, error, now_s, is_quiesced=False: None)


def _a_refusal_is_decided_and_not_sent(patch: Patches) -> None:
    def refuse_held(original: Callable, self: DecodeHandoffProtocol, number: int) -> None:
        self._fail_without_notifying_peer(number, decode_handoff_protocol.handoff_errors.no_decode_blocks("full"))

    patch.around(DecodeHandoffProtocol, "_refuse_held", refuse_held)


def _a_silent_peer_blocks_the_queue(patch: Patches) -> None:
    def may_offer(original: Callable, self: OutgoingHandoffs, handoff: object) -> bool:
        return not self.offered and original(self, handoff)

    patch.around(OutgoingHandoffs, "may_offer", may_offer)


def _offer_everything_at_once(patch: Patches) -> None:
    patch.around(OutgoingHandoffs, "may_offer", lambda original, self, handoff: True)


def _each_offer_is_a_new_one(patch: Patches) -> None:
    def receive_offer(original: Callable, self: DecodeHandoffProtocol, peer: str, offer: object, now_s: float) -> None:
        found = self._live.get(offer.handoff_id)  # type: ignore[attr-defined]
        if found is not None:
            found.state, found.grant = decode_handoff_protocol.DecodeHandoffState.ASKED, None
        original(self, peer, offer, now_s)

    def on_offer(original: Callable, self: RemotePrefillClient, task: object, event: object, now_s: float) -> None:
        request: Request = task.request  # type: ignore[attr-defined]
        if self._leases._by_request.pop(request, None) is not None:
            self._scheduler.allocator.awaiting_kv.remove(request)
            request.status = type(request.status).ASKED
        original(self, task, event, now_s)

    patch.around(DecodeHandoffProtocol, "_receive_offer", receive_offer)
    patch.around(RemotePrefillClient, "_on_offer", on_offer)


def _a_granted_slot_has_an_epoch(patch: Patches) -> None:
    def grant(original: Callable, self: PeerWriteLeases, request: Request) -> bool:
        given = original(self, request)
        if given:
            request.slot_epoch = 99
            self._allocator.by_slot_epoch[99] = request
        return given

    patch.around(PeerWriteLeases, "grant", grant)


def _leases_are_not_counted(patch: Patches) -> None:
    def counts(original: Callable, self: BlockPool) -> dict[str, int]:
        counted = original(self)
        return counted | {"free": counted["free"] + counted["leased"], "leased": 0}

    patch.around(BlockPool, "count_by_state", counts)


def _any_incarnation_will_do(patch: Patches) -> None:
    patch.around(DecodeHandoffProtocol, "_accepts_incarnation", lambda original, self, peer, incarnation: True)
    patch.around(PrefillPeers, "update_incarnation", lambda original, self, *rest: None)

    def find(
        original: Callable, self: DecodeHandoffProtocol, peer: str, number: int, incarnation: str, now_s: float
    ) -> object:
        found = self._live.get(number)
        if found is not None:
            found.incarnation, found.resend_at_s = incarnation, None
            self._extend_silence_deadline(found, now_s)
        return found

    patch.around(DecodeHandoffProtocol, "_find", find)

    def tick(original: Callable, self: DecodeHandoffProtocol, now_s: float) -> None:
        for handoff in self._live.values():
            handoff.silent_at_s = now_s + 1000  # metadata of a dead peer, believed for an hour
        original(self, now_s)

    patch.around(DecodeHandoffProtocol, "tick", tick)


def _lease_half_of_it(patch: Patches) -> None:
    def grant(original: Callable, self: PeerWriteLeases, request: Request) -> bool:
        allocator = self._allocator
        before = SlotAndBlockAllocator.plan_allocation

        def half(self: SlotAndBlockAllocator, asked: Request) -> PlannedAllocation:
            room = before(self, asked)
            return replace(room, num_new_blocks=max(1, room.num_new_blocks // 2), fits=True)

        SlotAndBlockAllocator.plan_allocation = half  # type: ignore[method-assign]
        try:
            return allocator.pool.num_available > 3 and original(self, request)
        finally:
            SlotAndBlockAllocator.plan_allocation = before  # type: ignore[method-assign]

    patch.around(PeerWriteLeases, "grant", grant)


def _sends_are_kept_for_ever(patch: Patches) -> None:
    patch.around(HandoffClientSocket, "send", lambda original, self, message: True)


def _judge_then_drain(patch: Patches) -> None:
    def receive(original: Callable, self: RemotePrefillClient, peer: str, message: object, now_s: float) -> None:
        self.tick(now_s)
        original(self, peer, message, now_s)

    patch.around(RemotePrefillClient, "receive", receive)


def _believe_ready(patch: Patches) -> None:
    def verify(original: Callable, self: DecodeHandoffProtocol, number: int) -> None:
        handoff = self._live[number]
        if handoff.ready is not None:
            handoff.received_checksums = handoff.ready.checksums
        original(self, number)

    patch.around(DecodeHandoffProtocol, "_complete_if_verified", verify)


def _wait_for_each_transfer(patch: Patches) -> None:
    def take_results(original: Callable, self: PrefillService, now_s: float) -> None:
        if len(self._tasks) < 2:
            original(self, now_s)

    patch.around(PrefillService, "_collect_results", take_results)


def _count_when_sent(patch: Patches) -> None:
    def ready(original: Callable, self: PrefillService, job: object, now_s: float) -> None:
        self._metrics.ended.inc("prefill", "taken")
        original(self, job, now_s)

    patch.around(PrefillService, "_ready_if_complete", ready)


def _say_it_once(patch: Patches) -> None:
    def tick(original: Callable, self: object, now_s: float) -> None:
        for handoff in [h for d in self._decode_peers.values() for h in d.handoffs.values()]:  # type: ignore[attr-defined]
            handoff.resend_at_s = now_s + 1000
        original(self, now_s)

    patch.around(PrefillHandoffProtocol, "tick", tick)


def _no_lease_ends_at_the_prefill_side(patch: Patches) -> None:
    patch.around(PrefillHandoffProtocol, "_expire", lambda original, self, key, handoff: None)
    patch.put(prefill_handoff_protocol, "NO_LONGER_WANTED", prefill_handoff_protocol.UNKNOWN_TO_PREFILL)


def _a_peer_s_death_is_our_stall(patch: Patches) -> None:
    patch.around(PrefillPeerState, "is_available", lambda original, self, now_s: True)
    patch.around(RemotePrefillClient, "receive_kv_report", lambda original, self, report, now_s: None)


def _the_worker_owes_no_report_on_leases(patch: Patches) -> None:
    patch.put(PeerWriteLeases, "worker_due_since_s", None)


def _repeat_all_that_was_not_sent(patch: Patches) -> None:
    def unsent(original: Callable, self: DecodeHandoffProtocol, peer: str, now_s: float) -> None:
        for number, handoff in self._live.items():
            if handoff.peer == peer and handoff.resend_at_s is not None:
                handoff.resend_at_s = now_s
                self._timers.set_earliest(number, now_s)

    patch.around(DecodeHandoffProtocol, "on_send_failed", unsent)


def _count_when_sampled(patch: Patches) -> None:
    def finish(
        original: Callable,
        self: StepResultProcessor,
        request: Request,
        reason: FinishReason,
        now_s: float,
        *rest: object,
    ) -> None:
        original(self, request, reason, now_s, *rest)
        if reason is FinishReason.HANDED_OFF:
            self.record_finish(request, reason, now_s)

    patch.around(StepResultProcessor, "finish", finish)


def _do_not_log_failed_handoffs(patch: Patches) -> None:
    patch.put(prefill_service, "log_failed_handoff", lambda *fields: None)


def _row(name: str, breaks: str, apply: Callable[[Patches], None], *tests: str) -> Sabotage:
    return Sabotage(name, breaks, apply, [KV + test for test in tests])


TABLE = [
    _row(
        "handed-off-when-sampled",
        "F35: a prompt counts as handed off when its token is sampled",
        _count_when_sampled,
        "test_f35_success_is_counted_when_the_peer_has_taken_it",
    ),
    _row(
        "failed-handoff-not-logged",
        "a prefill instance ends a handoff and does not say why",
        _do_not_log_failed_handoffs,
        "test_f35_a_handoff_that_fails_behind_its_token_is_no_success_and_both_sides_say_why",
    ),
    Sabotage(
        "goodbye-too-early",
        "an engine that is told to stop reads on after it has forgotten its handoffs",
        _say_goodbye_before_the_last_turn,
        [
            "tests/engine/test_shutdown.py::"
            "test_a_prompt_that_is_repeated_while_the_engine_is_told_to_stop_begins_nothing_anew"
        ],
    ),
    Sabotage(
        "crashes-not-reported",
        "the api process is not told that a worker, here or at a peer, died under a request",
        _report_no_crashes,
        ["tests/engine/test_handoffs.py::test_a_prompt_under_which_two_peers_have_died_is_computed_alone_here"],
    ),
    Sabotage(
        "all-unsent-repeated",
        "each turn sends every prompt again to a peer that cannot be reached",
        _repeat_all_that_was_not_sent,
        [
            "tests/engine/test_scale.py::test_a_peer_that_cannot_be_reached_is_sent_one_message_in_a_turn",
            "tests/engine/test_scale.py::test_an_event_costs_the_same_however_many_requests_are_live[unreachable]",
        ],
    ),
    Sabotage(
        "lease-report-not-due",
        "a worker that reports nothing on leases is not seen as stalled",
        _the_worker_owes_no_report_on_leases,
        ["tests/engine/test_silent_workers.py::test_a_peer_that_is_done_does_not_hide_that_our_worker_has_stopped"],
    ),
    _row(
        "leased-freed-at-once",
        "F20: an abort frees blocks that a peer may still write",
        _free_leased_blocks_at_once,
        "test_f20_blocks_that_a_late_write_may_reach_are_nobody_s_until_the_writer_is_quiet",
    ),
    _row(
        "no-heartbeats",
        "F21: a lease ends by time although its holder lives",
        _no_heartbeats,
        "test_f21_a_slow_prefill_keeps_its_lease_and_its_blocks_as_long_as_it_lives",
    ),
    _row(
        "decode-ends-silently",
        "F22: the decode side ends a handoff and does not say so",
        _decode_ends_without_a_word,
        "test_f22_a_request_that_ends_at_the_decode_side_ends_at_the_prefill_side[asked]",
        "test_f22_a_request_that_ends_at_the_decode_side_ends_at_the_prefill_side[offered]",
    ),
    _row(
        "failed-push-only-logged",
        "F23: a push that failed is told to nobody",
        _a_failed_push_is_only_logged,
        "test_f23_a_push_that_fails_is_told_and_the_prompt_is_computed_elsewhere",
    ),
    _row(
        "refusal-not-sent",
        "F24: blocks are refused, and the peer is not told",
        _a_refusal_is_decided_and_not_sent,
        "test_f24_a_refusal_of_blocks_reaches_the_prefill_side",
    ),
    _row(
        "silent-peer-blocks",
        "F25: one unanswered offer stops the queue",
        _a_silent_peer_blocks_the_queue,
        "test_f25_a_decode_instance_that_does_not_answer_holds_up_nobody_else",
    ),
    _row(
        "offers-all-at-once",
        "F25: memory is asked for long before it is needed",
        _offer_everything_at_once,
        "test_f25_a_decode_instance_that_does_not_answer_holds_up_nobody_else",
    ),
    _row(
        "grant-each-offer",
        "F26: each copy of an offer takes blocks",
        _each_offer_is_a_new_one,
        "test_f26_the_same_offer_twice_takes_blocks_once",
    ),
    _row(
        "granted-is-running",
        "F27: a granted slot listens to its worker",
        _a_granted_slot_has_an_epoch,
        "test_f27_what_a_worker_says_for_a_granted_slot_is_stale",
    ),
    _row(
        "leases-not-counted",
        "F28: leased blocks look free",
        _leases_are_not_counted,
        "test_f28_leased_blocks_are_counted_and_not_given_twice",
    ),
    _row(
        "any-incarnation",
        "F29: a restarted peer is taken for the old one",
        _any_incarnation_will_do,
        "test_f29_a_peer_with_a_new_incarnation_is_a_new_peer",
    ),
    _row(
        "half-a-lease",
        "F30: a load begins without all it needs",
        _lease_half_of_it,
        "test_f30_a_lease_holds_all_that_its_request_needs_to_arrive",
    ),
    _row(
        "sends-kept",
        "F31: what a dead peer does not take is kept",
        _sends_are_kept_for_ever,
        "test_f31_sending_to_a_peer_that_does_not_read_never_blocks",
    ),
    _row(
        "judge-then-drain",
        "F32: a deadline is enforced before what has arrived is read",
        _judge_then_drain,
        "test_f32_a_word_that_arrives_with_its_deadline_counts",
    ),
    _row(
        "ready-believed",
        "F33: a request runs on KV that was not counted",
        _believe_ready,
        "test_f33_nothing_runs_before_every_block_is_counted_and_equal",
    ),
    _row(
        "wait-for-transfers",
        "F34: tokens wait for another prompt's transfer",
        _wait_for_each_transfer,
        "test_f34_a_slow_transfer_holds_up_no_other_prompt",
    ),
    _row(
        "counted-when-sent",
        "F35: success is counted before the peer has taken it",
        _count_when_sent,
        "test_f35_success_is_counted_when_the_peer_has_taken_it",
    ),
    _row(
        "said-once",
        "F36: the last word is not repeated",
        _say_it_once,
        "test_f36_a_lost_message_costs_a_moment_and_holds_nothing[PrefillDone]",
    ),
    _row(
        "no-lease-at-the-end",
        "F36: blocks wait for a word that never comes",
        _no_lease_ends_at_the_prefill_side,
        "test_f36_when_every_last_word_is_lost_the_lease_ends_it",
    ),
    _row(
        "peer-s-death-is-ours",
        "F37: a dead peer's work is waited for",
        _a_peer_s_death_is_our_stall,
        "test_f37_a_dead_prefill_peer_is_not_the_decode_instance_s_illness",
    ),
]
