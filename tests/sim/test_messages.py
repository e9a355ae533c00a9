"""Messages over many seeds: typed events in order, resumed behind any of them, cut and continued."""

import copy

import msgspec
import pytest

from onward.proto.cursor import ChoiceCursor, Cursor, format_cursor
from onward.sim.message_check import PATH, MessageChecker
from onward.sim.oracle import decode_text, expected_choice
from onward.sim.reply_check import InvariantError
from onward.sim.scenario import Scenario, Shape, SimRequest
from onward.sim.scenario_generator import FaultSelection, generate_scenario
from onward.sim.simulation import run_scenario

NUM_SEEDS: dict[Shape, int] = {"engine": 12, "pd": 4, "cluster": 4}


def only_messages(scenario: Scenario) -> Scenario:
    """Every request that no other test is about, as one for a message."""
    requests = [
        msgspec.structs.replace(request, path=PATH, prompt_token_ids=None, n=1, logprobs=None, structure="", pooling="")
        for request in scenario.requests
        if request.path in ("/v1/chat/completions", "/v1/completions", PATH) and request.prompt
    ]
    return msgspec.structs.replace(scenario, requests=requests)


@pytest.mark.parametrize("shape", NUM_SEEDS)
def test_whatever_fails_each_message_is_exact(shape: Shape) -> None:
    outcomes = [
        run_scenario(only_messages(generate_scenario(seed, shape, FaultSelection())))
        for seed in range(NUM_SEEDS[shape])
    ]
    assert [one.violation for one in outcomes if one.violation] == []
    assert sum(one.end_reasons.get("complete", 0) for one in outcomes) > len(outcomes)
    assert sum(one.triggered.get("disconnect", 0) for one in outcomes) > 0


def test_generated_scenarios_have_messages() -> None:
    paths = [request.path for seed in range(30) for request in generate_scenario(seed, "engine").requests]
    assert paths.count(PATH) > 3


WORD = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": ""}}
START = {"type": "message_start", "message": {"id": "msg_1"}}
OPEN = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}


@pytest.mark.parametrize(
    "events",
    [[WORD], [START, START], [START, WORD], [START, {"type": "ping"}, WORD], [START, {"type": "ping"}, OPEN, OPEN]],
)
def test_events_out_of_order_are_a_violation(events: list[dict[str, object]]) -> None:
    checker = MessageChecker(SimRequest("q", 0.0, path=PATH, prompt="a", max_tokens=2, seed=1), [1])
    with pytest.raises(InvariantError):
        for event in events:
            checker.take_event(None, event)


PING = {"type": "ping"}
END = [
    {"type": "content_block_stop", "index": 0},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
        "usage": {"input_tokens": 1, "cache_read_input_tokens": 0, "output_tokens": 3},
    },
]


def checker_behind_one_token() -> tuple[MessageChecker, list[int]]:
    """The checker of a message whose first token has come, and the tokens of the whole message."""
    request = SimRequest("q", 0.0, path=PATH, prompt="a", max_tokens=3, seed=1, is_streaming=True, ignore_eos=True)
    checker = MessageChecker(request, [1])
    token_ids = expected_choice(request, [1], 1, 0).token_ids
    for event in (START | {"message": {"id": "msg_1", "model": "hash"}}, PING, OPEN):
        checker.take_event(None, event)
    cursor = Cursor("0" * 32, 1, 1, [ChoiceCursor(1)], {0: token_ids[:1]})
    delta = {"type": "text_delta", "text": decode_text(token_ids[:1])}
    checker.take_event(format_cursor(cursor), WORD | {"delta": delta})
    return checker, token_ids


def test_an_error_may_list_tokens_that_have_no_text_yet_and_no_other_ones() -> None:
    checker, token_ids = checker_behind_one_token()
    checker.check_partial({"completion_token_ids": token_ids[:2], "num_text_tokens": 1})
    with pytest.raises(InvariantError, match="is cut behind"):
        checker.check_partial({"completion_token_ids": [], "num_text_tokens": 0})
    with pytest.raises(InvariantError, match="which is not the text"):
        checker.check_partial({"completion_token_ids": token_ids, "num_text_tokens": 3})


def test_an_end_that_was_cut_off_is_sent_again() -> None:
    checker, _ = checker_behind_one_token()
    for event in END:
        checker.take_event(None, event)
    with pytest.raises(InvariantError):
        copy.deepcopy(checker).take_event(None, END[0])
    checker.resume_at_cursor()
    for event in END:
        checker.take_event(None, event)
    assert checker.is_finished


def test_what_came_with_a_cursor_is_not_sent_again() -> None:
    checker, token_ids = checker_behind_one_token()
    for event in END:
        checker.take_event(None, event)
    cursor = Cursor("0" * 32, 1, 1, [ChoiceCursor(3, "length")], {0: token_ids[1:]})
    checker.take_event(format_cursor(cursor), {"type": "message_stop"})
    checker.resume_at_cursor()
    assert checker.is_finished
    assert checker.usage == {"prompt_tokens": 1, "completion_tokens": 3}
