"""The books on what each caller uses."""

from hypothesis import given, settings
from hypothesis import strategies as st

from onward.engine.caller_limiter import MAX_RETRY_S, CallerLimiter, TokenBucket
from onward.engine.live_requests import CallerInFlight, LiveRequests
from onward.engine.request import Request
from onward.proto.engine import CallerLimits, Submit
from onward.proto.sampling_params import SamplingParams


def request(
    request_id: str, num_prompt: int, caller: str = "ann", tokens_per_minute: int = 600, token_id: int = 1
) -> Request:
    limits = CallerLimits(tokens_per_minute=tokens_per_minute)
    prompt = [token_id] * num_prompt
    spec = Submit(1, request_id, 1, prompt, SamplingParams(seed=0), caller=caller, caller_limits=limits)
    return Request(spec, "api", list(prompt), 10, 0.0, 0.0, None)


NONE = CallerInFlight()


def beside(live: list[Request], one: Request) -> CallerInFlight:
    requests = LiveRequests()
    for other in live:
        requests.add(other)
    return requests.in_flight_of_caller(one)


def test_an_empty_bucket_says_when_there_is_something_in_it() -> None:
    callers = CallerLimiter()
    callers.charge_prompt(request("a-0", 630), NONE, 0.0)
    refusal = callers.check(request("b-0", 5), NONE, 1.0)
    assert refusal is not None
    assert "600 tokens per minute" in refusal.error.message
    retry_after_s = refusal.error.retry_after_s
    assert retry_after_s is not None and abs(retry_after_s - 2.1) < 1e-9, "20 are owed, and ten come back in a second"
    assert callers.check(request("b-0", 5), NONE, 3.0) is not None
    assert callers.check(request("b-0", 5), NONE, 3.2) is None


def test_a_pause_fills_the_bucket_up_to_a_minute_s_tokens_and_no_further() -> None:
    callers = CallerLimiter()
    callers.charge_prompt(request("a-0", 100), NONE, 0.0)
    callers.charge_prompt(request("b-0", 599), NONE, 1000.0)
    assert callers.check(request("c-0", 5), NONE, 1000.0) is None
    callers.charge_prompt(request("c-0", 1), NONE, 1000.0)
    assert callers.check(request("d-0", 5), NONE, 1000.0) is not None


def test_the_choices_of_a_request_are_let_in_or_refused_together_and_have_one_prompt() -> None:
    callers = CallerLimiter()
    first, second = request("a-0", 700), request("a-1", 700)
    callers.charge_prompt(first, NONE, 0.0)
    assert callers.check(request("b-0", 700), beside([first], request("b-0", 700)), 0.0) is not None
    assert callers.check(second, beside([first], second), 0.0) is None
    callers.charge_prompt(second, beside([first], second), 0.0)
    assert callers.check(request("b-0", 1), beside([first, second], request("b-0", 1)), 11.0) is None, (
        "100 were owed, not 800"
    )


def test_each_prompt_of_a_list_is_charged() -> None:
    callers = CallerLimiter()
    listed = [request(f"a-{index}", 300, token_id=index // 2) for index in range(4)]
    for index, one in enumerate(listed):
        in_flight = beside(listed[:index], one)
        assert callers.check(one, in_flight, 0.0) is None, "a request is let in as a whole"
        callers.charge_prompt(one, in_flight, 0.0)
    assert callers.check(request("b-0", 1), NONE, 0.0) is not None, "two choices of two prompts: 600 tokens are used up"
    assert callers.check(request("b-0", 1), NONE, 0.2) is None, "and no more"


def test_a_changed_limit_holds_from_the_next_request_on() -> None:
    callers = CallerLimiter()
    callers.charge_prompt(request("a-0", 600), NONE, 0.0)
    assert callers.check(request("b-0", 1, tokens_per_minute=60), NONE, 0.5) is None, "earned at the rate until now"
    callers.charge_prompt(request("b-0", 5, tokens_per_minute=60), NONE, 0.5)
    refusal = callers.check(request("c-0", 1, tokens_per_minute=60), NONE, 0.5)
    assert refusal is not None and refusal.error.retry_after_s == 1.0
    callers.charge("ann", CallerLimits(tokens_per_minute=60), 60, 0.5)
    refusal = callers.check(request("c-0", 1, tokens_per_minute=60), NONE, 0.5)
    assert refusal is not None and refusal.error.retry_after_s == 61.0


def test_callers_are_forgotten_once_they_have_paid_and_not_before() -> None:
    callers = CallerLimiter()
    for index in range(100):
        callers.charge_prompt(request("a-0", 10 * (index + 1), caller=f"caller-{index}"), NONE, 0.0)
    callers.drop_full_buckets(30.0)
    assert len(callers) == 70
    callers.drop_full_buckets(101.0)
    assert len(callers) == 0


def test_the_caller_that_was_quiet_for_longest_is_forgotten_when_there_are_too_many() -> None:
    callers = CallerLimiter(max_callers=3)
    for name in ("ann", "bob", "cyd", "ann", "dan"):
        callers.charge_prompt(request(f"{name}-0", 1000, caller=name), NONE, 0.0)
    assert len(callers) == 3
    assert callers.check(request("x-0", 1, caller="ann"), NONE, 0.0) is not None
    assert callers.check(request("x-0", 1, caller="bob"), NONE, 0.0) is None


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 100), st.sampled_from(["take", "forget"]), st.integers(1, 500)), max_size=60),
)
def test_over_any_time_no_more_is_let_in_than_the_bucket_holds_and_earns(limit: int, events: list) -> None:
    """And the last one to be let in, which may be any size. Forgetting the idle gives nothing away."""
    callers, now_s, taken = CallerLimiter(), 0.0, list[tuple[float, int]]()
    for number, (pause_s, kind, size) in enumerate(events):
        now_s += pause_s
        asked = request(f"r{number}-0", size, tokens_per_minute=limit)
        if kind == "forget":
            callers.drop_full_buckets(now_s)
        elif callers.check(asked, NONE, now_s) is None:
            callers.charge_prompt(asked, NONE, now_s)
            taken.append((now_s, size))
    for first, (begin_s, _) in enumerate(taken):
        for last in range(first, len(taken)):
            before_the_last = sum(size for _, size in taken[first:last])
            assert before_the_last <= limit + (taken[last][0] - begin_s) * limit / 60 + 1e-6


def test_a_limit_of_nothing_never_lets_anybody_in() -> None:
    bucket = TokenBucket(0, 0, 0.0)
    bucket.refill(0, 100.0)
    assert bucket.is_empty
    assert bucket.seconds_until_token == MAX_RETRY_S
