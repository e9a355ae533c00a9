"""Records the inputs and outputs of an engine core, so that a run can be replayed.

The core is a function of messages and times, so these are enough to reproduce a production fault. An input is recorded
before the core processes it: if the core crashes on it, the recording ends with the cause.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from onward.config import EngineConfig
from onward.engine.core import EngineCore
from onward.engine.handoff.handoff_manager import HandoffOutbox
from onward.engine.recording.recording_file import RecordingWriter
from onward.engine.recording.token_anonymizer import TokenAnonymizer
from onward.engine.scheduling.persisted_block_hashes import PersistedBlockHashes
from onward.proto import SCHEMA_VERSION
from onward.proto.engine import FromEngine, ToEngine
from onward.proto.handoff import ToDecode, ToPrefill
from onward.proto.kv_transfer import KvCommand, KvReport
from onward.proto.step import StepPlan, StepResult, WorkerHello
from onward.version import __version__


class RecordingHeader(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """The first record: what the core was made from."""

    schema_version: int
    onward_version: str
    incarnation: str
    config: EngineConfig
    worker: WorkerHello
    wall_s: float
    has_real_tokens: bool
    """Whether the token ids are the model's own, or those of a disguise."""


class ApiMessageRecord(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    now_s: float
    api_id: str
    message: ToEngine


class ApiLostRecord(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    now_s: float
    api_id: str


class StepResultRecord(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    now_s: float
    result: StepResult


class WorkerLostRecord(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    now_s: float
    keeps_memory: bool = False


class WorkerReadyRecord(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    now_s: float
    worker: WorkerHello


class PrefillMessageRecord(msgspec.Struct, frozen=True, array_like=True, tag="fp"):
    now_s: float
    peer: str
    message: ToDecode


class DecodeMessageRecord(msgspec.Struct, frozen=True, array_like=True, tag="fd"):
    now_s: float
    decode: str
    message: ToPrefill


class PeerSendRecord(msgspec.Struct, frozen=True, array_like=True, tag="pr"):
    now_s: float
    peer: str
    ok: bool


class KvReportRecord(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    now_s: float
    report: KvReport


class TickRecord(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    now_s: float


class PlanRecord(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """Asked for a plan, and the answer."""

    now_s: float
    plan: StepPlan | None


class ApiOutboxRecord(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """The messages that the core sent to api processes in one turn, each with its recipient."""

    messages: list[tuple[str, FromEngine]]


class HandoffOutboxRecord(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """Asked for what goes to other instances and to the data plane, and the answer. One without anything is left out."""

    to_prefill: list[tuple[str, ToPrefill]]
    to_decode: list[tuple[str, ToDecode]]
    kv_commands: list[KvCommand]


class CloseRecord(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """The shutdown of the core: its last turn."""


class CrashRecord(msgspec.Struct, frozen=True, array_like=True, tag="x"):
    """The core raised an exception in the call of the previous record."""

    fault: str


Record = (
    RecordingHeader
    | ApiMessageRecord
    | ApiLostRecord
    | PrefillMessageRecord
    | DecodeMessageRecord
    | PeerSendRecord
    | KvReportRecord
    | StepResultRecord
    | WorkerLostRecord
    | WorkerReadyRecord
    | TickRecord
    | PlanRecord
    | ApiOutboxRecord
    | HandoffOutboxRecord
    | CloseRecord
    | CrashRecord
)


class RecordingEngineCore(EngineCore):
    """An engine core that writes down what it is given and what it answers, and is otherwise the same."""

    def __init__(
        self, config: EngineConfig, incarnation: str, worker: WorkerHello, writer: RecordingWriter, wall_s: float
    ) -> None:
        super().__init__(config, incarnation, worker)
        self._writer = writer
        anonymizer = None if config.record_tokens else TokenAnonymizer(worker.vocab_size)
        self._hide: Callable[[Any], Any] = anonymizer.anonymize if anonymizer else lambda message: message
        writer.write(
            RecordingHeader(
                SCHEMA_VERSION, __version__, incarnation, config, worker, wall_s, has_real_tokens=config.record_tokens
            )
        )

    def receive_from_api(self, api_id: str, message: ToEngine, now_s: float) -> None:
        self._record(
            ApiMessageRecord(now_s, api_id, self._hide(message)), super().receive_from_api, api_id, message, now_s
        )

    def on_api_lost(self, api_id: str, now_s: float) -> None:
        self._record(ApiLostRecord(now_s, api_id), super().on_api_lost, api_id, now_s)

    def receive_from_prefill(self, peer: str, message: ToDecode, now_s: float) -> None:
        self._record(
            PrefillMessageRecord(now_s, peer, self._hide(message)), super().receive_from_prefill, peer, message, now_s
        )

    def receive_from_decode(self, decode: str, message: ToPrefill, now_s: float) -> None:
        self._record(
            DecodeMessageRecord(now_s, decode, self._hide(message)), super().receive_from_decode, decode, message, now_s
        )

    def on_peer_send(self, peer: str, ok: bool, now_s: float) -> None:
        self._record(PeerSendRecord(now_s, peer, ok), super().on_peer_send, peer, ok, now_s)

    def receive_kv_report(self, report: KvReport, now_s: float) -> None:
        self._record(KvReportRecord(now_s, report), super().receive_kv_report, report, now_s)

    def commit(self, result: StepResult, now_s: float) -> None:
        self._record(StepResultRecord(now_s, self._hide(result)), super().commit, result, now_s)

    def on_worker_lost(self, now_s: float, *, keeps_memory: bool = False) -> None:
        call = partial(super().on_worker_lost, keeps_memory=keeps_memory)
        self._record(WorkerLostRecord(now_s, keeps_memory), call, now_s)

    def on_worker_ready(
        self, worker: WorkerHello, now_s: float, persisted_hashes: PersistedBlockHashes | None = None
    ) -> None:
        self._record(WorkerReadyRecord(now_s, worker), super().on_worker_ready, worker, now_s, persisted_hashes)

    def tick(self, now_s: float) -> None:
        self._record(TickRecord(now_s), super().tick, now_s)
        self._writer.flush_if_due(now_s)

    def plan(self, now_s: float) -> StepPlan | None:
        try:
            plan = super().plan(now_s)
        except BaseException as fault:
            self._writer.write(PlanRecord(now_s, None))
            self._writer.write(CrashRecord(repr(fault)))
            raise
        self._writer.write(PlanRecord(now_s, self._hide(plan)))
        return plan

    def take_api_messages(self) -> list[tuple[str, FromEngine]]:
        messages = super().take_api_messages()
        self._writer.write(ApiOutboxRecord([(api_id, self._hide(message)) for api_id, message in messages]))
        return messages

    def take_handoff_messages(self) -> HandoffOutbox:
        outgoing = super().take_handoff_messages()
        if outgoing.to_prefill or outgoing.to_decode or outgoing.kv_commands:
            to_prefill = [(peer, self._hide(message)) for peer, message in outgoing.to_prefill]
            to_decode = [(decode, self._hide(message)) for decode, message in outgoing.to_decode]
            self._writer.write(HandoffOutboxRecord(to_prefill, to_decode, outgoing.kv_commands))
        return outgoing

    def close(self) -> None:
        self._record(CloseRecord(), super().close)

    def _record(self, record: Record, call: Callable[..., None], *arguments: Any) -> None:
        self._writer.write(record)
        try:
            call(*arguments)
        except BaseException as fault:
            self._writer.write(CrashRecord(repr(fault)))
            raise
