from onward.web.caller_pacer import BodyMemoryLimit, CallerPacer, PacingRate, RefusalPacer

PACE = PacingRate(per_s=10, burst=5, max_wait_s=2.0)
ALLOWED_S = PACE.burst / PACE.per_s


def test_a_caller_waits_when_it_has_used_what_it_may_at_once_and_others_do_not() -> None:
    rates = CallerPacer(PACE)
    rates.charge("a", 5, now_s=100.0)
    assert rates.wait_s("a", 100.0) == 0
    rates.charge("a", 1, now_s=100.0)
    assert round(rates.wait_s("a", 100.0), 3) == 0.1
    assert rates.wait_s("b", 100.0) == 0
    assert rates.wait_s("a", 100.2) == 0


def test_no_wait_is_longer_than_the_bound() -> None:
    rates = CallerPacer(PACE)
    for _ in range(1000):
        rates.charge("a", 1, now_s=100.0)
    assert rates.wait_s("a", 100.0) == PACE.max_wait_s
    assert rates.wait_s("a", 100.0 + PACE.max_wait_s) == 0


def test_a_pause_is_not_saved_up() -> None:
    rates = CallerPacer(PACE)
    rates.charge("a", 1, now_s=0.0)
    rates.charge("a", 6, now_s=1000.0)
    assert rates.wait_s("a", 1000.0) > 0


def refused_often(refusals: RefusalPacer, times: int = 6) -> None:
    for _ in range(times):
        refusals.finish_request("a", 100.0, has_waited=False, is_refused=True)


def test_requests_of_a_caller_that_is_refused_too_often_go_on_one_by_one() -> None:
    refusals = RefusalPacer(PACE)
    refused_often(refusals)
    assert [round(refusals.start_wait("a", 100.0), 3) for _ in range(3)] == [0.1, 0.2, 0.3]
    assert refusals.start_wait("b", 100.0) == 0


def test_requests_that_are_served_cost_nothing() -> None:
    refusals = RefusalPacer(PACE)
    for _ in range(1000):
        assert refusals.start_wait("a", 100.0) == 0
        refusals.finish_request("a", 100.0, has_waited=False, is_refused=False)
    refused_often(refusals)
    for _ in range(1000):
        assert round(refusals.start_wait("a", 100.0), 3) == 0.1
        refusals.end_wait("a")
        refusals.finish_request("a", 100.0, has_waited=True, is_refused=False)


def test_so_many_wait_and_no_more() -> None:
    refusals = RefusalPacer(PACE, max_waiting=2)
    refused_often(refusals)
    for _ in range(2):
        assert not refusals.is_full("a", 100.0)
        assert refusals.start_wait("a", 100.0)
    assert refusals.is_full("a", 100.0)
    assert not refusals.is_full("b", 100.0)
    refusals.end_wait("a")
    assert not refusals.is_full("a", 100.0)


def test_bodies_of_a_caller_have_a_bound_and_the_oldest_always_goes_on() -> None:
    held = BodyMemoryLimit(max_bytes=10)
    assert held.try_reserve("a", "first", 6)
    assert held.try_reserve("a", "second", 4)
    assert not held.try_reserve("a", "second", 1)
    assert held.try_reserve("a", "first", 100), "however large it is"
    assert not held.try_reserve("a", "third", 1)
    assert held.try_reserve("b", "other", 10)
    held.release("a", "first")
    assert held.try_reserve("a", "second", 1)
    assert held.try_reserve("a", "third", 5)
    assert not held.try_reserve("a", "third", 1)
    held.release("a", "second")
    held.release("a", "third")
    assert held.try_reserve("a", "fourth", 10)
