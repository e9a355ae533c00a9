"""Comparing streams: a planted difference is found, and said where it is."""

import copy
import json
from typing import Any

import pytest

from benchmarks.gpu.stream_outputs import BrokenStream, RepeatedStream, StreamOutput, first_difference, line_result

NUM_TOKENS = 12


def event(position: int, token_ids: list[int], *, ended: bool = False) -> list[str]:
    """The lines of one event, with logprobs that are a function of each token and its position."""
    positions = range(position, position + len(token_ids))
    rows = [-0.1234567890123456 * token_id - at for at, token_id in zip(positions, token_ids, strict=True)]
    logprobs = {
        "tokens": [f"w{token_id}" for token_id in token_ids], "token_logprobs": rows,
        "top_logprobs": [{"w1": row} for row in rows], "text_offset": list(positions),
    }  # fmt: skip
    choice = {"logprobs": logprobs, "finish_reason": "length" if ended else None, "token_ids": token_ids}
    end = position + len(token_ids)
    return [f"id: 1;abc;0;0;1;{end};0:{token_ids[-1]}", "data: " + json.dumps({"choices": [choice]}), ""]


def read(lines: list[str], output: StreamOutput | None = None) -> StreamOutput:
    output = output or StreamOutput()
    for line in lines:
        output.take_line(line)
    return output


def stream(number: int = 0, *, per_event: int = 1) -> StreamOutput:
    token_ids = [number * 100 + at for at in range(NUM_TOKENS)]
    lines: list[str] = []
    for at in range(0, NUM_TOKENS, per_event):
        lines += event(at, token_ids[at : at + per_event], ended=at + per_event >= NUM_TOKENS)
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 32}}}
    return read([*lines, "data: " + json.dumps(usage), "", "data: [DONE]", ""])


def changed(output: StreamOutput, **fields: Any) -> StreamOutput:
    other = copy.deepcopy(output)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def test_a_stream_is_read_to_its_end() -> None:
    output = stream()
    assert output.is_whole
    assert output.token_ids == list(range(NUM_TOKENS))
    assert (output.finish_reason, output.num_cached) == ("length", 32)
    assert output.last_id.startswith("1;abc;0;0;1;12;")


def test_streams_that_are_cut_into_other_events_are_the_same() -> None:
    assert first_difference(stream(per_event=1), stream(per_event=5)) is None


def test_an_event_whose_data_has_not_come_does_not_count_as_read() -> None:
    first, second = event(0, [7]), event(1, [8])
    output = read([*first, second[0]])
    assert output.last_id == first[0].removeprefix("id: ")
    assert output.token_ids == [7]


def test_a_stream_that_is_resumed_is_read_into_the_same_output() -> None:
    whole = read(event(0, [1, 2, 3]) + event(3, [4, 5], ended=True))
    assert first_difference(whole, read(event(3, [4, 5], ended=True), read(event(0, [1, 2, 3])))) is None


@pytest.mark.parametrize("index", [0, 7, NUM_TOKENS - 1])
def test_another_token_is_found_where_it_is(index: int) -> None:
    base = stream()
    token_ids = [*base.token_ids[:index], 999, *base.token_ids[index + 1 :]]
    assert first_difference(base, changed(base, token_ids=token_ids)) == (index, f"ids {index} and 999")


@pytest.mark.parametrize("count", [0, 11, 13])
def test_another_length_is_a_difference_at_the_end_of_the_shorter_one(count: int) -> None:
    base = stream()
    other = changed(base, token_ids=[*base.token_ids, 12][:count], logprobs=[])
    other.logprobs = [*base.logprobs, ()][:count]
    assert first_difference(base, other) == (min(count, NUM_TOKENS), f"lengths {NUM_TOKENS} and {count}")


def test_logprobs_that_differ_in_their_last_digit_differ() -> None:
    base, lines = read(event(0, [3, 5])), event(0, [3, 5])
    printed = json.loads(lines[1].removeprefix("data: "), parse_float=str)["choices"][0]["logprobs"]["token_logprobs"][
        1
    ]
    other = read([lines[0], lines[1].replace(printed, printed + "1")])
    assert float(printed) == float(printed + "1"), "only the text differs"
    assert first_difference(base, other) == (1, "logprobs")


def test_missing_logprobs_are_a_difference() -> None:
    base = stream()
    assert first_difference(base, changed(base, logprobs=base.logprobs[:4])) == (4, "logprobs")


def test_the_first_of_several_differences_is_told() -> None:
    base = stream()
    other = changed(base, token_ids=[*base.token_ids[:9], 999, 10, 11])
    other.logprobs[4] = ("other",)
    assert first_difference(base, other) == (4, "logprobs")


def test_another_finish_reason_is_a_difference() -> None:
    base = stream()
    expected = (NUM_TOKENS, "finish reasons length and stop")
    assert first_difference(base, changed(base, finish_reason="stop")) == expected


def test_an_error_in_a_stream_is_raised() -> None:
    with pytest.raises(BrokenStream, match="worker lost"):
        read([*event(0, [1]), 'data: {"error": {"message": "worker lost"}}'])


def test_a_line_tells_which_streams_differ_and_where() -> None:
    base = [stream(number) for number in range(4)]
    repeats = [RepeatedStream(number, stream(number)) for number in range(4)]
    assert str(line_result("again", base, repeats)) == "again: 0 of 4 streams differ"
    assert line_result("again", base, repeats).passed
    repeats[2] = RepeatedStream(2, changed(base[2], token_ids=[200, 201, 999, *base[2].token_ids[3:]]), "resumed at 2")
    planted = line_result("again", base, repeats, "4 requests")
    assert not planted.passed
    expected = ["again: 1 of 4 streams differ (4 requests)", "    stream 2 resumed at 2: ids 202 and 999 at token 2"]
    assert str(planted).splitlines() == expected


def test_a_stream_that_differs_in_two_repeats_counts_once() -> None:
    base = [stream(0), stream(1)]
    other = changed(base[1], finish_reason="stop")
    result = line_result(
        "resumed",
        base,
        [RepeatedStream(0, stream(0)), RepeatedStream(1, other, "at 10"), RepeatedStream(1, other, "at 20")],
    )
    assert (result.num_differing, result.num_streams, len(result.differences)) == (1, 2, 2)


def test_a_line_that_did_not_do_what_it_is_for_fails() -> None:
    base = [stream()]
    result = line_result("preempted", base, [RepeatedStream(0, stream())], problem="no request was preempted")
    assert not result.passed
    assert "NOT SHOWN: no request was preempted" in str(result)
    assert not line_result("empty", base, []).passed
