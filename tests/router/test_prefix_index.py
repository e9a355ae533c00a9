"""The index follows the instances' caches, notices what it missed, and stays small."""

from hypothesis import given
from hypothesis import strategies as st

from onward.proto.router import KvEvents
from onward.router.prefix_index import PrefixIndex

blocks = st.integers(0, 20).map(lambda number: bytes([number]))


def test_the_leading_blocks_that_are_cached_are_counted() -> None:
    index = PrefixIndex()
    index.apply("a", KvEvents(0, stored=[b"1", b"2", b"4"]))
    assert index.matched_blocks("a", [b"1", b"2", b"3", b"4"]) == 2
    assert index.matched_blocks("a", [b"1", b"2"]) == 2
    assert index.matched_blocks("b", [b"1"]) == 0


def test_removed_blocks_match_no_more() -> None:
    index = PrefixIndex()
    index.apply("a", KvEvents(0, stored=[b"1", b"2"]))
    assert index.apply("a", KvEvents(2, removed=[b"2"])) == 3
    assert index.matched_blocks("a", [b"1", b"2"]) == 1


def test_a_gap_starts_the_index_anew_and_asks_for_everything() -> None:
    index = PrefixIndex()
    index.apply("a", KvEvents(0, stored=[b"1"]))
    assert index.apply("a", KvEvents(2, stored=[b"3"])) == 0
    assert index.matched_blocks("a", [b"1"]) == 0
    assert index.apply("a", KvEvents(3, stored=[b"4"])) == 0
    assert index.apply("a", KvEvents(1, stored=[b"1", b"3"], reset=True)) == 3
    assert index.matched_blocks("a", [b"1", b"3"]) == 2


def test_a_router_that_comes_later_takes_no_half_of_the_story() -> None:
    assert PrefixIndex().apply("a", KvEvents(7, stored=[b"8"])) == 0


def test_events_that_were_told_before_change_nothing() -> None:
    index = PrefixIndex()
    index.apply("a", KvEvents(0, stored=[b"1"]))
    index.apply("a", KvEvents(1, removed=[b"1"]))
    assert index.apply("a", KvEvents(0, stored=[b"1"])) == 2
    assert index.matched_blocks("a", [b"1"]) == 0


def test_old_and_new_events_in_one_list_count_as_a_gap() -> None:
    index = PrefixIndex()
    index.apply("a", KvEvents(0, stored=[b"1", b"2"]))
    assert index.apply("a", KvEvents(1, stored=[b"2", b"3"])) == 0


def test_a_reset_forgets_what_was_known() -> None:
    index = PrefixIndex()
    index.apply("a", KvEvents(0, stored=[b"1"]))
    assert index.apply("a", KvEvents(0, reset=True)) == 0
    assert index.matched_blocks("a", [b"1"]) == 0
    assert len(index) == 0


def test_one_instance_forgotten_leaves_the_others() -> None:
    index = PrefixIndex()
    for instance in ("a", "b"):
        index.apply(instance, KvEvents(0, stored=[b"1"]))
    index.forget("a")
    index.forget("a")
    assert (index.matched_blocks("a", [b"1"]), index.matched_blocks("b", [b"1"]), len(index)) == (0, 1, 1)


batches = st.lists(st.tuples(st.sampled_from("ab"), st.lists(blocks, unique=True), st.lists(blocks, unique=True)))


@given(batches)
def test_an_index_that_missed_nothing_equals_the_caches(told: list[tuple[str, list[bytes], list[bytes]]]) -> None:
    index = PrefixIndex()
    caches: dict[str, set[bytes]] = {"a": set(), "b": set()}
    numbers = {"a": 0, "b": 0}
    for instance, stored, removed in told:
        caches[instance] = (caches[instance] - set(removed)) | set(stored)
        numbers[instance] = index.apply(instance, KvEvents(numbers[instance], stored, removed))
    for instance, cache in caches.items():
        assert all(index.matched_blocks(instance, [bytes([n])]) == (bytes([n]) in cache) for n in range(21))
    assert len(index) == sum(map(len, caches.values()))


@given(batches, st.integers(1, 10))
def test_it_never_holds_more_than_its_bound_nor_matches_what_is_not_there(
    told: list[tuple[str, list[bytes], list[bytes]]], bound: int
) -> None:
    index = PrefixIndex(max_blocks=bound)
    caches: dict[str, set[bytes]] = {"a": set(), "b": set()}
    for instance, stored, removed in told:
        caches[instance] = (caches[instance] - set(removed)) | set(stored)
        index.apply(instance, KvEvents(index.expected(instance), stored, removed))
        assert 0 <= len(index) <= bound
    for instance, cache in caches.items():
        assert all(bytes([n]) in cache or not index.matched_blocks(instance, [bytes([n])]) for n in range(21))
