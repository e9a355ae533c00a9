"""What the simulator's clients accept as the end of an answer."""

import pytest

from onward.sim.completion_check import CompletionChecker
from onward.sim.scenario import SimRequest


def ended(*reasons: str | None) -> CompletionChecker:
    answer = CompletionChecker(SimRequest("q", 0.0, n=len(reasons), seed=7, abort_at_s=1.0), [1, 2, 3])
    for index, reason in enumerate(reasons):
        told = {"index": index, "text": "", "finish_reason": reason, "completion_token_ids": [], "num_text_tokens": 0}
        answer.take_event(None, {"id": "a", "created": 0, "model": "hash", "choices": [told]})
    return answer


@pytest.mark.parametrize(
    ("reasons", "is_finished", "was_given_up"),
    [
        (("abort", "pd_reschedule"), True, False),
        (("abort", "abort"), True, False),
        (("stop", "pd_reschedule"), False, True),
        (("abort", None), False, False),
        (("pd_reschedule", None), False, True),
    ],
)
def test_a_choice_that_was_given_up_before_the_others_were_aborted_has_ended(
    reasons: tuple[str | None, ...], is_finished: bool, was_given_up: bool
) -> None:
    answer = ended(*reasons)
    assert (answer.is_finished, answer.was_given_up) == (is_finished, was_given_up)
    if is_finished:
        answer.check_end()
        assert answer.outcome == "aborted"
