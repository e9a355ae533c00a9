from onward.supervisor.restart_policy import COOL_DOWN_S, MAX_DEATHS, RestartPolicy


def test_the_first_death_is_answered_at_once_and_later_ones_more_slowly() -> None:
    policy = RestartPolicy()
    delays = [policy.record_death(now_s=float(i), progress=0) for i in range(MAX_DEATHS - 1)]
    assert delays[0] == 0
    assert delays == sorted(delays)
    assert len(set(delays)) > 2


def test_five_deaths_in_a_minute_without_a_step_between_them_bring_a_cool_down() -> None:
    policy = RestartPolicy()
    delays = [policy.record_death(now_s=float(i), progress=0) for i in range(MAX_DEATHS)]
    assert delays[-1] == COOL_DOWN_S


def test_deaths_with_progress_between_them_are_bad_luck() -> None:
    policy = RestartPolicy()
    assert [policy.record_death(now_s=float(i), progress=i + 1) for i in range(20)] == [0.0] * 20


def test_deaths_that_are_long_past_do_not_count() -> None:
    policy = RestartPolicy()
    assert {policy.record_death(now_s=i * 61.0, progress=0) for i in range(20)} == {0.0}
