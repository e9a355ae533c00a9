"""Every number that another process can send is finite and within a range of its own, or its message is refused."""

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from onward.api.endpoints.attempts import decode_cluster_message
from onward.errors import ClientError
from onward.pd.transfer import transfer_messages as link
from onward.proto import SCHEMA_VERSION
from onward.proto.control import FromChild, ToChild
from onward.proto.engine import ErrorInfo, FromEngine, Submit, ToEngine, TokenDeltas
from onward.proto.handoff import LeaseGrant, PrefillRequest, ToDecode, ToPrefill
from onward.proto.kv_transfer import KvCommand, KvEndpoint, KvLayout, KvReport
from onward.proto.router import (
    Attempt,
    PromptUsage,
    QueryResponse,
    Registration,
    RegistrationReply,
    StreamProgress,
    StreamRecord,
)
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import StepPlan, StepResult, WorkerHello
from onward.proto.stream_store import FromStreamStore, ToStreamStore
from onward.router.endpoints.admin import decode_registration
from onward.router.upstream_errors import parse_error_info
from onward.router.upstream_events import MalformedEvent, parse_event
from onward.transport.message_decoding import decode_message
from onward.transport.shm_rows import RowExtras

WIRES: dict[str, Any] = {
    "to_engine": ToEngine,
    "from_engine": FromEngine,
    "plan": StepPlan,
    "result": StepResult,
    "side_record": RowExtras,
    "hello": WorkerHello,
    "to_prefill": ToPrefill,
    "to_decode": ToDecode,
    "kv_command": KvCommand,
    "kv_report": KvReport,
    "to_receiver": link.ToReceiver,
    "to_writer": link.ToWriter,
    "attempt": Attempt,
    "facts": PromptUsage,
    "progress": StreamProgress,
    "registration": Registration,
    "register_answer": RegistrationReply,
    "record": StreamRecord,
    "ask_response": QueryResponse,
    "to_shelf": ToStreamStore,
    "from_shelf": FromStreamStore,
    "to_child": ToChild,
    "from_child": FromChild,
}
LOGPROBS = {"TokenLogprobs.logprob", "TokenLogprobs.top[][1]"}
"""What the model said, whatever it was: it is only shown to the client, where what is no number is null."""
WORDS = {
    "SamplingParams.seed",
    "Attempt.seed",
    "PrefillDone.checksums[]",
    "WritesComplete.checksums[]",
    "PushComplete.checksums[]",
}
"""Any 64 bits are one, and msgpack has no longer integers."""
PLACES = {f"{name}.byte_ranges[][{index}]" for name in ("PayloadHeader", "PagesWritten") for index in (0, 1)}
"""The receiver checks each against its memory and ends the lease (`tests/pd/transfer/test_protocol_violations.py`)."""
METRICS = {"MetricSeries.value", "MetricSeries.sum", "MetricSeries.buckets[]", "MetricFamily.bounds[]"}
"""The supervisor leaves out the series and takes the rest of the snapshot (`tests/supervisor/test_child_numbers.py`)."""
UNBOUNDED = LOGPROBS | WORDS | PLACES | METRICS
NOT_FINITE = [math.nan, math.inf, -math.inf]
LAYOUT = KvLayout("f", "float32", 16, 2, 2, 8)
PREFILL = PrefillRequest(1, LAYOUT, "r", [1, 2, 3], 3, SamplingParams(seed=5))


def numbers_in(kind: inspect.Type, path: str, seen: set[type]) -> Iterator[tuple[str, inspect.Type]]:
    match kind:
        case inspect.IntType() | inspect.FloatType():
            yield path, kind
        case inspect.StructType() if kind.cls not in seen:
            seen.add(kind.cls)
            for field in kind.fields:
                yield from numbers_in(field.type, f"{kind.cls.__name__}.{field.name}", seen)
        case inspect.UnionType():
            for one in kind.types:
                yield from numbers_in(one, path, seen)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType():
            yield from numbers_in(kind.item_type, path + "[]", seen)
        case inspect.TupleType():
            for index, one in enumerate(kind.item_types):
                yield from numbers_in(one, f"{path}[{index}]", seen)
        case inspect.DictType():
            yield from numbers_in(kind.key_type, path + "{}", seen)
            yield from numbers_in(kind.value_type, path + "{}", seen)
        case inspect.Metadata():
            yield from numbers_in(kind.type, path, seen)
        case _:
            return


def is_bounded(kind: Any) -> bool:
    low = kind.ge if kind.ge is not None else kind.gt
    high = kind.le if kind.le is not None else kind.lt
    return low is not None and high is not None and math.isfinite(low) and math.isfinite(high)


@pytest.mark.parametrize("wire", WIRES)
def test_every_number_of_a_wire_has_a_lowest_and_a_highest_value(wire: str) -> None:
    found = dict(numbers_in(inspect.type_info(WIRES[wire]), wire, set()))
    unbounded = {path for path, kind in found.items() if not is_bounded(kind)}
    assert not unbounded - UNBOUNDED


def attempt(**fields: Any) -> bytes:
    usual = Attempt(
        schema_version=SCHEMA_VERSION, path="/v1/completions", body=b"{}", request_id="r", attempt_epoch=1, seed=5,
        created_s=5, waited_s=1.0,
    )  # fmt: skip
    return msgspec.msgpack.encode(msgspec.structs.replace(usual, **fields))


@pytest.mark.parametrize("value", [*NOT_FINITE, -1.0, 1e300])
def test_an_attempt_whose_arrival_is_no_time_is_refused(value: float) -> None:
    with pytest.raises(ClientError, match="waited_s"):
        decode_cluster_message(msgspec.msgpack.Decoder(Attempt), attempt(waited_s=value))


@pytest.mark.parametrize(
    "fields",
    [
        *({"deadline_in_s": value} for value in NOT_FINITE),
        {"attempt_epoch": -1},
        {"attempt_epoch": 1 << 63},
        {"created_s": -1},
        {"num_cached_tokens": -1},
        {"prompt_token_ids": [1, -1]},
        {"prompt_token_ids": [1 << 31]},
    ],
)
def test_an_attempt_with_a_number_out_of_range_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ClientError):
        decode_cluster_message(msgspec.msgpack.Decoder(Attempt), attempt(**fields))


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize(
    "message",
    [
        lambda value: msgspec.structs.replace(PREFILL, waited_s=value),
        lambda value: msgspec.structs.replace(PREFILL, deadline_in_s=value),
        lambda value: msgspec.structs.replace(PREFILL, sampling_params=SamplingParams(5, temperature=value)),
        lambda value: msgspec.structs.replace(PREFILL, sampling_params=SamplingParams(5, logit_bias=((1, value),))),
        lambda value: LeaseGrant(1, "p", "l", KvEndpoint("tcp", "tcp:h:5", "d"), 0, [1], value, True),
    ],
    ids=["waited", "deadline", "temperature", "bias", "lease"],
)
def test_a_peer_s_message_with_what_is_no_number_is_refused(message: Any, value: float) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_message(msgspec.msgpack.Decoder(ToPrefill), msgspec.msgpack.encode(message(value)))


@pytest.mark.parametrize("value", NOT_FINITE)
def test_an_engine_takes_no_submit_whose_place_in_the_queue_is_undefined(value: float) -> None:
    submit = Submit(1, "r", 1, [1], SamplingParams(5), waited_s=value)
    with pytest.raises(msgspec.DecodeError):
        decode_message(msgspec.msgpack.Decoder(ToEngine), msgspec.msgpack.encode(submit))


@pytest.mark.parametrize("status", [0, 99, 200, 600, 1 << 40])
def test_an_error_s_status_is_one_of_http_s_for_errors(status: int) -> None:
    error = msgspec.msgpack.encode(ErrorInfo("c", "m", status))
    with pytest.raises(msgspec.DecodeError):
        decode_message(msgspec.msgpack.Decoder(ErrorInfo), error)
    told = parse_error_info(b'{"error":{"message":"m","code":"c","status":%d}}' % status, None)
    assert 400 <= told.status <= 599


@pytest.mark.parametrize("number", [b"-1", b"129", b"1000000000", b"1e3", b"99999999999999999999"])
def test_a_router_makes_room_for_no_more_choices_than_there_can_be(number: bytes) -> None:
    facts = b'event: facts\ndata: {"num_prompt_tokens":3,"num_cached_tokens":1,"num_choices":%b}' % number
    with pytest.raises(MalformedEvent):
        parse_event(facts)


@pytest.mark.parametrize("words", [b"e -1 2 3", b"e 1 99999999999999999999 3", b"e 1 2 nan", b"e 1 2 " + b"9" * 5000])
def test_progress_with_a_number_out_of_range_is_no_progress(words: bytes) -> None:
    assert parse_event(b": progress " + words) is None


def test_a_registration_with_a_load_below_nothing_is_refused() -> None:
    usual = Registration(
        schema_version=SCHEMA_VERSION, instance="i", url="http://h:1", role="mixed", state="ready", model="m",
        fingerprint="f", kv_layout=LAYOUT,
    )  # fmt: skip
    assert decode_registration(msgspec.msgpack.encode(usual)) == usual
    for fields in ({"max_tokens": -1}, {"block_size": -16}, {"step": -1}):
        with pytest.raises(ClientError):
            decode_registration(msgspec.msgpack.encode(msgspec.structs.replace(usual, **fields)))


@pytest.mark.parametrize("value", [*NOT_FINITE, -1.0, 1e9])
def test_a_router_cannot_tell_an_instance_to_register_at_no_time_or_without_pause(value: float) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_message(
            msgspec.msgpack.Decoder(RegistrationReply), msgspec.msgpack.encode(RegistrationReply("r", value))
        )


def test_logprobs_that_are_no_numbers_pass_between_our_processes() -> None:
    """A model may say so, and that is no reason to lose the step of the other requests."""
    result = StepResult(1, [])
    assert decode_message(msgspec.msgpack.Decoder(StepResult), msgspec.msgpack.encode(result)) == result
    assert decode_message(
        msgspec.msgpack.Decoder(FromEngine), msgspec.msgpack.encode(TokenDeltas(1, []))
    ) == TokenDeltas(1, [])
