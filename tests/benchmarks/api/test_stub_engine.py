from benchmarks.api.stub_engine import StubEngine
from onward.proto.engine import Abort, HeldRequest, RequestAccepted, Submit
from onward.proto.sampling_params import SamplingParams


def submit(request_id: str, max_tokens: int, given: list[int] | None = None, seq: int = 1) -> Submit:
    return Submit(seq, request_id, 7, [1, 2, 3], SamplingParams(seed=0, max_tokens=max_tokens), given or [])


def test_all_requests_step_together_and_end_at_their_length() -> None:
    engine = StubEngine("e", [10, 20])
    assert engine.handle(submit("a", 3)) == [RequestAccepted("a", 7)]
    engine.handle(submit("b", 1, seq=2))
    first, second, third = engine.step(), engine.step(), engine.step()
    told = [(one.request_id, one.position, one.token_ids, one.finish_reason) for one in first.deltas]
    assert told == [("a", 0, [10], None), ("b", 0, [10], "length")]
    assert [one.token_ids for one in second.deltas] == [[20]]
    assert [(one.token_ids, one.finish_reason) for one in third.deltas] == [([10], "length")]
    assert engine.is_idle


def test_it_goes_on_behind_given_tokens_says_what_it_holds_and_lets_go_of_what_is_aborted() -> None:
    engine = StubEngine("e", [10, 20, 30])
    engine.handle(submit("a", 9, given=[5, 5], seq=4))
    assert engine.holding().held == [HeldRequest("a", 7, 2)] and engine.holding().seq == 4
    assert engine.step().deltas[0].token_ids == [30]
    engine.handle(Abort(5, "a", 7))
    assert engine.is_idle and engine.holding().held == []
