"""What an engine core was given and what it answered, written down so that it can be run again.

The core is a function of messages and times, so this is all that a strange event in production consists of. A record of
something given is written before the core sees it: if the core dies of it, the recording ends with the cause.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from onward.config import EngineConfig
from onward.engine.core import EngineCore
from onward.engine.handovers import Outgoing
from onward.engine.recording_file import RecordingWriter
from onward.engine.token_disguise import TokenDisguise
from onward.proto import SCHEMA_VERSION
from onward.proto.handoff import ToDecode, ToPrefill
from onward.proto.kv_transfer import KvCommand, KvReport
from onward.proto.request import FromEngine, ToEngine
from onward.proto.step import StepPlan, StepResult, WorkerHello
from onward.version import __version__


class Begun(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """The first record: what the core was made from."""

    schema_version: int
    onward_version: str
    incarnation: str
    config: EngineConfig
    worker: WorkerHello
    wall_s: float
    true_tokens: bool
    """Whether the token ids are the model's own, or those of a disguise."""


class Received(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    now_s: float
    owner: str
    message: ToEngine


class ApiLost(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    now_s: float
    owner: str


class Committed(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    now_s: float
    result: StepResult


class WorkerLost(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    now_s: float


class WorkerUp(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    now_s: float
    worker: WorkerHello


class FromPrefill(msgspec.Struct, frozen=True, array_like=True, tag="fp"):
    now_s: float
    peer: str
    message: ToDecode


class FromDecode(msgspec.Struct, frozen=True, array_like=True, tag="fd"):
    now_s: float
    decode: str
    message: ToPrefill


class PeerReached(msgspec.Struct, frozen=True, array_like=True, tag="pr"):
    now_s: float
    peer: str
    ok: bool


class KvReported(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    now_s: float
    report: KvReport


class Ticked(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    now_s: float


class Planned(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """Asked for a plan, and the answer."""

    now_s: float
    plan: StepPlan | None


class Drained(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """Asked for messages, and the answer: to whom, and what."""

    messages: list[tuple[str, FromEngine]]


class DrainedHandovers(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """Asked for what goes to other instances and to the data plane, and the answer. One without anything is left out."""

    to_prefill: list[tuple[str, ToPrefill]]
    to_decode: list[tuple[str, ToDecode]]
    to_data_plane: list[KvCommand]


class Left(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """Told to leave: the last turn."""


class Died(msgspec.Struct, frozen=True, array_like=True, tag="x"):
    """The core raised, in the call that the record before this one tells of."""

    fault: str


Record = (
    Begun
    | Received
    | ApiLost
    | FromPrefill
    | FromDecode
    | PeerReached
    | KvReported
    | Committed
    | WorkerLost
    | WorkerUp
    | Ticked
    | Planned
    | Drained
    | DrainedHandovers
    | Left
    | Died
)


class RecordedCore(EngineCore):
    """An engine core that writes down what it is given and what it answers, and is otherwise the same."""

    def __init__(
        self, config: EngineConfig, incarnation: str, worker: WorkerHello, writer: RecordingWriter, wall_s: float
    ) -> None:
        super().__init__(config, incarnation, worker)
        self._writer = writer
        disguise = None if config.record_tokens else TokenDisguise(worker.vocab_size)
        self._hide: Callable[[Any], Any] = disguise.hide if disguise else lambda message: message
        writer.write(
            Begun(SCHEMA_VERSION, __version__, incarnation, config, worker, wall_s, true_tokens=config.record_tokens)
        )

    def receive(self, owner: str, message: ToEngine, now_s: float) -> None:
        self._writer.write(Received(now_s, owner, self._hide(message)))
        self._watched(super().receive, owner, message, now_s)

    def api_gone(self, owner: str, now_s: float) -> None:
        self._writer.write(ApiLost(now_s, owner))
        self._watched(super().api_gone, owner, now_s)

    def from_prefill(self, peer: str, message: ToDecode, now_s: float) -> None:
        self._writer.write(FromPrefill(now_s, peer, self._hide(message)))
        self._watched(super().from_prefill, peer, message, now_s)

    def from_decode(self, decode: str, message: ToPrefill, now_s: float) -> None:
        self._writer.write(FromDecode(now_s, decode, self._hide(message)))
        self._watched(super().from_decode, decode, message, now_s)

    def peer_reached(self, peer: str, ok: bool, now_s: float) -> None:
        self._writer.write(PeerReached(now_s, peer, ok))
        self._watched(super().peer_reached, peer, ok, now_s)

    def kv_report(self, report: KvReport, now_s: float) -> None:
        self._writer.write(KvReported(now_s, report))
        self._watched(super().kv_report, report, now_s)

    def commit(self, result: StepResult, now_s: float) -> None:
        self._writer.write(Committed(now_s, self._hide(result)))
        self._watched(super().commit, result, now_s)

    def worker_lost(self, now_s: float) -> None:
        self._writer.write(WorkerLost(now_s))
        self._watched(super().worker_lost, now_s)

    def worker_up(self, worker: WorkerHello, now_s: float) -> None:
        self._writer.write(WorkerUp(now_s, worker))
        self._watched(super().worker_up, worker, now_s)

    def tick(self, now_s: float) -> None:
        self._writer.write(Ticked(now_s))
        self._watched(super().tick, now_s)
        self._writer.flush_if_due(now_s)

    def plan(self, now_s: float) -> StepPlan | None:
        try:
            plan = super().plan(now_s)
        except BaseException as fault:
            self._writer.write(Planned(now_s, None))
            self._writer.write(Died(repr(fault)))
            raise
        self._writer.write(Planned(now_s, self._hide(plan)))
        return plan

    def drain(self) -> list[tuple[str, FromEngine]]:
        messages = super().drain()
        self._writer.write(Drained([(owner, self._hide(message)) for owner, message in messages]))
        return messages

    def drain_handovers(self) -> Outgoing:
        outgoing = super().drain_handovers()
        if outgoing.to_prefill or outgoing.to_decode or outgoing.to_data_plane:
            to_prefill = [(peer, self._hide(message)) for peer, message in outgoing.to_prefill]
            to_decode = [(decode, self._hide(message)) for decode, message in outgoing.to_decode]
            self._writer.write(DrainedHandovers(to_prefill, to_decode, outgoing.to_data_plane))
        return outgoing

    def leave(self) -> None:
        self._writer.write(Left())
        self._watched(super().leave)

    def _watched(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except BaseException as fault:
            self._writer.write(Died(repr(fault)))
            raise
