"""A decode instance's prompts, computed by prefill instances: whom to ask, what becomes of it, and what else to do.

    WAITING ──ask a peer──> ASKED ──it offers, we have room──> GRANTED ──its KV is here──> RUNNING
                              │ ^                                │
               a failure: next peer, or compute it here <────────┘ (the lease is taken back)

The protocol itself is `pd.handoff.DecodeSide`; blocks are the scheduler's; this joins the two, and keeps an errand for
each request that is out. No I/O: what is to be sent is in `drain`.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field

from onward.config import EngineConfig
from onward.engine import door, policy
from onward.engine.pd_metrics import PdMetrics
from onward.engine.prefill_peers import PrefillPeers
from onward.engine.request import Request, Status
from onward.engine.request_queue import RequestQueue
from onward.engine.scheduler import Scheduler
from onward.engine.token_processor import TokenProcessor
from onward.errors import CrashedWorker, PdError
from onward.log import event as log_event
from onward.pd import faults
from onward.pd.handoff import Arrived, DecodeSide, Ended, Lease, OfferCame, Times
from onward.pd.timers import Timers
from onward.proto.handoff import Gone, Heartbeat, Pong, Prefill, Ready, ToDecode, ToPrefill
from onward.proto.kv_transfer import (
    Counted,
    EndLease,
    Endpoint,
    Expect,
    Expecting,
    KvCommand,
    KvReport,
    LeaseQuiet,
    Revoke,
    WriterLost,
)
from onward.proto.request import ErrorInfo
from onward.proto.step import Tokens, WorkerHello

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.05
"""How often to look whether those who could ask nobody can now."""
QUIET_S = 1.0
"""A revoked lease is usually quiet within milliseconds. After so long nobody waits for its blocks any more."""
QUARANTINE_S = 30.0
"""After so long the memory is given up as a whole, and with it the writer that cannot be reached."""
MAX_QUARANTINED_SHARE = 0.25
"""Of the pool; beyond it likewise."""

CRASHED = "worker_crash"
"""The stage of an error that says: a worker died over this prompt."""
WITHDRAWN = ErrorInfo("pd_prefill_failed", "PD Error: the decode instance needs this prompt no longer", stage="decode")


@dataclass(slots=True, eq=False)
class Errand:
    """One request that is out to have its prompt computed."""

    request: Request
    begun_s: float
    peer: str | None = None
    handover: int | None = None
    asked_s: float = 0.0
    attempts: Counter[str] = field(default_factory=Counter)
    num_signs: int = 0
    """How often its peer has said that it is still at work, while it was the peer's turn."""
    ready_s: float | None = None
    """When its peer was done: from then on it is our own worker that is waited for."""
    waits_for_room: bool = False
    """We have refused blocks for it ourselves: nobody is asked again before there are some."""
    waits_for: frozenset[str] | None = None
    """None of these peers can be asked now; one of them is as soon as it can."""
    error: ErrorInfo | None = None


class RemotePrefill:
    def __init__(
        self,
        config: EngineConfig,
        incarnation: str,
        worker: WorkerHello,
        scheduler: Scheduler,
        tokens: TokenProcessor,
        metrics: PdMetrics,
    ) -> None:
        self._config, self._scheduler, self._tokens, self._metrics = config, scheduler, tokens, metrics
        self._leases = scheduler.leases
        assert worker.layout is not None, "a decode instance's worker has KV memory to share"
        self._layout, self._vocab_size = worker.layout, worker.vocab_size
        self._endpoint: Endpoint | None = worker.kv_endpoint
        """None while there is no worker: then nobody is granted anything."""
        self._side = DecodeSide(incarnation, Times(config.lease_s, config.offer_hold_s, config.handover_timeout_s))
        self._peers = PrefillPeers(config.prefill_peers)
        self._errands: dict[Request, Errand] = {}
        self._num_prompt_tokens_out = 0
        self._by_handover: dict[int, Errand] = {}
        self._by_peer: dict[str, dict[int, Errand]] = {}
        """By address, then by hand-over: what is under way there."""
        self._without_peer: dict[frozenset[str], dict[Request, Errand]] = {}
        """By the peers that they wait for: one look at a peer answers for all of them."""
        self._give_up_timers: Timers[Request] = Timers()
        """Of those: when nobody looks for a peer any longer."""
        self._without_room = RequestQueue()
        self._by_lease: dict[str, Errand] = {}
        self._expected_s: dict[str, float] = {}
        """Leases that our worker has been told of and has not said a word about, and since when."""
        self._revoked_s: dict[str, float] = {}
        self._commands: list[KvCommand] = []
        self._pings: list[tuple[str, ToPrefill]] = []
        self._next_look_s = 0.0

    @property
    def addresses(self) -> frozenset[str]:
        """Of all prefill instances that we have to do with, now."""
        return self._peers.addresses

    @property
    def num_out(self) -> int:
        """Requests that wait, here or at a peer, for their prompt to be computed."""
        return len(self._errands)

    @property
    def num_prompt_tokens_out(self) -> int:
        return self._num_prompt_tokens_out

    @property
    def idle(self) -> bool:
        return not self._errands and not self._leases.quarantined and self._side.idle

    def states(self) -> dict[str, int]:
        return self._side.states()

    def leases(self) -> dict[str, int]:
        return {"granted": len(self._scheduler.seating.granted), "quarantined": len(self._leases.quarantined)}

    def dispatch(self, now_s: float) -> None:
        """Decides where the prompts of those that are new in the queue are computed."""
        undecided, self._scheduler.undecided = self._scheduler.undecided, []
        for request in undecided:
            if request.status is not Status.WAITING or request.handover is not None:
                continue
            if policy.prefills_here(request, self._scheduler.seating.num_uncached(request), self._config):
                request.prefills_here = True
                continue
            if policy.goes_elsewhere(request):
                self._give_up_preempted(request, now_s)
                continue
            self._scheduler.hand_out(request)
            if request.scheduled_s is None:
                request.scheduled_s = now_s
            errand = self._errands[request] = Errand(request, now_s)
            self._num_prompt_tokens_out += request.num_prompt
            self._ask_next(errand, now_s)

    def receive(self, peer: str, message: ToDecode, now_s: float) -> None:
        if peer not in self._peers:
            return
        self._peers.heard(peer)
        if isinstance(message, Heartbeat):
            self._note_signs(message)
        if isinstance(message, Ready) and (errand := self._by_handover.get(message.handover)):
            errand.ready_s = errand.ready_s if errand.ready_s is not None else now_s
        if not isinstance(message, Pong):
            self._side.receive(peer, message, now_s)
        elif before := self._peers.is_now(peer, message.incarnation, now_s):
            # One that has started anew knows nothing of what its predecessor was asked.
            self._side.receive(peer, Gone(before), now_s)
        self._process_events(now_s)

    def signs_of_life(self, request: Request) -> int:
        """Grows as long as somebody works for this one, though nothing of it is here yet."""
        errand = self._errands.get(request)
        return errand.num_signs if errand else 0

    @property
    def worker_owes_since_s(self) -> float | None:
        """Since when our own worker is due: to open the door for a peer, or to count what one has written."""
        ready_s = (errand.ready_s for errand in self._by_lease.values() if errand.ready_s is not None)
        return min((*self._expected_s.values(), *ready_s), default=None)

    def reached(self, peer: str, ok: bool, now_s: float) -> None:
        """Whether the last message to this peer could be sent. One that is away for long is not waited for."""
        if peer not in self._peers:
            return
        if ok:
            self._side.sent(peer, now_s)
            self._peers.heard(peer)
        else:
            self._side.unsent(peer, now_s)
            self._peers.not_reached(peer, now_s)

    def kv_report(self, report: KvReport, now_s: float) -> None:
        self._let_go_of_abandoned(now_s)  # their leases have ended, though the worker may not know it yet
        self._expected_s.pop(report.lease_id, None)
        match report:
            case LeaseQuiet():
                self._revoked_s.pop(report.lease_id, None)
                self._leases.end_quarantine(report.lease_id)
            case Expecting():
                self._grant(report.lease_id, now_s)
            case Counted() if report.lease_id in self._by_lease:
                backend = self._endpoint.backend if self._endpoint else ""
                self._metrics.bytes.inc(backend, "in", by=report.num_bytes)
                self._metrics.seconds.inc(backend, "in", by=report.seconds)
                self._side.counted(report.lease_id, report.checksums, now_s)
            case WriterLost() if report.lease_id in self._by_lease:
                self._side.writer_lost(report.lease_id, report.message, now_s)
            case _:
                self._metrics.stray.inc()
        self._process_events(now_s)

    def tick(self, now_s: float) -> None:
        self._side.tick(now_s)
        self._process_events(now_s)
        self._let_go_of_abandoned(now_s)
        self._give_up_on_the_unreachable(now_s)
        self._look_again(now_s)
        self._tell_data_plane(now_s)
        in_use = self._by_peer.keys() | {peer for peers in self._without_peer for peer in peers}
        self._pings += self._peers.due_pings(in_use, now_s)

    def worker_lost(self, now_s: float) -> None:
        """Our KV memory is gone, and all leases on it. Those who had one ask again."""
        self._let_go_of_abandoned(now_s)
        for errand in [e for e in self._errands.values() if e.request.status is Status.GRANTED]:
            self._withdraw(errand, now_s)
            self._leases.take_back(errand.request)
            errand.request.move_to(Status.ASKED)
            self._let_wait_for_room(errand)
        self._endpoint = None
        self._by_lease.clear()
        self._expected_s.clear()
        self._revoked_s.clear()
        self._commands.clear()
        self._leases.fresh.clear()

    def worker_up(self, worker: WorkerHello) -> None:
        self._endpoint = worker.kv_endpoint

    def why_renew(self, now_s: float) -> str | None:
        """A reason to give the KV memory up: too much of it is, or has for too long been, in nobody's hands."""
        quarantined, pool = self._scheduler.pool.num_quarantined, self._scheduler.pool
        if quarantined > pool.num_blocks * MAX_QUARANTINED_SHARE and self._leases.stuck:
            return f"{quarantined} of {pool.num_blocks} KV blocks are quarantined"
        oldest_s = min(self._revoked_s.values(), default=now_s)
        if now_s - oldest_s > QUARANTINE_S:
            return f"a peer that may write KV blocks has not answered for {QUARANTINE_S:g} s"
        return None

    def drain(self) -> tuple[list[tuple[str, ToPrefill]], list[KvCommand]]:
        messages = self._side.drain() + self._pings
        commands, self._commands, self._pings = self._commands, [], []
        return messages, commands

    def close(self) -> None:
        self._side.close()

    def _process_events(self, now_s: float) -> None:
        self._let_go_of_abandoned(now_s)  # what a peer says of them comes too late
        for event in self._side.take_events():
            errand = self._by_handover.get(event.handover)
            if errand is None:
                continue  # what came before in this turn has ended it
            match event:
                case OfferCame():
                    self._on_offer(errand, event, now_s)
                case Arrived():
                    self._on_arrived(errand, event.ready, now_s)
                case Ended():
                    self._on_ended(errand, event.error, now_s)

    def _on_offer(self, errand: Errand, event: OfferCame, now_s: float) -> None:
        self._metrics.offers.inc("decode")
        wanted = self._scheduler.pool.blocks_for(len(errand.request.token_ids))
        if event.num_blocks != wanted:
            message = f"{event.num_blocks} blocks were asked for where {wanted} are needed"
            error = faults.layout_mismatch(message)
            self._metrics.refusals.inc("decode", error.code)
            self._side.refuse(event.handover, error, now_s)
            self._on_ended(errand, error, now_s)
            return
        at_once = self._endpoint is not None and self._scheduler.may_seat(errand.request)
        self._leases.want(errand.request, at_once=at_once)
        self._tell_data_plane(now_s)

    def _grant(self, lease_id: str, now_s: float) -> None:
        """The data plane's door is open: now the peer may be told."""
        errand = self._by_lease.get(lease_id)
        if errand is None or errand.handover is None:
            self._metrics.stray.inc()
            return
        lease, endpoint = errand.request.lease, self._endpoint
        assert lease is not None and endpoint is not None, "a lease that is expected is on our own memory"
        num_cached = lease.first_block * self._scheduler.pool.block_size
        granted = Lease(lease_id, endpoint, num_cached, lease.block_ids, self._config.kv_checksums)
        self._side.grant(errand.handover, granted, now_s)
        self._metrics.grants.inc()

    def _on_arrived(self, errand: Errand, ready: Ready, now_s: float) -> None:
        request, lease = errand.request, errand.request.lease
        if lease is None or not ready.token_ids or not self._in_vocabulary(ready.token_ids):
            error = PdError("pd_transfer_failed", "what the prefill instance sent cannot be used", stage="transfer")
            self._on_ended(errand, door.error_info(error), now_s)
            return
        self._forget(errand)
        self._close(errand)
        self._commands.append(EndLease(lease.lease_id))
        self._metrics.ended.inc("decode", "arrived")
        self._metrics.latency.observe(now_s - errand.asked_s)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(ready.num_cached_tokens, request.num_prompt)
        self._leases.arrive(request, now_s)
        request.given_drafts = ready.draft_token_ids[: request.max_drafts]
        assert request.slot is not None, "it has arrived in one"
        drawn = Tokens(
            request.slot,
            request.slot_epoch,
            request.num_generated,
            request.num_computed,
            ready.token_ids,
            ready.logprobs,
            ready.prompt_logprobs,
            ready.grammar_done,
        )
        self._tokens.take_remote(request, drawn, now_s)

    def _in_vocabulary(self, token_ids: list[int]) -> bool:
        return min(token_ids) >= 0 and max(token_ids) < self._vocab_size

    def _on_ended(self, errand: Errand, error: ErrorInfo, now_s: float) -> None:
        """A hand-over has failed. The request has not."""
        request = errand.request
        log.info(
            log_event(
                "hand-over failed",
                side="decode",
                id=request.request_id,
                peer=errand.peer,
                code=error.code,
                stage=error.stage or "-",
                error=error.message,
            )
        )
        self._metrics.ended.inc("decode", error.code)
        self._forget(errand)
        self._leases.forget_offer(request)
        if request.status is Status.GRANTED:
            self._leases.take_back(request)
            request.move_to(Status.ASKED)
        errand.error = error
        if error.code == "pd_no_decode_blocks":
            self._metrics.refusals.inc("decode", error.code)
            self._on_own_shortage(errand, error, now_s)
            return
        if error.stage == CRASHED and self._charge(errand, now_s):
            return
        self._peers.pause_after(error, errand.peer, now_s)
        self._ask_next(errand, now_s)

    def _on_own_shortage(self, errand: Errand, error: ErrorInfo, now_s: float) -> None:
        """No peer's fault: there is no room here. Whoever can go elsewhere does."""
        if errand.request.may_move:
            self._close(errand)
            self._tokens.give_up(errand.request, error, now_s)
        else:
            self._let_wait_for_room(errand)

    def _let_wait_for_room(self, errand: Errand) -> None:
        if not errand.waits_for_room:
            errand.waits_for_room = True
            self._without_room.add(errand.request)
        self._leases.note_short(errand.request)

    def _charge(self, errand: Errand, now_s: float) -> bool:
        """A peer's worker died over this prompt. True if that was once too often."""
        request = errand.request
        request.crash_charges += 1
        request.charged_position = request.num_generated
        if request.crash_charges < policy.CHARGES_TO_FAIL:
            return False
        self._close(errand)
        message = f"workers died {request.crash_charges} times while running this request"
        self._tokens.fail(request, door.error_info(CrashedWorker(message)), now_s)
        return True

    def _ask_next(self, errand: Errand, now_s: float) -> None:
        views = self._views(errand, now_s)
        may_fall_back = self._config.local_prefill
        chosen = policy.choose_prefill_peer(views, may_fall_back=may_fall_back)
        if chosen is not None:
            if errand.attempts:
                self._metrics.fallbacks.inc("peer")
            self._ask(errand, chosen.address, now_s)
        elif may_fall_back:
            self._metrics.fallbacks.inc("local")
            self._close(errand)
            self._scheduler.take_home(errand.request)
        elif now_s >= self._give_up_at_s(errand) or not policy.can_try_again(views):
            self._fail(errand, now_s)
        else:
            self._let_wait_for_peer(errand, views)

    def _let_wait_for_peer(self, errand: Errand, views: list[policy.PeerView]) -> None:
        errand.waits_for = frozenset(view.address for view in views if policy.can_try_again([view]))
        self._without_peer.setdefault(errand.waits_for, {})[errand.request] = errand
        self._give_up_timers.wake_by(errand.request, self._give_up_at_s(errand))

    def _give_up_at_s(self, errand: Errand) -> float:
        return errand.begun_s + self._config.handover_timeout_s

    def _views(self, errand: Errand, now_s: float) -> list[policy.PeerView]:
        """The peers that this one may be sent to, as the choice sees them."""
        named = errand.request.prefill_peers or self._config.prefill_peers
        for address in named:
            self._peers.meet(address, now_s)
        return [
            policy.PeerView(
                address,
                len(self._by_peer.get(address, ())),
                errand.attempts[address],
                self._peers.is_available(address, now_s),
            )
            for address in named
        ]

    def _ask(self, errand: Errand, address: str, now_s: float) -> None:
        request = errand.request
        errand.peer, errand.handover, errand.asked_s = address, self._side.next_number(), now_s
        errand.ready_s = None
        errand.attempts[address] += 1
        self._by_handover[errand.handover] = errand
        self._by_peer.setdefault(address, {})[errand.handover] = errand
        prefill = Prefill(
            handover=errand.handover,
            layout=self._layout,
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt=request.num_prompt,
            sampling=request.sampling,
            priority=request.priority,
            waited_s=max(0.0, now_s - request.arrival_s),
            deadline_s=None if request.deadline_s is None else max(0.0, request.deadline_s - now_s),
            cache_salt=request.cache_salt,
            crash_charges=max(request.crash_charges, request.engine_deaths),
            score_from=request.score_from,
            num_drafts=request.max_drafts,
        )
        self._side.ask(address, prefill, now_s)

    def _give_up_preempted(self, request: Request, now_s: float) -> None:
        message = f"the decode instance had to give the request up after {request.num_generated} tokens"
        self._metrics.fallbacks.inc("none")
        self._tokens.give_up(request, door.error_info(PdError("pd_preempted", message, stage="decode")), now_s)

    def _fail(self, errand: Errand, now_s: float) -> None:
        """Nobody could compute it, and we may not. The layer above may know someone who can."""
        self._metrics.fallbacks.inc("none")
        self._close(errand)
        cause = (
            errand.error.message.removeprefix("PD Error: ") if errand.error else "no prefill instance can be reached"
        )
        code = "pd_preempted" if errand.request.num_generated else "pd_prefill_failed"
        error = PdError(
            code, f"no prefill instance could compute the prompt ({cause})", stage="prefill", retry_after_s=1.0
        )
        self._tokens.give_up(errand.request, door.error_info(error), now_s)

    def _note_signs(self, heartbeat: Heartbeat) -> None:
        """Of work that the peer is at. Where it waits for our worker its word says nothing of whether that lives."""
        for number in heartbeat.handovers:
            errand = self._by_handover.get(number)
            if errand is not None and errand.ready_s is None:
                errand.num_signs += 1

    def _let_go_of_abandoned(self, now_s: float) -> None:
        abandoned, self._leases.abandoned = self._leases.abandoned, []
        for request in abandoned:
            errand = self._errands.get(request)
            if errand is None:
                continue
            self._withdraw(errand, now_s)
            if request.status is Status.FINISHED:
                self._close(errand)
            else:
                self._let_wait_for_room(errand)  # its blocks went to somebody who comes before it

    def _withdraw(self, errand: Errand, now_s: float) -> None:
        if errand.handover is not None:
            self._side.cancel(errand.handover, WITHDRAWN, now_s)
            self._metrics.ended.inc("decode", "withdrawn")
        self._forget(errand)

    def _forget(self, errand: Errand) -> None:
        """The hand-over is over; the errand may go on with another one."""
        if errand.handover is not None:
            del self._by_handover[errand.handover]
            assert errand.peer is not None, "a hand-over has a peer"
            del self._by_peer[errand.peer][errand.handover]
            if not self._by_peer[errand.peer]:
                del self._by_peer[errand.peer]
        if errand.request.lease is not None:
            self._by_lease.pop(errand.request.lease.lease_id, None)
        errand.handover = None

    def _close(self, errand: Errand) -> None:
        """The request is out no longer: its prompt is here, is computed here, or is wanted no more."""
        self._leave_waits(errand)
        self._num_prompt_tokens_out -= errand.request.num_prompt
        del self._errands[errand.request]

    def _leave_waits(self, errand: Errand) -> None:
        if errand.waits_for_room:
            errand.waits_for_room = False
            self._without_room.remove(errand.request)
        if errand.waits_for is not None:
            waiting = self._without_peer[errand.waits_for]
            del waiting[errand.request]
            if not waiting:
                del self._without_peer[errand.waits_for]
            errand.waits_for = None
            self._give_up_timers.cancel(errand.request)

    def _give_up_on_the_unreachable(self, now_s: float) -> None:
        """What such a peer has only been asked for goes elsewhere. What it may write is under a lease, and ends with it."""
        away = self._peers.away(now_s)
        under_way = [errand for peer in sorted(away) for errand in self._by_peer.get(peer, {}).values()]
        for errand in under_way:
            if errand.request.status is Status.ASKED and errand.handover is not None:
                error = PdError(
                    "pd_prefill_failed", f"{errand.peer} cannot be reached, or is left alone", stage="prefill"
                )
                self._side.cancel(errand.handover, door.error_info(error), now_s)
                self._on_ended(errand, door.error_info(error), now_s)

    def _look_again(self, now_s: float) -> None:
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_AGAIN_S
        overdue = [self._errands[request] for request in self._give_up_timers.due(now_s)]
        back = [peers for peers in self._without_peer if any(self._peers.is_available(p, now_s) for p in peers)]
        for errand in dict.fromkeys(overdue + [one for peers in back for one in self._without_peer[peers].values()]):
            self._leave_waits(errand)
            self._ask_next(errand, now_s)
        self._ask_for_whom_there_is_room(now_s)

    def _ask_for_whom_there_is_room(self, now_s: float) -> None:
        """One at a time, in the queue's order: all of them together would find the same few blocks."""
        first = self._without_room.first()
        if first is None or self._endpoint is None or not self._scheduler.seating.has_room(first):
            return
        if not self._scheduler.may_seat(first):
            return
        errand = self._errands[first]
        self._leave_waits(errand)
        errand.attempts.clear()
        self._ask_next(errand, now_s)

    def _tell_data_plane(self, now_s: float) -> None:
        leases, self._leases.fresh = self._leases.fresh, []
        for request in leases:
            if request.lease is not None and (errand := self._errands.get(request)) is not None:
                self._by_lease[request.lease.lease_id] = errand
                self._expected_s[request.lease.lease_id] = now_s
                expect = Expect(request.lease.lease_id, request.lease.block_ids, self._config.kv_checksums)
                self._commands.append(expect)
        revoked, self._leases.revoked = self._leases.revoked, []
        for lease_id in revoked:
            self._by_lease.pop(lease_id, None)
            self._revoked_s[lease_id] = now_s
            self._commands.append(Revoke(lease_id))
        for lease_id, revoked_s in self._revoked_s.items():
            if now_s - revoked_s > QUIET_S:
                self._leases.stuck.add(lease_id)
