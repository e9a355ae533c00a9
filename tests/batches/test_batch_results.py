"""Results of a batch on disk: each request is in one of two files, once, whatever cut the writing."""

from pathlib import Path

import pytest

from onward.batches.batch_files import BatchError, BatchResponse, BatchResult
from onward.batches.batch_results import BatchResults, QuotaExceeded
from onward.batches.batch_store import BatchStore
from onward.batches.records import BatchRecord

RECORD = BatchRecord(
    id="batch_1",
    caller="team-a",
    created_s=0.0,
    expires_s=1.0,
    seed=5,
    endpoint="/v1/completions",
    input_file_id="file-0",
    completion_window="24h",
    output_file_id="file-1",
    error_file_id="file-2",
    output_ttl_s=1.0,
)


def result(custom_id: str, status: int = 200) -> BatchResult:
    return BatchResult("x", custom_id, BatchResponse(status, "x", {"a": 1}), None)


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    made = BatchStore(str(tmp_path))
    made.prepare()
    return made


def test_a_line_that_was_cut_is_no_result_and_is_removed(store: BatchStore) -> None:
    with BatchResults(store, RECORD, 10_000) as results:
        results.add(result("a"))
        results.add(result("b", 400))
        results.add(result("c"))
    output = store.content_path("team-a", "file-1")
    whole = output.read_bytes()
    output.write_bytes(whole[:-5])
    with BatchResults(store, RECORD, 10_000) as results:
        assert [results.has(name) for name in "abc"] == [True, True, False]
        assert (results.counts(3).completed, results.counts(3).failed) == (1, 1)
        results.add(result("c"))
    assert output.read_bytes() == whole


def test_requests_without_a_result_get_an_error_and_the_others_keep_theirs(store: BatchStore) -> None:
    with BatchResults(store, RECORD, 10_000) as results:
        results.add(result("a"))
        results.add_unanswered(["a", "b"], BatchError("batch_expired", "late"))
        results.add_unanswered(["a", "b"], BatchError("batch_expired", "late"))
    assert store.content_path("team-a", "file-1").read_bytes().count(b"\n") == 1
    assert store.content_path("team-a", "file-2").read_bytes().count(b"\n") == 1


def test_results_beyond_the_limit_are_refused(store: BatchStore) -> None:
    with BatchResults(store, RECORD, 100) as results:
        with pytest.raises(QuotaExceeded):
            for number in range(100):
                results.add(result(str(number)))
        assert 100 <= results.num_output_bytes < 300
