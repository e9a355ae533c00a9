"""Which records are evicted where several callers share a store, and how much of a bound one of them may use."""

from hypothesis import given
from hypothesis import strategies as st

from onward.fair_record_store import FairRecordStore, RecordLimits
from onward.fair_share import within_fair_share

CALLERS: tuple[str, ...] = ("a", "b", "c")
MAX_RECORDS, MAX_BYTES = 9, 900
PUTS = st.lists(st.tuples(st.sampled_from(CALLERS), st.integers(0, 6), st.integers(1, 400)), max_size=60)


def put(records: FairRecordStore[str], record_id: str, caller: str, num_bytes: int = 1, *, ttl_s: float = 60.0) -> int:
    return records.put(record_id, caller, record_id, num_bytes, expires_at_s=ttl_s, now_s=0.0)


def test_a_caller_that_fills_the_store_loses_its_own_oldest_records() -> None:
    records: FairRecordStore[str] = FairRecordStore(RecordLimits(10, 1000))
    put(records, "small", "b", 10)
    assert sum(put(records, f"large {number}", "a", 100) for number in range(50)) == 41
    assert records.get("small", 0.0) == "small"
    assert list(records.values()) == ["small", *(f"large {number}" for number in range(41, 50))]


def test_a_record_that_is_larger_than_the_store_evicts_none_of_another_caller() -> None:
    records: FairRecordStore[str] = FairRecordStore(RecordLimits(10, 1000))
    put(records, "of b", "b", 500)
    put(records, "of a", "a", 5000)
    assert list(records.values()) == ["of b"] and records.num_bytes == 500


@given(PUTS)
def test_the_bounds_hold_and_a_caller_within_an_equal_share_loses_nothing(puts: list[tuple[str, int, int]]) -> None:
    records: FairRecordStore[str] = FairRecordStore(RecordLimits(MAX_RECORDS, MAX_BYTES))
    wanted: dict[str, dict[str, int]] = {caller: {} for caller in CALLERS}
    was_within = dict.fromkeys(CALLERS, True)
    for caller, number, num_bytes in puts:
        record_id = f"{caller}{number}"
        put(records, record_id, caller, num_bytes)
        wanted[caller][record_id] = num_bytes
        own = wanted[caller]
        is_within = len(own) <= MAX_RECORDS // 3 and sum(own.values()) <= MAX_BYTES // 3
        was_within[caller] = was_within[caller] and is_within
        assert len(records) <= MAX_RECORDS and records.num_bytes <= MAX_BYTES
        for one in CALLERS:
            assert not was_within[one] or all(name in records for name in wanted[one])


def test_expired_records_are_dropped_before_any_other_is_evicted() -> None:
    records: FairRecordStore[str] = FairRecordStore(RecordLimits(2, 1000))
    put(records, "long", "a")
    put(records, "short", "a", ttl_s=1.0)
    assert records.put("new", "a", "new", 1, expires_at_s=60.0, now_s=1.0) == 0
    assert list(records.values()) == ["long", "new"]
    assert records.get("long", 60.0) is None


def test_a_named_caller_may_use_half_of_what_the_others_leave_and_a_single_one_all() -> None:
    assert within_fair_share(50, 0, 0, 100, is_named=True) and not within_fair_share(51, 0, 0, 100, is_named=True)
    assert within_fair_share(25, 0, 50, 100, is_named=True) and not within_fair_share(1, 25, 50, 100, is_named=True)
    assert within_fair_share(100, 0, 0, 100, is_named=False) and not within_fair_share(101, 0, 0, 100, is_named=False)
