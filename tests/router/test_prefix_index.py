"""The index follows the instances' caches, notices what it missed, and stays small."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from onward.engine.scheduling.block_pool import KvEventLog
from onward.proto.kv_events import KvEvents
from onward.router.prefix_index import RESEND_ALL, PrefixIndex

BLOCKS = [bytes([number]) for number in range(20)]
Change = tuple[bool, bytes]


def learnt(number: int, *blocks: bytes, reset: bool = False) -> KvEvents:
    return KvEvents(number, [(True, block) for block in blocks], reset)


def forgotten(number: int, *blocks: bytes) -> KvEvents:
    return KvEvents(number, [(False, block) for block in blocks])


def knows(index: PrefixIndex, instance: str) -> set[bytes]:
    return {block for block in BLOCKS if index.matched_blocks(instance, [block])}


def replay(changes: list[Change]) -> set[bytes]:
    known: set[bytes] = set()
    for is_known, block in changes:
        (known.add if is_known else known.discard)(block)
    return known


def test_the_leading_blocks_that_are_cached_are_counted() -> None:
    index = PrefixIndex()
    index.apply("a", learnt(0, b"1", b"2", b"4"))
    assert index.matched_blocks("a", [b"1", b"2", b"3", b"4"]) == 2
    assert index.matched_blocks("a", [b"1", b"2"]) == 2
    assert index.matched_blocks("b", [b"1"]) == 0


def test_blocks_that_were_forgotten_match_no_more() -> None:
    index = PrefixIndex()
    index.apply("a", learnt(0, b"1", b"2"))
    assert index.apply("a", forgotten(2, b"2")) == 3
    assert index.matched_blocks("a", [b"1", b"2"]) == 1


def test_a_gap_starts_the_index_anew_and_asks_for_everything() -> None:
    index = PrefixIndex()
    index.apply("a", learnt(0, b"1"))
    assert index.apply("a", learnt(2, b"3")) == RESEND_ALL
    assert index.matched_blocks("a", [b"1"]) == 0
    assert index.apply("a", learnt(3, b"4")) == RESEND_ALL
    assert index.apply("a", learnt(2, b"1", b"3", reset=True)) == 4
    assert index.matched_blocks("a", [b"1", b"3"]) == 2


def test_a_router_that_comes_later_takes_no_half_of_the_story() -> None:
    index = PrefixIndex()
    assert index.next_event_number("a") == RESEND_ALL
    assert index.apply("a", learnt(7, b"8")) == RESEND_ALL


def test_changes_that_were_told_before_are_passed_over() -> None:
    index = PrefixIndex()
    index.apply("a", learnt(0, b"1", b"2"))
    index.apply("a", forgotten(2, b"1"))
    assert index.apply("a", learnt(0, b"1", b"2")) == 3
    assert index.matched_blocks("a", [b"1"]) == 0
    assert index.apply("a", KvEvents(2, [(False, b"1"), (True, b"3")])) == 4
    assert index.matched_blocks("a", [b"2", b"3"]) == 2


def test_a_reset_forgets_what_was_known() -> None:
    index = PrefixIndex()
    index.apply("a", learnt(0, b"1"))
    assert index.apply("a", learnt(9, reset=True)) == 9
    assert index.matched_blocks("a", [b"1"]) == 0
    assert len(index) == 0


def test_one_instance_forgotten_leaves_the_others() -> None:
    index = PrefixIndex()
    for instance in ("a", "b"):
        index.apply(instance, learnt(0, b"1"))
    index.forget("a")
    index.forget("a")
    assert (index.matched_blocks("a", [b"1"]), index.matched_blocks("b", [b"1"]), len(index)) == (0, 1, 1)


changes = st.lists(st.tuples(st.booleans(), st.sampled_from(BLOCKS)), max_size=60)
cuts = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=20)


@settings(max_examples=60, deadline=None)
@given(changes, cuts)
def test_whatever_parts_are_told_again_or_lost_it_knows_the_cache_up_to_what_it_expects(
    history: list[Change], parts: list[tuple[int, int]]
) -> None:
    index = PrefixIndex()
    for start, end in parts:
        part = history[start:end]
        expected = index.apply("a", KvEvents(min(start, len(history)), part))
        assert knows(index, "a") == replay(history[: max(0, expected)])
        assert len(index) == len(knows(index, "a"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), changes), max_size=8), st.integers(1, 10))
def test_it_never_holds_more_than_its_bound_nor_matches_what_is_not_there(
    told: list[tuple[str, list[Change]]], bound: int
) -> None:
    index = PrefixIndex(max_blocks=bound)
    histories: dict[str, list[Change]] = {"a": [], "b": []}
    for instance, part in told:
        index.apply(instance, KvEvents(len(histories[instance]), part))
        histories[instance] += part
        assert len(index) == len(knows(index, "a")) + len(knows(index, "b")) <= bound
        assert knows(index, instance) <= replay(histories[instance])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["learn", "forget", "renew", "tell", "lost"]), max_size=60), st.integers(1, 8))
def test_it_comes_to_know_what_an_engine_has_cached_whatever_was_lost_on_the_way(acts: list[str], kept: int) -> None:
    log, index, names = KvEventLog(), PrefixIndex(), dict[bytes, None]()
    log._changes = deque(maxlen=kept)
    for number, act in enumerate([*acts, "tell"]):
        if act == "learn":
            block = BLOCKS[number % len(BLOCKS)]
            names[block] = None
            log.append(True, block)
        elif act == "forget" and names:
            log.append(False, names.popitem()[0])
        elif act == "renew":
            names.clear()
            log.reset()
        elif act == "lost":
            log.since(index.next_event_number("a"), names)
        elif act == "tell":
            expected = index.apply("a", log.since(index.next_event_number("a"), names))
            assert knows(index, "a") == set(names)
            assert expected == index.next_event_number("a") != RESEND_ALL
