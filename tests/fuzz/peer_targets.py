"""What another process can send. Instances and routers: events, handoff messages, link messages, attempts, registrations.
Supervisor and children: control messages, snapshots of metrics."""

import math
import socket
from typing import Any

import msgspec

from onward.api.endpoints.attempts import decode_cluster_message
from onward.engine.admission import EngineLimits, create_request
from onward.engine.scheduling.request_queue import RequestQueue
from onward.errors import ClientError
from onward.obs.metrics import merge, usable
from onward.pd.decode_handoff_protocol import DecodeHandoffProtocol
from onward.pd.handoff_events import OfferReceived, PrefillRequested
from onward.pd.handoff_timeouts import HandoffTimeouts
from onward.pd.prefill_handoff_protocol import PrefillHandoffProtocol
from onward.pd.transfer import transfer_messages as link
from onward.pd.transfer.authenticated_link import ReceiverLink
from onward.pd.transfer.backend import RemoteMemoryInfo
from onward.pd.transfer.framed_channel import FramedChannel, LinkClosed
from onward.pd.transfer.handshake import ClusterSecret
from onward.pd.transfer.kv_receiver import KvReceiver, ProtocolViolation
from onward.pd.transfer.page_geometry import PageGeometry
from onward.proto import SCHEMA_VERSION, control
from onward.proto import handoff as pd
from onward.proto.api_key_entry import ApiKeyEntry
from onward.proto.cursor import ChoiceCursor
from onward.proto.engine import Abort, AbortByName, ErrorInfo, QueryKvEvents, Submit, ToEngine
from onward.proto.handoff import ToDecode, ToPrefill
from onward.proto.kv_events import KvEvents
from onward.proto.kv_transfer import (
    ExpectWrites,
    KvEndpoint,
    KvLayout,
    KvReport,
    LeaseQuiesced,
    PushComplete,
    RevokeLease,
    WritesComplete,
)
from onward.proto.router import Attempt, ChoiceSnapshot, FindStream, InstanceLoad, Registration
from onward.proto.sampling_params import SamplingParams
from onward.proto.stats import EngineStats, MetricFamily, MetricSeries
from onward.proto.step import WorkerHello
from onward.proto.trace import PhaseChange
from onward.proto.worker_wire_address import ShmWireAddress
from onward.router.endpoints.admin import decode_registration
from onward.router.instance_registry import InstanceRegistry
from onward.router.upstream_events import EventSplitter, MalformedEvent, parse_event
from onward.transport.message_decoding import decode_message
from tests.fuzz.case import Target
from tests.fuzz.mutation import byte_cases, cases

LAYOUT = KvLayout("f", "float32", 16, 2, 2, 8)
ENDPOINT = KvEndpoint("tcp", "tcp:127.0.0.1:5", "d")
ERROR = ErrorInfo(code="aborted", message="m", status=409, retryable=False)
TIMES = HandoffTimeouts(lease_s=5.0, offer_hold_s=1.0, handoff_timeout_s=30.0)
WORKER = WorkerHello(1, "w", "e", 1, "f", num_blocks=16, block_size=16, max_model_len=64, vocab_size=320)
LIMITS = EngineLimits(WORKER, num_drafts=0)
PREFILL = pd.PrefillRequest(1, LAYOUT, "r", [1, 2, 3], 3, SamplingParams(seed=5))


PHASES = pd.PrefillPhases(1, "p", [PhaseChange("queue", 2.0), PhaseChange("ended", 0.0)])


def _tree(message: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


def _msgpack(tree: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(tree)
    except OverflowError:  # a number that msgpack has no form for
        return b"\xcf" + b"\xff" * 7


EVENTS = [
    b": progress e 1 2 3\n\n",
    b'event: facts\ndata: {"num_prompt_tokens":3,"num_cached_tokens":1,"num_choices":2}\n\n',
    b'id: 1;a;0;-1;0;1;0:5\ndata: {"x":1}\n\nid: 1;a;0;-1;0;2;0:6\n\n',
    b'event: error\ndata: {"error":{"message":"m","code":"overloaded","retryable":true,"status":429}}\n\n',
    b"event: answer\ndata: {}\n\ndata: [DONE]\n\n",
]


def _events(data: bytes) -> None:
    splitter = EventSplitter(max_event_bytes=1 << 12)
    for at in range(0, len(data), 7):
        for event in splitter.feed(data[at : at + 7]):
            parse_event(event)


TO_PREFILL: list[Any] = [
    _tree([PREFILL, pd.LeaseGrant(1, "p", "l", ENDPOINT, 0, [1], 5.0, True), pd.PrefillTaken(1)]),
    _tree([PREFILL, pd.HandoffHeartbeat(1, [1], "p"), pd.CancelHandoff(1, ERROR, "p"), pd.Ping()]),
    _tree([PREFILL, pd.RefuseHandoff(1, ERROR, "p"), pd.PeerGone("d"), PREFILL]),
]


def _messages(data: bytes, union: Any) -> list[Any]:
    """A list of messages, each decoded as it would be alone."""
    try:
        parts = msgspec.msgpack.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    decoder = msgspec.msgpack.Decoder(union)
    messages = [decode_message(decoder, bytes(part)) for part in parts[:20]]
    for message in messages:
        _check_finite(msgspec.to_builtins(message))
    return messages


def _check_finite(tree: Any, name: str = "") -> None:
    """Whatever was taken, but for logprobs: those are the model's, and only shown."""
    if isinstance(tree, dict):
        for key, one in tree.items():
            _check_finite(one, str(key))
    elif isinstance(tree, list | tuple):
        for one in tree:
            _check_finite(one, name)
    else:
        assert not isinstance(tree, float) or math.isfinite(tree), f"{name}: {tree}"


def _to_engine(data: bytes) -> None:
    """Whatever arrives, the queue has one order, in which every request is found again."""
    queue = RequestQueue()
    submits = [one for one in _messages(data, ToEngine) if isinstance(one, Submit)]
    named = [
        msgspec.structs.replace(one, request_id=f"{number}-{one.request_id}") for number, one in enumerate(submits)
    ]
    requests = [create_request(one, "api", LIMITS, now_s=5.0) for one in named]
    for request in requests:
        queue.add(request)
    for request in reversed(requests):
        queue.remove(request)


def _to_prefill(data: bytes) -> None:
    side = PrefillHandoffProtocol("p", TIMES)
    for turn, message in enumerate(_messages(data, ToPrefill)):
        side.receive("d", message, now_s=turn * 0.5)
        for event in side.take_events():
            if key := getattr(event, "key", None):
                side.offer(key, 1, now_s=turn * 0.5) if isinstance(event, PrefillRequested) else None
        side.tick(turn * 0.5 + 0.1)
        _sendable(side.take_messages())
    side.tick(1e6)
    assert sum(side.count_by_state().values()) == 0, "a lease ends whatever was said"


SUBMIT = Submit(1, "r", 1, [1, 2], SamplingParams(seed=5), [3], 5.0, 60.0, 1, "s", max_draft_tokens=1)
TO_ENGINE: list[Any] = [
    _tree([SUBMIT, msgspec.structs.replace(SUBMIT, request_id="q", waited_s=4.0), Abort(2, "r", 1, "stop", 1)]),
    _tree([SUBMIT, SUBMIT, SUBMIT, AbortByName(2, 1, ["r"], received_ago_s=5.0), QueryKvEvents(3, 1, -1)]),
]
TO_DECODE: list[Any] = [
    _tree([pd.PrefillOffer(1, "p", 1), pd.PrefillDone(1, "p", [5], 0, None, None, [], [9]), pd.Pong("p")]),
    _tree([pd.PrefillOffer(1, "p", 1), pd.HandoffHeartbeat(3, [1], "p"), pd.CancelHandoff(1, ERROR, "p")]),
    _tree([pd.Pong("p"), pd.RefuseHandoff(1, ERROR, "p"), PHASES, pd.PeerGone("p"), pd.PrefillOffer(2, "q", 4)]),
]


def _to_decode(data: bytes) -> None:
    side = DecodeHandoffProtocol("d", TIMES)
    for _ in range(2):
        side.request_prefill("p-address", msgspec.structs.replace(PREFILL, handoff_id=side.next_handoff_id()), 0.0)
    for turn, message in enumerate(_messages(data, ToDecode)):
        now_s = turn * 0.5
        side.receive("p-address", message, now_s)
        for event in side.take_events():
            if isinstance(event, OfferReceived):
                number = event.handoff_id
                side.grant(pd.LeaseGrant(number, "", f"l{number}-{turn}", ENDPOINT, 0, [1], TIMES.lease_s, True), now_s)
                side.on_kv_received(number, [9], now_s)
        side.tick(now_s + 0.1)
        _sendable(side.take_messages())
    side.tick(1e6)
    assert sum(side.count_by_state().values()) == 0, "every handoff ends"


def _sendable(outbox: list[tuple[str, Any]]) -> None:
    for _, message in outbox:
        msgspec.msgpack.encode(message)


LINK: list[Any] = [
    _tree(
        [
            link.SenderHello(SCHEMA_VERSION, b"n" * 16, "d", LAYOUT),
            link.SenderProof(b"p" * 32),
            link.OpenPush("l", [1, 2]),
            link.PagesWritten("l", [(0, 8)]),
            link.AllPagesWritten("l"),
            link.WritingStopped("l"),
        ]
    )
]


def _link_case(tree: Any) -> bytes:
    parts = [_msgpack(one) for one in (tree if isinstance(tree, list) else [tree])]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def _link(data: bytes) -> None:
    """Bytes of a peer that has not shown the key, and that must not be authenticated."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        theirs.send(data[:50_000])
        visitor = ReceiverLink(ours, ClusterSecret("ab" * 32), "d", LAYOUT, lambda: RemoteMemoryInfo(b"", ()))
        assert not list(visitor.messages(8))
        assert not visitor.is_open


GEOMETRY = PageGeometry(num_layers=2, num_blocks=4, page_bytes=8)
JOINED = [
    link.OpenPush("l", [1, 2]),
    link.PayloadHeader("l", [(8, 16), (40, 16)]),
    b"\1" * 32,
    link.AllPagesWritten("l"),
    link.WritingStopped("l"),
]
SINK: list[Any] = [
    [_tree(one) if isinstance(one, msgspec.Struct) else one for one in JOINED],
    [
        *_tree(JOINED[:1]),
        *_tree([link.PayloadHeader("l", [(8, 8)])]),
        b"\1" * 8,
        *_tree([link.WritingStopped("l"), JOINED[0]]),
    ],
    [
        *_tree(JOINED[:1]),
        *_tree([link.PayloadHeader("m", [(0, 8)])]),
        b"\1" * 8,
        *_tree([link.PagesWritten("l", [(8, 8)])]),
    ],
]


class _NoBackend:
    """Bytes come on the link, so no other connection is accepted."""

    def register_sender(self, writer: int) -> RemoteMemoryInfo:
        return RemoteMemoryInfo(b"", ())

    def unregister_sender(self, writer: int) -> None:
        return

    def close(self) -> None:
        return


def _sink_case(tree: Any) -> bytes:
    """Bytes stand between the messages without a frame, as on the link."""
    parts = [
        one if isinstance(one, bytes) else _link_case([one]) for one in (tree if isinstance(tree, list) else [tree])
    ]
    return b"".join(parts)


def _sink(data: bytes) -> None:
    """Bytes of an authenticated peer, which may only write to the blocks of its lease."""
    memory = bytearray(GEOMETRY.num_bytes)
    reports: list[KvReport] = []
    sink = KvReceiver(memoryview(memory), GEOMETRY, _NoBackend(), is_in_band=True, report=reports.append)
    sink.execute(ExpectWrites("l", [1, 2], True))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(data[:50_000])
        channel = FramedChannel(ours, link.ToReceiver)
        sink.add_sender(1, channel)
        try:
            while (message := channel.receive()) is not None:
                sink.receive(1, message, 0.0)
        finally:
            sink.remove_sender(1, "the case is over")
            sink.execute(RevokeLease("l"))
            pages = [memory[at : at + 8] for at in range(0, len(memory), 8)]
            assert not any(any(page) for i, page in enumerate(pages) if i % 4 not in (1, 2)), "only the lease's blocks"
            assert isinstance(reports[-1], LeaseQuiesced)


REPORTS = [_tree(WritesComplete("l", [1], 5, 0.5)), _tree(PushComplete("l", [1], 5, 0.5)), ["push_failed", "l", "m"]]
ATTEMPT = Attempt(
    schema_version=SCHEMA_VERSION,
    path="/v1/completions",
    body=b"{}",
    request_id="r",
    attempt_epoch=1,
    seed=5,
    created_s=5,
    waited_s=1.0,
    client_request_id="l",
    deadline_in_s=5.0,
    choices=[ChoiceSnapshot([1, 2], "stop")],
    num_cached_tokens=1,
    prompt_token_ids=[1, 2],
    prefill_peers=["tcp://a"],
    is_final=True,
    reader_positions=[ChoiceCursor(1)],
    usage_sent=True,
)
REGISTRATION = Registration(
    schema_version=SCHEMA_VERSION,
    instance="i",
    url="http://h:1",
    role="mixed",
    state="ready",
    model="m",
    fingerprint="f",
    kv_layout=LAYOUT,
    handoff_address="tcp://h:2",
    max_tokens=100,
    block_size=16,
    engine="e",
    step=5,
    load=InstanceLoad(1, 1, 1, 1, 1),
    kv_events=KvEvents(0, [(True, b"a" * 16), (False, b"b" * 16)]),
    pids_by_role={"api": [1]},
    tokenizer_hash="t",
)


def _attempt(data: bytes) -> None:
    _check_finite(msgspec.to_builtins(decode_cluster_message(msgspec.msgpack.Decoder(Attempt), data)))
    decode_cluster_message(msgspec.msgpack.Decoder(FindStream), data)


def _registration(data: bytes) -> None:
    registration = decode_registration(data)
    _check_finite(msgspec.to_builtins(registration))
    replicas = InstanceRegistry("r", wants_kv_events=True)
    for instance in ("", "j"):
        other = msgspec.structs.replace(REGISTRATION, instance="j", url="http://h:2")
        replicas.register(registration if not instance else other, 1.0)
        msgspec.msgpack.encode(replicas.register(registration, 2.0))
        replicas.list_instances(3.0), replicas.tick(1e6)


STATS = EngineStats(7, True, 0.5, {"running": 1}, {"free": 5}, 3)
FAMILIES = [
    MetricFamily("a_total", "counter", "h", [MetricSeries({"k": "v"}, 5.0), MetricSeries({"k": "w"}, 1.0)]),
    MetricFamily("b", "histogram", "h", [MetricSeries({}, buckets=[1, 0, 2], sum=3.5)], [0.5, 1.0]),
]
FROM_CHILD = [
    _tree(one)
    for one in (
        control.MetricsSnapshot(1, FAMILIES, STATS),
        control.MetricsSnapshot(2, FAMILIES),
        control.StartupProgress("loading", 0.5),
        control.ChildReady(),
        control.IsolatedRequestRunning("r"),
        control.QueryInstance(3),
        control.ReplaceWorker("w", "cause"),
    )
]
WIRE = ShmWireAddress("w", 8, 4, 1024, 1024, 5, 6)
TO_CHILD = [
    _tree(one)
    for one in (
        control.InstanceView(
            1, "i", [control.ProcessView("api", 5, "i", "ready")], {"api": 1}, FAMILIES, STATS, {"a": 0}
        ),
        control.UpdateApiKeys([ApiKeyEntry(name="a", digest="0a", max_in_flight=1, tokens_per_minute=1, priority=1)]),
        control.StopChild(5.0),
        control.QueryMetrics(1),
        control.EngineGone("e", "cause", "r"),
        control.WorkerStarting("w", WIRE, "tcp:h:5"),
    )
]


def _control(data: bytes, union: Any) -> None:
    """Metrics are looked at one by one, so that what is no number costs nothing else that the child has said."""
    message = decode_message(msgspec.msgpack.Decoder(union), data)
    families, _ = usable(getattr(message, "families", []))
    _check_finite(msgspec.to_builtins(families))
    _check_finite({key: one for key, one in msgspec.to_builtins(message).items() if key != "families"})
    for family in families:
        msgspec.msgpack.encode(merge([[family], [family]]))


TARGETS = [
    Target(
        "from_child",
        cases(FROM_CHILD, _msgpack),
        lambda data: _control(data, control.FromChild),
        (msgspec.DecodeError,),
    ),
    Target("to_child", cases(TO_CHILD, _msgpack), lambda data: _control(data, control.ToChild), (msgspec.DecodeError,)),
    Target("events", byte_cases(EVENTS), _events, (MalformedEvent,)),
    Target("to_engine", cases(TO_ENGINE, _msgpack), _to_engine, (msgspec.DecodeError, ClientError)),
    Target("to_prefill", cases(TO_PREFILL, _msgpack), _to_prefill, (msgspec.DecodeError,)),
    Target("to_decode", cases(TO_DECODE, _msgpack), _to_decode, (msgspec.DecodeError,)),
    Target("kv_link", cases(LINK, _link_case), _link, (LinkClosed,)),
    Target("kv_sink", cases(SINK, _sink_case), _sink, (LinkClosed, ProtocolViolation)),
    Target(
        "kv_report",
        cases(REPORTS, _msgpack),
        lambda data: decode_message(msgspec.msgpack.Decoder(KvReport), data),
        (msgspec.DecodeError,),
    ),
    Target("attempt", cases([_tree(ATTEMPT)], _msgpack), _attempt, (ClientError,)),
    Target("registration", cases([_tree(REGISTRATION)], _msgpack), _registration, (ClientError,)),
]
