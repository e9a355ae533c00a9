"""Entries of the stream store: what is kept, for how long, and what is evicted first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.proto.stream_store import EntryStatus
from onward.stream_store.entries import DELETED_S, EntryTable, RecordLimits, size_of
from tests.stream_store.store_entries import record_of


def few(max_records: int = 10, max_bytes: int = 1 << 20) -> EntryTable:
    return EntryTable({"detached": RecordLimits(max_records, max_bytes), "ended": RecordLimits(max_records, max_bytes)})


def test_records_are_bounded_in_number_and_the_oldest_goes_first() -> None:
    records = few(10)
    evicted = [records.put(record_of(f"r{number}"), 0.0) for number in range(15)]
    assert evicted == [0] * 10 + [1] * 5
    assert records.count() == {"detached": 10, "ended": 0}
    assert records.get("r4", 0.0) is None and records.get("r5", 0.0) is not None


def test_records_are_bounded_in_bytes() -> None:
    records, data = few(10, 4096), b"x" * 600
    for number in range(5):
        records.put(record_of(f"r{number}", data=data), 0.0)
    assert [records.get(f"r{number}", 0.0) is not None for number in range(5)] == [False, False, True, True, True]
    records.put(record_of("too large", data=data * 7), 0.0)
    assert records.count()["detached"] == 0 and records.num_bytes()["detached"] == 0


def test_those_that_were_written_to_their_end_push_out_none_that_was_cut() -> None:
    records = few(3)
    records.put(record_of("cut"), 0.0)
    for number in range(5):
        records.put(record_of(f"r{number}", kind="ended"), 0.0)
    assert records.get("cut", 0.0) is not None
    assert records.count() == {"detached": 1, "ended": 3}


def test_a_caller_that_fills_the_store_evicts_none_of_another_caller() -> None:
    records = few(10, 8192)
    records.put(record_of("mine", caller="a"), 0.0)
    for number in range(20):
        records.put(record_of(f"r{number}", caller="b", data=b"x" * 2000), 0.0)
    assert records.get("mine", 0.0) is not None
    assert records.count()["detached"] == 1 + 3


def test_room_is_made_by_what_is_over_before_anything_else_goes() -> None:
    records = few(2)
    records.put(record_of("old"), 0.0)
    records.put(record_of("short", ttl_s=1.0), 0.0)
    assert records.put(record_of("new"), 1.0) == 0
    assert [records.get(name, 1.0) is not None for name in ("old", "short", "new")] == [True, False, True]


def test_each_lives_as_long_as_it_may() -> None:
    records = few()
    records.put(record_of("a", ttl_s=10.0), 0.0)
    records.put(record_of("b", ttl_s=2.0), 5.0)
    assert records.get("b", 7.0) is None and records.get("a", 9.9) is not None
    assert records.get("a", 10.0) is None
    records.expire(10.0)
    assert records.count() == {"detached": 0, "ended": 0} and records.num_bytes()["detached"] == 0


def test_of_two_with_one_id_the_later_attempt_counts_whichever_comes_first() -> None:
    records = few()
    records.put(record_of("a", attempt_epoch=3, kind="ended"), 0.0)
    records.put(record_of("a", attempt_epoch=2), 0.0)
    assert records.count() == {"detached": 0, "ended": 1}
    records.put(record_of("a", attempt_epoch=4), 0.0)
    assert records.count() == {"detached": 1, "ended": 0}


def test_an_earlier_attempt_is_forgotten_and_a_later_one_is_not() -> None:
    records = few()
    records.put(record_of("a", attempt_epoch=3), 0.0)
    records.drop_superseded("a", 2, "", 0.0)
    assert records.get("a", 0.0) is not None
    records.drop_superseded("a", 3, "", 0.0)
    assert records.get("a", 0.0) is None


def test_nobody_replaces_or_drops_what_is_anothers() -> None:
    records = few()
    records.put(record_of("a", caller="anna", aliases=("mine",)), 0.0)
    records.put(record_of("a", caller="ben", attempt_epoch=9), 0.0)
    records.drop_superseded("a", 9, "ben", 0.0)
    assert records.drop_by_name(["a", "mine"], False, "ben", 0.0) == set()
    assert records.drop_by_name([], True, "ben", 0.0) == set()
    found = records.get("a", 0.0)
    assert found is not None and found.caller == "anna"
    assert records.drop_by_name(["mine"], False, None, 0.0) == {"mine"}


def test_a_record_is_dropped_by_its_id_or_its_name() -> None:
    records = few()
    for name, names in (("a", ("mine",)), ("b", ()), ("c", ())):
        records.put(record_of(name, aliases=names), 0.0)
    assert records.drop_by_name(["mine", "b", "x", ""], False, None, 0.0) == {"mine", "b"}
    assert records.drop_by_name([], True, None, 0.0) == {"c"}
    assert records.count()["detached"] == 0


def test_an_abort_drops_no_stored_response_and_finds_those_that_have_not_ended() -> None:
    records = EntryTable()
    endings: dict[str, EntryStatus] = {"a": "open", "b": "open", "c": "complete", "d": "cancelled"}
    for name, ending in endings.items():
        kind = "detached" if name == "b" else "response"
        records.put(record_of(name, kind=kind, aliases=("mine",), caller="anna", status=ending, is_stored=True), 0.0)
    for caller in (None, "anna"):
        assert records.drop_by_name(["mine", "c"], False, caller, 0.0) == set()
        assert records.open_named(["mine", "c", "x"], False, caller, 0.0) == {"a": ["mine"], "b": ["mine"]}
        assert records.open_named([], True, caller, 0.0) == {"a": ["a"], "b": ["b"]}
    assert records.open_named(["mine"], False, "ben", 0.0) == {}
    assert all(records.get(name, 0.0) is not None for name in endings)


def test_a_deleted_response_does_not_come_back() -> None:
    records = EntryTable()
    records.put(record_of("a", kind="response", caller="anna", is_stored=True), 0.0)
    assert not records.delete("a", "ben", 0.0)
    assert records.delete("a", "anna", 0.0)
    assert not records.delete("a", "anna", 0.0)
    records.put(
        record_of("a", kind="response", caller="anna", attempt_epoch=9, status="cancelled", is_stored=True), 0.0
    )
    found = records.get("a", 0.0)
    assert found is not None and found.status == "deleted"
    assert records.open_named(["a"], False, None, 0.0) == {} and records.drop_by_name(["a"], False, None, 0.0) == set()
    assert records.get("a", DELETED_S) is None, "it is remembered for a while only"


STEPS = st.lists(
    st.tuples(
        st.sampled_from("abcdef"), st.sampled_from(["detached", "ended"]), st.integers(0, 900), st.integers(1, 3)
    ),
    max_size=40,
)


@given(STEPS)
def test_the_bounds_hold_and_the_bytes_are_those_of_what_is_there(steps: list[tuple[str, str, int, int]]) -> None:
    records = few(3, 4000)
    for now_s, (name, kind, num_bytes, epoch) in enumerate(steps):
        records.put(record_of(name, kind=kind, data=b"x" * num_bytes, attempt_epoch=epoch, ttl_s=7.0), now_s)
        kept = [one for one in (records.get(name, now_s) for name in "abcdef") if one is not None]
        assert sum(map(size_of, kept)) <= sum(records.num_bytes().values())
        assert all(count <= 3 for count in records.count().values())
        assert all(size <= 4000 for size in records.num_bytes().values())
    records.expire(1000.0)
    assert records.num_bytes() == {"detached": 0, "ended": 0}


@pytest.mark.parametrize("ending", ["complete", "cancelled"])
def test_a_record_that_has_ended_is_never_replaced(ending: EntryStatus) -> None:
    records = EntryTable()
    ended = record_of("a", kind="response", attempt_epoch=2, status=ending)
    records.put(ended, 0.0)
    for later in (
        record_of("a", kind="detached", attempt_epoch=3),
        record_of("a", kind="response", attempt_epoch=3, status="complete"),
    ):
        assert records.put(later, 1.0) == 0
        assert records.get("a", 1.0) == ended


def test_a_response_is_kept_until_a_later_attempt_replaces_its_record() -> None:
    records = EntryTable()
    for kind in ("detached", "response"):
        records.put(record_of(kind, kind=kind, attempt_epoch=1), 0.0)
        records.drop_superseded(kind, 2, "", 0.0)
    assert records.get("detached", 0.0) is None
    assert records.get("response", 0.0) is not None
    records.put(later := record_of("response", kind="response", attempt_epoch=2), 0.0)
    assert records.get("response", 0.0) == later
