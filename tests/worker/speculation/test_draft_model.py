"""A model that drafts says what it would say if it were served, wherever its KV comes from."""

import functools

import numpy as np
import pytest

from onward.kernels.quantize import quantize_model
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import RunSlot, SlotTokens
from onward.worker.speculation.draft_model_proposer import MIN_CATCH_UP_TOKENS, DraftModelProposer
from tests.models.checkpoints import random_tensors
from tests.worker import small_int8
from tests.worker.driver import GREEDY, prepared
from tests.worker.speculation.proposer_context import BLOCK_SIZE, Tables, wish

VOCABULARY = small_int8.CONFIG.vocab_size
PROMPT = [5, 9, 11, 2, 60, 33, 8]
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(seed=71, choice_index=1, temperature=4.0, top_p=0.9, top_k=40),
    "penalized": SamplingParams(
        seed=3, temperature=2.0, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3
    ),
    "ruled": SamplingParams(seed=8, temperature=3.0, logit_bias=((4, 9.0), (7, 9.0)), bad_words=((9,), (4, 7), (7, 4))),
}


@functools.cache
def _weights() -> dict[str, np.ndarray]:
    """Returns weights of a model whose every token depends on those long before it, so that wrong KV is noticed."""
    tensors = random_tensors(small_int8.CONFIG)
    return dict(quantize_model(small_int8.CONFIG, {n: 0.3 * a if a.ndim == 2 else a for n, a in tensors.items()}))


def _says(prompt: list[int], count: int, sampling: SamplingParams = GREEDY, num_prompt: int | None = None) -> list[int]:
    """What the same model says when it is served."""
    driver = small_int8.driver(changes=_weights(), max_num_batched_tokens=128)
    request = driver.assign(0, prompt, room=count, sampling=sampling, num_prompt=num_prompt)
    events = driver.step(assign=[request], run=[RunSlot(0, request.slot_epoch, len(prompt))])
    for _ in range(count - 1):
        events += driver.step(run=[RunSlot(0, request.slot_epoch, 1)])
    return [token for event in events if isinstance(event, SlotTokens) for token in event.token_ids]


def _long(count: int) -> list[int]:
    return np.random.default_rng(count).integers(0, VOCABULARY, count).tolist()


def _open(**changes: int) -> tuple[Tables, DraftModelProposer]:
    model = prepared(small_int8.CONFIG, quantization="int8")
    tables = Tables(model, **changes)
    return tables, DraftModelProposer(model, _weights(), tables.around)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_drafts_are_what_the_model_would_say_with_the_same_noise(sampling: SamplingParams) -> None:
    tables, drafter = _open()
    tables.assign(2, PROMPT)
    drafter.on_assign(2, len(PROMPT), 0)
    assert drafter.propose([wish(2, len(PROMPT), 5, sampling)]) == [_says(PROMPT, 5, sampling)]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("num_accepted", [0, 2, 4])
def test_drafting_goes_on_from_what_was_accepted_and_what_came_instead(
    num_accepted: int, sampling: SamplingParams
) -> None:
    tables, drafter = _open()
    tables.assign(0, PROMPT)
    drafter.on_assign(0, len(PROMPT), 0)
    tokens = list(PROMPT)
    for turn in range(4):
        drafts = drafter.propose([wish(0, len(tokens), 4, sampling, len(PROMPT))])[0]
        assert drafts == _says(tokens, 4, sampling, len(PROMPT))
        other = (drafts[num_accepted] + 1 if num_accepted < 4 else 50 + turn) % VOCABULARY
        new = [*drafts[:num_accepted], other]
        tables.grow(0, len(tokens), new)
        tokens += new


def test_several_slots_are_drafted_for_at_once_each_as_far_as_it_wishes() -> None:
    tables, drafter = _open()
    lists = {slot: _long(5 + 9 * slot) for slot in range(4)}
    for slot, tokens in lists.items():
        tables.assign(slot, tokens)
        drafter.on_assign(slot, len(tokens), 0)
    wishes = [wish(slot, len(lists[slot]), 1 + slot) for slot in (3, 0, 2, 1)]
    assert drafter.propose(wishes) == [_says(lists[one.slot], one.num_drafts) for one in wishes]


def test_nothing_is_drafted_behind_an_end() -> None:
    says = _says(PROMPT, 4)
    tables, drafter = _open()
    tables.assign(0, PROMPT)
    drafter.on_assign(0, len(PROMPT), 0)
    ends = SamplingParams(seed=0, temperature=0.0, end_token_ids=(says[1],))
    first = says.index(says[1])
    assert drafter.propose([wish(0, len(PROMPT), 4, ends)]) == [says[: first + 1]]


def test_an_end_is_not_drafted_before_min_tokens() -> None:
    end = _says(PROMPT, 1)[0]
    tables, drafter = _open()
    tables.assign(0, PROMPT)
    drafter.on_assign(0, len(PROMPT), 0)
    later = SamplingParams(seed=0, temperature=0.0, end_token_ids=(end,), min_tokens=3)
    assert end not in drafter.propose([wish(0, len(PROMPT), 3, later)])[0]


def test_nothing_is_drafted_beyond_the_longest_context() -> None:
    tokens = _long(126)
    tables, drafter = _open()
    tables.assign(0, tokens, room=2)
    drafter.on_assign(0, len(tokens), 0)
    wishes = [wish(0, len(tokens), 4)]
    while not (drafts := drafter.propose(wishes)[0]):
        pass
    assert len(drafts) == 2


def test_a_long_prompt_is_caught_up_with_in_pieces_and_others_draft_meanwhile() -> None:
    tables, drafter = _open(max_num_batched_tokens=32)
    long = _long(100)
    for slot, tokens in ((0, long), (1, PROMPT)):
        tables.assign(slot, tokens)
        drafter.on_assign(slot, len(tokens), 0)
    wishes = [wish(0, len(long), 3), wish(1, len(PROMPT), 3)]
    rounds = [drafter.propose(wishes) for _ in range(4)]
    assert [one[0] for one in rounds] == [[], [], [], _says(long, 3)]  # 32 + 32 + 32 + 4
    assert all(one[1] == _says(PROMPT, 3) for one in rounds)


def test_everybody_catches_up_however_many_there_are() -> None:
    """The first takes all that is shared out, and the others still get ahead."""
    tables, drafter = _open(max_num_batched_tokens=4)
    lists = [_long(40 + slot) for slot in range(4)]
    for slot, tokens in enumerate(lists):
        tables.assign(slot, tokens)
        drafter.on_assign(slot, len(tokens), 0)
    wishes = [wish(slot, len(tokens), 1) for slot, tokens in enumerate(lists)]
    for _ in range(-(-43 // MIN_CATCH_UP_TOKENS) - 1):
        assert drafter.propose(wishes) == [[]] * 4
    assert drafter.propose(wishes) == [_says(tokens, 1) for tokens in lists]


def test_cached_blocks_that_it_has_filled_itself_are_not_computed_again() -> None:
    tables, drafter = _open(max_num_batched_tokens=32)
    tokens = _long(96)
    blocks = tables.assign(0, tokens)
    drafter.on_assign(0, len(tokens), 0)
    while not drafter.propose([wish(0, len(tokens), 2)])[0]:
        pass
    heir = [*tokens[:80], 1, 2, 3]
    tables.assign(3, heir, blocks=blocks[: 80 // BLOCK_SIZE])
    drafter.on_assign(3, len(heir), 80)
    assert drafter.propose([wish(3, len(heir), 2)]) == [_says(heir, 2)]


def test_a_prefix_that_is_only_half_caught_up_with_is_shared_as_far_as_it_is() -> None:
    """The served model has all of it, and the first slot's drafts have come as far as its third block."""
    tables, drafter = _open(max_num_batched_tokens=32)
    tokens = _long(96)
    blocks = tables.assign(0, tokens)
    drafter.on_assign(0, len(tokens), 0)
    assert drafter.propose([wish(0, len(tokens), 2)]) == [[]]
    heir = [*tokens[:80], 1, 2, 3]
    tables.assign(3, heir, blocks=blocks[: 80 // BLOCK_SIZE])
    drafter.on_assign(3, len(heir), 80)
    rounds = [drafter.propose([wish(3, len(heir), 2)])[0] for _ in range(2)]
    assert rounds == [[], _says(heir, 2)]  # 32 are there, 32 + 19 are missing


@pytest.mark.parametrize("num_computed", [64, 71])
def test_blocks_that_somebody_else_filled_are_caught_up_with(num_computed: int) -> None:
    """KV of a peer: the blocks are in use again, with tokens that this model never computed there."""
    tables, drafter = _open(max_num_batched_tokens=32)
    before, tokens = _long(96), _long(72)
    blocks = tables.assign(0, before)
    drafter.on_assign(0, len(before), 0)
    while not drafter.propose([wish(0, len(before), 2)])[0]:
        pass
    tables.assign(0, tokens, blocks=blocks[: 72 // BLOCK_SIZE])
    drafter.on_assign(0, len(tokens), num_computed)
    rounds = [drafter.propose([wish(0, len(tokens), 2)])[0] for _ in range(3)]
    assert rounds == [[], [], _says(tokens, 2)]


def test_a_block_overwritten_by_drafts_is_nobodys_prefix() -> None:
    """The slot drafts into a block that it then gives away half full; a list that equals the drafts finds no KV there."""
    tables, drafter = _open()
    tokens = _long(30)
    blocks = tables.assign(0, tokens)
    drafter.on_assign(0, len(tokens), 0)
    drafts = drafter.propose([wish(0, len(tokens), 8)])[0]
    follower = [*tokens, *drafts]
    tables.assign(1, follower, blocks=blocks[:2])
    drafter.on_assign(1, len(follower), 32)
    assert drafter.propose([wish(1, len(follower), 3)]) == [_says(follower, 3)]


def test_tokens_that_only_the_served_model_has_do_no_harm() -> None:
    tables, drafter = _open()
    tables.assign(0, [5, VOCABULARY + 20, 7])
    drafter.on_assign(0, 3, 0)
    assert drafter.propose([wish(0, 3, 2, SamplingParams(seed=1, repetition_penalty=1.2))])[0]


def test_a_block_that_another_slot_began_to_fill_has_lost_its_name() -> None:
    """A slot that has the old tokens again finds other KV there, and computes its own."""
    tables, drafter = _open(max_num_batched_tokens=16)
    tokens = _long(40)
    blocks = tables.assign(0, tokens)
    drafter.on_assign(0, len(tokens), 0)
    while not drafter.propose([wish(0, len(tokens), 1)])[0]:
        pass
    other = _long(21)
    tables.assign(1, other, blocks=[blocks[2], blocks[1]])
    drafter.on_assign(1, len(other), 0)
    while not drafter.propose([wish(1, len(other), 1)])[0]:
        pass
    tables.assign(2, tokens, blocks=blocks[:2])
    drafter.on_assign(2, len(tokens), 32)
    rounds = [drafter.propose([wish(2, len(tokens), 3)])[0] for _ in range(2)]
    assert rounds == [[], _says(tokens, 3)]


def test_the_next_request_of_a_slot_has_rules_of_its_own() -> None:
    """The first one's tokens are those that the second one would say if it is not penalized for them."""
    tables, drafter = _open()
    sampling = SAMPLINGS["penalized"]
    for tokens in (_says(PROMPT, 4, sampling), PROMPT):
        tables.assign(0, tokens)
        drafter.on_assign(0, len(tokens), 0)
        assert drafter.propose([wish(0, len(tokens), 4, sampling)]) == [_says(tokens, 4, sampling)]


@pytest.mark.parametrize("num_missed", [1, 2, 3, 6])
def test_what_was_said_while_nobody_asked_replaces_what_was_drafted(num_missed: int) -> None:
    tables, drafter = _open()
    tables.assign(0, PROMPT)
    drafter.on_assign(0, len(PROMPT), 0)
    drafts = drafter.propose([wish(0, len(PROMPT), 5)])[0]
    said = [(token + 1) % VOCABULARY for token in [*drafts, 1][:num_missed]]
    tables.grow(0, len(PROMPT), said)
    tokens = [*PROMPT, *said]
    assert drafter.propose([wish(0, len(tokens), 3)]) == [_says(tokens, 3)]
