"""A prefill instance's work for decode instances: prompts come in, KV and a first token go out.

    PrefillRequested -> queue -> there is room: offer -> GrantReceived: compute and push -> token sampled and all sent:
    ready -> HandoffCompleted

The protocol is `PrefillHandoffProtocol`; the prompt is a request like any other in the scheduler; this keeps
a task for each. A task outlives its request: what a transfer reads stays *sending* until the peer has taken it or the
transfer is known to be quiet. We decide nothing about the token: the peer's own stages do. No I/O: `take_messages`
returns what is to be sent.
"""

from dataclasses import dataclass, field

from onward.config import EngineConfig
from onward.engine import admission
from onward.engine.handoff.handoff_metrics import HandoffMetrics, log_failed_handoff
from onward.engine.live_requests import LiveRequests
from onward.engine.outbox import ApiOutbox, PeerPrefillResult
from onward.engine.request import FinishReason, Request, RequestStatus
from onward.engine.request_phases import PhaseRecorder, TimedChange
from onward.engine.scheduling import scheduling_policy
from onward.engine.scheduling.outgoing_handoffs import OutgoingHandoffState
from onward.engine.scheduling.scheduler import Scheduler
from onward.engine.step_result_processor import StepResultProcessor
from onward.errors import OnwardError, PdError
from onward.pd import handoff_errors
from onward.pd.handoff_events import GrantReceived, HandoffCancelled, HandoffCompleted, HandoffKey, PrefillRequested
from onward.pd.handoff_timeouts import HandoffTimeouts
from onward.pd.layout import layout_difference
from onward.pd.prefill_handoff_protocol import PrefillHandoffProtocol
from onward.proto.engine import ErrorInfo
from onward.proto.error_info import to_error_info
from onward.proto.handoff import (
    LeaseGrant,
    Ping,
    Pong,
    PrefillDone,
    PrefillPhases,
    PrefillRequest,
    ToDecode,
    ToPrefill,
)
from onward.proto.kv_transfer import KvCommand, KvPush, KvReport, PushComplete, PushFailed
from onward.proto.step import WorkerHello
from onward.proto.trace import PhaseCause, PhaseChange

WORKER_SILENCE_TIMEOUT_S = 10.0
"""How long a worker may compute one step, or be absent, before unfinished prompts of peers fail. Their instances ask
other peers, or compute the prompts themselves."""


@dataclass(slots=True)
class PeerPrefillTask:
    key: HandoffKey
    request: Request
    result: PeerPrefillResult | None = None
    changes: list[TimedChange] = field(default_factory=list)
    """Phases of a traced request, until they are sent."""


class PrefillService:
    def __init__(
        self,
        config: EngineConfig,
        incarnation: str,
        worker: WorkerHello,
        scheduler: Scheduler,
        result_processor: StepResultProcessor,
        outbox: ApiOutbox,
        live: LiveRequests,
        limits: admission.EngineLimits,
        metrics: HandoffMetrics,
        phases: PhaseRecorder,
    ) -> None:
        assert worker.kv_layout is not None, "a prefill instance's worker has KV memory to send from"
        self._config, self._scheduler, self._result_processor, self._outbox = (
            config,
            scheduler,
            result_processor,
            outbox,
        )
        self._live, self._limits, self._metrics, self._layout = live, limits, metrics, worker.kv_layout
        self._phases = phases
        self._outgoing_handoffs = scheduler.outgoing_handoffs
        self._engine_incarnation = incarnation
        self._num_kv_resets = 0
        self._protocol = PrefillHandoffProtocol(
            self.incarnation, HandoffTimeouts(config.lease_s, config.offer_hold_s, config.handoff_timeout_s)
        )
        self._tasks: dict[HandoffKey, PeerPrefillTask] = {}
        self._commands: list[KvCommand] = []
        self._unrepeated: list[tuple[str, ToDecode]] = []
        """Messages that are sent once and belong to no state of a handoff."""
        self._worker_is_silent = False

    @property
    def incarnation(self) -> str:
        """Names this instance's KV memory together with the worker that pushes from it. Peers refer to both by this
        name."""
        return f"{self._engine_incarnation}.{self._num_kv_resets}"

    @property
    def idle(self) -> bool:
        return not self._tasks and not self._outgoing_handoffs.num_sending and self._protocol.idle

    def count_by_state(self) -> dict[str, int]:
        return self._protocol.count_by_state() | {"sending": self._outgoing_handoffs.num_sending}

    def receive(self, decode_incarnation: str, message: ToPrefill, now_s: float) -> None:
        if isinstance(message, Ping):
            self._unrepeated.append((decode_incarnation, Pong(self.incarnation)))
            return
        self._protocol.receive(decode_incarnation, message, now_s)
        self._process_events(now_s)

    def receive_kv_report(self, report: KvReport, now_s: float) -> None:
        handoff = self._outgoing_handoffs.by_lease(report.lease_id)
        if handoff is not None and handoff.state is OutgoingHandoffState.STOPPING:
            self._outgoing_handoffs.release(handoff)  # whichever it is: nothing is read any more
            return
        match report:
            case PushComplete() if handoff is not None:
                handoff.sent = report
                self._metrics.bytes.inc(handoff.backend, "out", by=report.num_bytes)
                self._metrics.seconds.inc(handoff.backend, "out", by=report.seconds)
                self._ready_if_complete(self._tasks[handoff.key], now_s)
            case PushFailed() if handoff is not None:
                error = handoff_errors.transfer_failed(report.message)
                self._fail(self._tasks[handoff.key], error, now_s, is_quiesced=True)
            case _:
                self._metrics.unexpected_reports.inc()

    def tick(self, now_s: float, worker_silent_s: float) -> None:
        self._collect_results(now_s)
        self._worker_is_silent = worker_silent_s >= WORKER_SILENCE_TIMEOUT_S
        if self._worker_is_silent:
            self._fail_unfinished(now_s)
        self._protocol.tick(now_s)
        self._process_events(now_s)
        for handoff in self._outgoing_handoffs.take_new_offers():
            self._metrics.offers.inc("prefill")
            self._protocol.offer(handoff.key, len(handoff.request.block_ids), now_s)

    def on_worker_lost(self, now_s: float) -> None:
        """Ends every push, also if the KV memory is kept, because the worker that pushed is dead. Peers whose prompts
        were being computed are told that the worker crashed: such a prompt may have been the cause."""
        self._collect_results(now_s)
        crashed = {request.handoff for step in self._scheduler.steps_in_flight for request in step.runs}
        error = handoff_errors.worker_crashed("the worker died over this prompt")
        for task in [task for key, task in self._tasks.items() if key in crashed]:
            self._fail(task, error, now_s, is_quiesced=True)
        self._num_kv_resets += 1
        self._protocol.reset(self.incarnation, now_s)
        self._process_events(now_s)
        self._commands.clear()

    def take_messages(self) -> tuple[list[tuple[str, ToDecode]], list[KvCommand]]:
        messages = self._unrepeated + self._protocol.take_messages()
        commands, self._commands, self._unrepeated = self._commands, [], []
        return messages, commands

    def close(self) -> None:
        self._protocol.close()

    def _process_events(self, now_s: float) -> None:
        for event in self._protocol.take_events():
            if isinstance(event, PrefillRequested):
                self._on_prefill_requested(event.key, event.prefill, now_s)
                continue
            task = self._tasks.get(event.key)
            if task is None:
                continue  # what came before in this turn has ended it
            match event:
                case GrantReceived():
                    self._on_granted(task, event.grant, now_s)
                case HandoffCompleted():
                    self._metrics.ended.inc("prefill", "taken")
                    self._result_processor.record_finish(task.request, FinishReason.HANDED_OFF, now_s)
                    self._end_task(task, now_s, is_quiesced=True)
                case HandoffCancelled():
                    self._end_failed(task, event.error, now_s, is_quiesced=False)

    def _on_prefill_requested(self, key: HandoffKey, prefill: PrefillRequest, now_s: float) -> None:
        try:
            if reason := layout_difference(self._layout, prefill.kv_layout):
                self._refuse(prefill, key, handoff_errors.layout_mismatch(reason), now_s)
                return
            if self._worker_is_silent:
                raise _worker_silent()
            self._check_queue(len(prefill.token_ids), now_s)
            request = admission.create_peer_prefill_request(prefill, key, self._limits, now_s)
        except OnwardError as error:
            self._refuse(prefill, key, to_error_info(error), now_s)
            return
        task = self._tasks[key] = PeerPrefillTask(key, request)
        if prefill.is_traced:
            request.phases = self._phases.new_log_for_peer(task.changes)
            request.phases.enter("queue", request.num_generated)
        self._live.add(request)
        self._scheduler.enqueue(request)
        if scheduling_policy.must_run_alone(request):
            self._scheduler.suspects.add(request)

    def _check_queue(self, num_tokens: int, now_s: float) -> None:
        waiting = self._scheduler.waiting
        backlog = admission.QueueBacklog(len(waiting), waiting.num_prompt_tokens)
        if refusal := admission.check_queue(backlog, num_tokens, self._config, self._result_processor.rates, now_s):
            raise refusal.error

    def _fail_unfinished(self, now_s: float) -> None:
        """Fails all prompts because our worker is silent. Prompts with a first token and a complete push are left to
        their peers, since they no longer need the worker."""
        for task in [task for task in self._tasks.values() if task.result is None or self._sent_push(task) is None]:
            self._fail(task, to_error_info(_worker_silent()), now_s)

    def _sent_push(self, task: PeerPrefillTask) -> PushComplete | None:
        handoff = self._outgoing_handoffs.get(task.key)
        return None if handoff is None else handoff.sent

    def _refuse(self, prefill: PrefillRequest, key: HandoffKey, error: ErrorInfo, now_s: float) -> None:
        self._metrics.refusals.inc("prefill", error.code)
        log_failed_handoff(
            "prefill", prefill.request_id, key.decode_incarnation, error, label=prefill.client_request_id
        )
        self._protocol.refuse(key, error, now_s)

    def _on_granted(self, task: PeerPrefillTask, grant: LeaseGrant, now_s: float) -> None:
        handoff = self._outgoing_handoffs.get(task.key)
        first_block, remainder = divmod(grant.num_cached_tokens, self._limits.worker.block_size)
        # A request that has just ended, and whose peer does not know it yet, has neither an offer nor blocks any more.
        if handoff is None or remainder or first_block + len(grant.block_ids) != len(task.request.block_ids):
            error = PdError("pd_layout_mismatch", "the granted blocks do not fit the prompt", stage="offer")
            self._fail(task, to_error_info(error), now_s)
            return
        target = KvPush(grant.lease_id, grant.endpoint, first_block, grant.block_ids, grant.checksums)
        self._outgoing_handoffs.start(handoff, target, now_s)

    def _collect_results(self, now_s: float) -> None:
        """Takes the results of prompts that are computed for peers from the outbox."""
        for result in self._outbox.take_peer_prefill_results():
            assert result.request.handoff is not None, "a prompt computed for a peer belongs to a handoff"
            task = self._tasks.get(result.request.handoff)
            if task is None:
                continue
            if result.error is not None:
                error = handoff_errors.prefill_failed(f"{result.error.message} ({result.error.code})")
                self._fail(task, error, now_s)
            elif result.token_ids:
                task.result = result
                self._ready_if_complete(task, now_s)

    def _ready_if_complete(self, task: PeerPrefillTask, now_s: float) -> None:
        """Sends the result to the peer once the first token is known and the worker has reported that every block is
        written. Otherwise does nothing; it is called again when the missing part arrives."""
        sent = self._sent_push(task)
        if task.result is None or sent is None:
            return
        done = PrefillDone(
            task.key.handoff_id,
            self.incarnation,
            task.result.token_ids,
            task.request.num_cached_tokens or 0,
            task.result.logprobs,
            task.result.prompt_logprobs,
            task.result.draft_token_ids,
            sent.checksums,
            task.result.grammar_done,
        )
        self._report_phases(task, now_s)
        self._protocol.ready(task.key, done, now_s)

    def _report_phases(self, task: PeerPrefillTask, now_s: float, cause: PhaseCause = "") -> None:
        if not task.changes:
            return
        changes = [change.to_message(now_s) for change in task.changes]
        task.changes.clear()
        changes.append(PhaseChange("ended", 0.0, cause, num_tokens=task.request.num_generated))
        phases = PrefillPhases(task.key.handoff_id, self.incarnation, changes)
        self._unrepeated.append((task.key.decode_incarnation, phases))

    def _fail(self, task: PeerPrefillTask, error: ErrorInfo, now_s: float, *, is_quiesced: bool = False) -> None:
        self._report_phases(task, now_s, "handoff_failed")
        self._protocol.fail(task.key, error, now_s)
        self._end_failed(task, error, now_s, is_quiesced=is_quiesced)

    def _end_failed(self, task: PeerPrefillTask, error: ErrorInfo, now_s: float, *, is_quiesced: bool) -> None:
        self._metrics.ended.inc("prefill", error.code)
        request = task.request
        log_failed_handoff(
            "prefill", request.request_id, task.key.decode_incarnation, error, label=request.spec.client_request_id
        )
        if task.request.finish_reason is FinishReason.HANDED_OFF:  # sampled, and the peer never had its KV
            self._result_processor.record_finish(task.request, FinishReason.ERROR, now_s, error.code)
        self._end_task(task, now_s, is_quiesced=is_quiesced)

    def _end_task(self, task: PeerPrefillTask, now_s: float, *, is_quiesced: bool) -> None:
        """Forgets the task. Its blocks stay in the transfer's hands until that is quiet."""
        del self._tasks[task.key]
        if task.request.status is not RequestStatus.FINISHED:
            self._result_processor.finish(task.request, FinishReason.ABORT, now_s)
        self._commands += self._outgoing_handoffs.end(task.key, now_s, is_quiesced=is_quiesced)


def _worker_silent() -> PdError:
    """Says more of us than of the prompt, so the peer leaves us alone for a while."""
    message = f"the prefill instance's worker has completed no step for {WORKER_SILENCE_TIMEOUT_S:g} s"
    return PdError("pd_prefill_failed", message, stage=handoff_errors.SILENCE_STAGE)
