"""The engine's dealings with other instances, of either kind, as the core sees them: one thing to feed and to drain.

An instance may have its prompts computed by peers (`remote_prefill`), compute prompts for peers (`prefill_service`), do
both, or, like most, neither.
"""

from dataclasses import dataclass, field

from onward.config import EngineConfig
from onward.engine.admission import EngineLimits
from onward.engine.handoff.handoff_metrics import HandoffMetrics
from onward.engine.handoff.prefill_service import PrefillService
from onward.engine.handoff.remote_prefill import RemotePrefillClient
from onward.engine.live_requests import LiveRequests
from onward.engine.outbox import ApiOutbox
from onward.engine.request import Request
from onward.engine.request_phases import PhaseRecorder
from onward.engine.scheduling.scheduler import Scheduler
from onward.engine.step_result_processor import StepResultProcessor
from onward.obs.metrics import Registry
from onward.proto.handoff import ToDecode, ToPrefill
from onward.proto.kv_transfer import KvCommand, KvReport, PushComplete, PushFailed, PushQuiesced
from onward.proto.step import WorkerHello


@dataclass(slots=True)
class HandoffOutbox:
    """Messages to other instances, and commands for the worker's KV transfer thread."""

    prefill_peers: frozenset[str] = frozenset()
    """Addresses of all prefill instances that we have to do with."""
    to_prefill: list[tuple[str, ToPrefill]] = field(default_factory=list)
    """By the address of the prefill instance."""
    to_decode: list[tuple[str, ToDecode]] = field(default_factory=list)
    """By the incarnation of the decode instance."""
    kv_commands: list[KvCommand] = field(default_factory=list)


class HandoffManager:
    def __init__(
        self,
        config: EngineConfig,
        incarnation: str,
        worker: WorkerHello,
        scheduler: Scheduler,
        result_processor: StepResultProcessor,
        outbox: ApiOutbox,
        live: LiveRequests,
        limits: EngineLimits,
        registry: Registry,
        phases: PhaseRecorder,
    ) -> None:
        self._remote: RemotePrefillClient | None = None
        self._service: PrefillService | None = None
        if worker.kv_layout is None:
            return
        metrics = HandoffMetrics(
            registry,
            decode_states=lambda: self._remote.count_by_state() if self._remote else {},
            prefill_states=lambda: self._service.count_by_state() if self._service else {},
            leases=lambda: scheduler.leases.count_by_state() if self._remote else {},
        )
        if config.role != "prefill" and worker.kv_endpoint is not None:
            scheduler.remote_prefill_enabled = True
            self._remote = RemotePrefillClient(
                config, incarnation, worker, scheduler, result_processor, metrics, phases
            )
        if config.role != "decode":
            self._service = PrefillService(
                config, incarnation, worker, scheduler, result_processor, outbox, live, limits, metrics, phases
            )

    @property
    def num_remote_prefills(self) -> int:
        """Requests that wait, here or at a peer, for their prompt to be computed."""
        return len(self._remote.tasks) if self._remote else 0

    @property
    def num_remote_prompt_tokens(self) -> int:
        return self._remote.tasks.num_prompt_tokens if self._remote else 0

    @property
    def idle(self) -> bool:
        return (self._remote is None or self._remote.idle) and (self._service is None or self._service.idle)

    def num_peer_heartbeats(self, request: Request) -> int:
        """Grows as long as a peer works for this one, though nothing of it is here yet."""
        task = self._remote.tasks.get(request) if self._remote else None
        return task.num_heartbeats if task else 0

    def route_new_requests(self, now_s: float) -> None:
        if self._remote is not None:
            self._remote.route_new_requests(now_s)

    def receive_from_prefill(self, peer: str, message: ToDecode, now_s: float) -> None:
        assert self._remote is not None, "only those who have peers hear from them"
        self._remote.receive(peer, message, now_s)

    def receive_from_decode(self, decode: str, message: ToPrefill, now_s: float) -> None:
        assert self._service is not None, "only those who work for others are asked to"
        self._service.receive(decode, message, now_s)

    def on_peer_send(self, peer: str, ok: bool, now_s: float) -> None:
        if self._remote is not None:
            self._remote.on_peer_send(peer, ok, now_s)

    def receive_kv_report(self, report: KvReport, now_s: float) -> None:
        if isinstance(report, (PushComplete, PushFailed, PushQuiesced)):
            assert self._service is not None, "nothing else pushes"
            self._service.receive_kv_report(report, now_s)
        else:
            assert self._remote is not None, "nothing else is written by peers"
            self._remote.receive_kv_report(report, now_s)

    def tick(self, now_s: float, worker_silent_s: float) -> None:
        """Handles timeouts of handoffs. `worker_silent_s` is how long our worker has been busy with one step, or
        absent."""
        if self._remote is not None:
            self._remote.tick(now_s)
        if self._service is not None:
            self._service.tick(now_s, worker_silent_s)

    def on_worker_lost(self, now_s: float) -> None:
        """Ends all handoffs in progress, also if the KV memory is kept: the worker that moved their data is dead."""
        if self._remote is not None:
            self._remote.on_worker_lost(now_s)
        if self._service is not None:
            self._service.on_worker_lost(now_s)

    def on_worker_ready(self, worker: WorkerHello) -> None:
        if self._remote is not None:
            self._remote.on_worker_ready(worker)

    def take_messages(self) -> HandoffOutbox:
        outgoing = HandoffOutbox()
        if self._remote is not None:
            outgoing.prefill_peers = self._remote.peers.addresses
            outgoing.to_prefill, commands = self._remote.take_messages()
            outgoing.kv_commands += commands
        if self._service is not None:
            outgoing.to_decode, commands = self._service.take_messages()
            outgoing.kv_commands += commands
        return outgoing

    def close(self) -> None:
        """Tells all peers that this instance leaves."""
        if self._remote is not None:
            self._remote.close()
        if self._service is not None:
            self._service.close()
