"""Runs a recording again on a fresh core, and says where its answers first differ from those recorded."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from onward.engine.core import EngineCore
from onward.engine.recording.recorder import (
    ApiLostRecord,
    ApiMessageRecord,
    ApiOutboxRecord,
    CloseRecord,
    CrashRecord,
    DecodeMessageRecord,
    HandoffOutboxRecord,
    KvReportRecord,
    PeerSendRecord,
    PlanRecord,
    PrefillMessageRecord,
    Record,
    RecordingHeader,
    StepResultRecord,
    TickRecord,
    WorkerLostRecord,
    WorkerReadyRecord,
)
from onward.engine.recording.token_anonymizer import anonymize_block_hashes
from onward.errors import InvalidRequest
from onward.proto import SCHEMA_VERSION
from onward.proto.engine import FromEngine

MAX_SHOWN_CHARS = 300

READABLE_SCHEMAS = frozenset({5, 6, SCHEMA_VERSION})
"""Schema 6 has other names than 5, and the same messages. Schema 7 has more fields, which are absent in older ones."""
RENAMED_CONFIG_FIELDS = {"handover_timeout_s": "handoff_timeout_s", "num_drafts": "num_draft_tokens"}
_decoder = msgspec.msgpack.Decoder(Record)
_encoder = msgspec.msgpack.Encoder()


@dataclass(slots=True, frozen=True)
class ReplayDifference:
    record: int
    """Number of the record in the recording; the first one is 0."""
    seconds: float
    """Since the recording's first time."""
    step: int
    """The last step that had been completed."""
    where: str
    recorded: str
    replayed: str


@dataclass(slots=True)
class ReplayResult:
    begun: RecordingHeader
    num_records: int = 1
    num_answers: int = 0
    seconds: float = 0.0
    difference: ReplayDifference | None = None
    died: str | None = None
    """The fault that ended the recorded engine, and this one too."""


class Replayer:
    def __init__(self, header: RecordingHeader) -> None:
        self.outcome = ReplayResult(header)
        self._core = EngineCore(header.config, header.incarnation, header.worker)
        self._first_s: float | None = None
        self._step = 0
        self._fault: Exception | None = None

    def replay_record(self, record: Record) -> ReplayDifference | None:
        """Does what was done then. The caller stops at the first difference."""
        outcome = self.outcome
        if isinstance(record, CrashRecord):
            if self._fault is None or repr(self._fault) != record.fault:
                return self._report_difference(
                    "the engine's death", record.fault, repr(self._fault) if self._fault else "none"
                )
            outcome.died = record.fault
        elif self._fault is not None:
            return self._report_difference("the core raised", "no fault", repr(self._fault))
        else:
            try:
                outcome.difference = self._apply(record)
            except Exception as fault:
                self._fault = fault  # the next record says whether it died then too
        outcome.num_records += 1
        return outcome.difference

    def finish(self) -> None:
        if self._fault is not None and self.outcome.died is None and self.outcome.difference is None:
            self._report_difference("the core raised", "the recording ends here", repr(self._fault))

    def _apply(self, record: Record) -> ReplayDifference | None:
        core = self._core
        if not isinstance(record, RecordingHeader | ApiOutboxRecord | HandoffOutboxRecord | CloseRecord | CrashRecord):
            self._first_s = record.now_s if self._first_s is None else self._first_s
            self.outcome.seconds = record.now_s - self._first_s
        match record:
            case ApiMessageRecord():
                core.receive_from_api(record.api_id, record.message, record.now_s)
            case ApiLostRecord():
                core.on_api_lost(record.api_id, record.now_s)
            case PrefillMessageRecord():
                core.receive_from_prefill(record.peer, record.message, record.now_s)
            case DecodeMessageRecord():
                core.receive_from_decode(record.decode, record.message, record.now_s)
            case PeerSendRecord():
                core.on_peer_send(record.peer, record.ok, record.now_s)
            case KvReportRecord():
                core.receive_kv_report(record.report, record.now_s)
            case StepResultRecord():
                core.commit(record.result, record.now_s)
                self._step = record.result.step
            case WorkerLostRecord():
                core.on_worker_lost(record.now_s, keeps_memory=record.keeps_memory)
            case WorkerReadyRecord():
                core.on_worker_ready(record.worker, record.now_s)
            case TickRecord():
                core.tick(record.now_s)
            case PlanRecord():
                return self._compare("plan", record.plan, core.plan(record.now_s))
            case ApiOutboxRecord():
                return self._compare("messages", record.messages, self._as_recorded(core.take_api_messages()))
            case HandoffOutboxRecord():
                handoff_messages = core.take_handoff_messages()
                replayed = HandoffOutboxRecord(
                    handoff_messages.to_prefill, handoff_messages.to_decode, handoff_messages.kv_commands
                )
                return self._compare("handoffs", record, replayed)
            case CloseRecord():
                core.close()
            case RecordingHeader() | CrashRecord():
                raise AssertionError("not here")
        return None

    def _as_recorded(self, messages: list[tuple[str, FromEngine]]) -> list[tuple[str, FromEngine]]:
        """Names of blocks are hashes of the tokens, so a disguised recording has others in their place."""
        if self.outcome.begun.has_real_tokens:
            return messages
        return [(api_id, anonymize_block_hashes(message)) for api_id, message in messages]

    def _compare(self, what: str, recorded: object, replayed: object) -> ReplayDifference | None:
        self.outcome.num_answers += 1
        # Bytes, since that is what was sent; a NaN is not equal to itself, its bytes are.
        if _encoder.encode(recorded) == _encoder.encode(replayed):
            return None
        return self._report_difference(*first_difference(what, recorded, replayed))

    def _report_difference(self, where: str, recorded: object, replayed: object) -> ReplayDifference:
        outcome = self.outcome
        outcome.difference = ReplayDifference(
            outcome.num_records, outcome.seconds, self._step, where, _shorten(recorded), _shorten(replayed)
        )
        return outcome.difference


def replay(records: Iterable[memoryview | bytes]) -> ReplayResult:
    """Takes encoded records. A recording begins with what the core was made from."""
    encoded = iter(records)
    first = next(encoded, None)
    header = None if first is None else _decode(_with_new_names(first))
    if not isinstance(header, RecordingHeader):
        raise InvalidRequest("the recording has no beginning")
    if header.schema_version not in READABLE_SCHEMAS:
        raise InvalidRequest(f"the recording speaks schema {header.schema_version}, this version {SCHEMA_VERSION}")
    run = Replayer(header)
    if not any(run.replay_record(_decode(record)) for record in encoded):
        run.finish()
    return run.outcome


def _with_new_names(header: memoryview | bytes) -> bytes:
    """Returns the encoded header of a recording with the current names of config fields in place of those of schema 5.
    The config is the only part of a recording that contains field names. Bytes that cannot be decoded are returned
    unchanged."""
    try:
        fields = msgspec.msgpack.decode(header)
    except msgspec.DecodeError:
        return bytes(header)
    if isinstance(fields, list):
        for config in (one for one in fields if isinstance(one, dict)):
            for old in RENAMED_CONFIG_FIELDS.keys() & config.keys():
                config[RENAMED_CONFIG_FIELDS[old]] = config.pop(old)
    return msgspec.msgpack.encode(fields)


def _decode(record: memoryview | bytes) -> Record:
    try:
        return _decoder.decode(record)
    except msgspec.DecodeError as fault:
        raise InvalidRequest(f"a record cannot be read by this version of Onward: {fault}") from fault


def first_difference(where: str, a: object, b: object) -> tuple[str, object, object]:
    """Returns the innermost place at which two answers first differ, as a path that begins with `where`, and what
    each has there. The answers must differ."""
    if type(a) is type(b) and isinstance(a, msgspec.Struct):
        pairs = [(f"{where}.{name}", getattr(a, name), getattr(b, name)) for name in a.__struct_fields__]
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        pairs = [(f"{where}[{index}]", x, y) for index, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return where, a, b
    inner = next(((path, x, y) for path, x, y in pairs if _encoder.encode(x) != _encoder.encode(y)), None)
    return first_difference(*inner) if inner else (where, a, b)


def _shorten(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"
