"""The stage benchmark: that it measures the real thing on every wire, not how fast that is."""

import msgspec
import pytest

from benchmarks.engine import stage_cost, stage_wires
from onward.proto.engine import TokenDeltas
from onward.proto.step import StepResult


def deltas_over(wire: stage_wires.ResultWire, num_slots: int) -> list[bytes]:
    """What the benchmark times, kept: the encoded messages of some steps."""
    decoding, encoded = stage_cost.DecodingEngine(num_slots, 40), []
    for step in range(30):
        decoding.core.commit(wire.carry(decoding.next_result(step * 0.01)), step * 0.01)
        messages = decoding.core.take_api_messages()
        assert all(isinstance(message, TokenDeltas) and len(message.deltas) == num_slots for _, message in messages)
        encoded += [msgspec.msgpack.encode(message) for _, message in messages]
    return encoded


@pytest.mark.parametrize("num_slots", [1, 7])
def test_every_wire_of_the_benchmark_gives_the_same_bytes(num_slots: int) -> None:
    with stage_wires.all_wires(num_slots) as wires:
        expected = deltas_over(wires["inproc"], num_slots)
        assert len(expected) == 30
        for name, wire in wires.items():
            assert deltas_over(wire, num_slots) == expected, name


def test_an_empty_step_goes_to_another_process_and_back() -> None:
    for kind in ("zmq", "shm"):
        times = stage_cost.empty_round_trips_us(kind, 20)
        assert len(times) == 20
        assert all(time > 0 for time in times)


def test_a_measurement_has_a_figure_for_every_wire_and_size() -> None:
    figures = stage_cost.measure(1, {1: 20, 512: 2048}, 10)
    plain = {"inproc", "zmq codec", "shm codec", "zmq", "shm"}
    assert set(figures.us_per_token) == plain | {"zmq codec, 5 logprobs", "shm codec, 5 logprobs"}
    assert all(set(row) == {"1", "512"} for row in figures.us_per_token.values())
    assert set(figures.round_trip_us) == {"zmq", "shm"}
    assert len(stage_cost.tables_of(figures)) == 2


def test_a_wire_over_the_bar_is_named() -> None:
    figures = stage_cost.StageFigures({"zmq": {"512": 3.9}, "shm": {"512": 4.1}, "inproc": {"512": 9.0}}, {}, 1, {})
    [missed] = stage_cost.above_limit(figures)
    assert missed.startswith("shm: 4.10")


def test_decoding_goes_on_as_long_as_it_is_asked_for() -> None:
    decoding = stage_cost.DecodingEngine(3, 50, top_logprobs=2)
    for step in range(50):
        result = decoding.next_result(step * 0.01)
        assert isinstance(result, StepResult)
        assert len(result.events) == 3
        decoding.core.commit(result, step * 0.01)
        [(_, message)] = decoding.core.take_api_messages()
        assert isinstance(message, TokenDeltas)
        assert [delta.finish_reason for delta in message.deltas] == [None] * 3
        assert all(delta.logprobs and len(delta.logprobs[0].top) == 2 for delta in message.deltas)
