from hypothesis import given, settings
from hypothesis import strategies as st

from onward.proto.reasoning_params import ReasoningParams
from onward.text.reasoning.reasoning_tracker import START_WINDOW, ReasoningPhase, ReasoningTracker, thinking_state

BEGIN, END = (1, 2), (3, 3, 4)
rules = st.builds(
    ReasoningParams,
    begin_token_ids=st.sampled_from([(1,), BEGIN]),
    end_token_ids=st.sampled_from([(4,), END]),
    starts_in_reasoning=st.booleans(),
    budget=st.none() | st.integers(0, 12),
    forced_prefix_token_ids=st.sampled_from([(), (7,), (7, 3)]),
)
choices = st.lists(st.integers(0, 7), max_size=40)


def generate(rule: ReasoningParams, wishes: list[int]) -> list[int]:
    """An output whose tokens are the model's wishes but for those that are forced."""
    token_ids: list[int] = []
    thinking = ReasoningTracker(rule)
    for wish in wishes:
        forced = thinking.forced_token_id
        token_ids.append(wish if forced is None else forced)
        thinking.advance(token_ids[-1])
    return token_ids


def state_of(thinking: ReasoningTracker) -> tuple[ReasoningPhase, int, int | None]:
    return thinking.phase, thinking.num_tokens, thinking.forced_token_id


@settings(max_examples=300, deadline=None)
@given(rules, choices, st.integers(0, 40))
def test_cut_anywhere_and_replayed_the_same_tokens_are_forced(
    rule: ReasoningParams, wishes: list[int], cut: int
) -> None:
    token_ids = generate(rule, wishes)
    resumed = thinking_state(token_ids[:cut], rule)
    for token_id, wish in zip(token_ids[cut:], wishes[cut:], strict=True):
        forced = resumed.forced_token_id
        assert token_id == (wish if forced is None else forced)
        resumed.advance(token_id)
    assert state_of(resumed) == state_of(thinking_state(token_ids, rule))


@settings(max_examples=300, deadline=None)
@given(rules, choices)
def test_thinking_never_has_more_than_its_budget_and_the_lead(rule: ReasoningParams, wishes: list[int]) -> None:
    thinking = thinking_state(generate(rule, wishes), rule)
    if rule.budget is None:
        assert thinking.forced_token_id is None
        return
    most = rule.budget + len(rule.forced_prefix_token_ids)
    if thinking.phase is ReasoningPhase.BEHIND:
        assert thinking.num_tokens <= most
    assert thinking.num_tokens <= most + len(rule.end_token_ids) - 1


@settings(max_examples=300, deadline=None)
@given(rules, choices)
def test_a_stage_is_where_the_tags_say(rule: ReasoningParams, token_ids: list[int]) -> None:
    begin, end = rule.begin_token_ids, rule.end_token_ids
    inside_from = 0 if rule.starts_in_reasoning else _behind_first(token_ids, begin, 0)
    if inside_from is not None and not rule.starts_in_reasoning and inside_from >= START_WINDOW:
        return  # beside the window both are right
    thinking = thinking_state(token_ids, rule)
    answer_from = 0 if inside_from is None else _behind_first(token_ids, end, inside_from)
    assert thinking.answer_position == answer_from
    assert thinking.is_inside == (answer_from is None)


def _behind_first(token_ids: list[int], wanted: tuple[int, ...], begin: int) -> int | None:
    for end in range(begin + len(wanted), len(token_ids) + 1):
        if tuple(token_ids[end - len(wanted) : end]) == wanted:
            return end
    return None


def test_a_budget_forces_the_lead_and_then_the_end() -> None:
    rule = ReasoningParams((1,), (3, 4), budget=2, forced_prefix_token_ids=(7,))
    assert generate(rule, [1, 5, 6, 5, 5, 5, 6]) == [1, 5, 6, 7, 3, 4, 6]


def test_a_budget_of_nothing_closes_at_once() -> None:
    assert generate(ReasoningParams((1,), (4,), starts_in_reasoning=True, budget=0), [5, 6]) == [4, 6]
    assert generate(ReasoningParams((1,), (4,), budget=0), [5, 1, 6, 6]) == [5, 1, 4, 6]


def test_an_end_that_has_begun_at_the_budget_is_finished() -> None:
    rule = ReasoningParams((1,), (3, 3, 4), starts_in_reasoning=True, budget=2, forced_prefix_token_ids=(7,))
    assert generate(rule, [5, 3, 5, 5, 6]) == [5, 3, 3, 4, 6]


def test_thinking_that_ends_by_itself_is_left_alone() -> None:
    rule = ReasoningParams((1,), (4,), budget=3)
    assert generate(rule, [1, 5, 4, 5, 6, 7, 1, 5, 5, 5, 5]) == [1, 5, 4, 5, 6, 7, 1, 5, 5, 5, 5]


def test_a_tag_far_behind_the_beginning_opens_nothing() -> None:
    rule = ReasoningParams((1,), (4,), budget=0)
    assert generate(rule, [5] * START_WINDOW + [1, 6]) == [5] * START_WINDOW + [1, 6]
