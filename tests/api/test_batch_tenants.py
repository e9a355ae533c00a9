"""Files and batches of several callers: what each of them sees, and how many it may have."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from onward.batches import batch_policy
from onward.batches.batch_policy import BatchLimits, caller_of_batches, concurrency_of, seed_of
from onward.config import ApiConfig
from onward.errors import InvalidRequest, RateLimited
from onward.proto.model import PreparedModel
from onward.web.auth.api_key_table import Caller
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.test_batches import CHAT, chat_line, create, jsonl, results, wait_for_end
from tests.api.test_roles import get, give_keys, until
from tests.web import route_access

LIMITS = BatchLimits(max_bytes=1000, concurrency=8, ttl_s=3600.0)


@pytest.fixture
def instance(model: PreparedModel, tmp_path: Path) -> Iterator[Instance]:
    with running(model, ApiConfig(batch_dir=str(tmp_path), batch_max_bytes=60_000)) as instance:
        give_keys(instance, route_access.entries())
        until(lambda: get(instance, "/version").status_code == 401)
        yield instance


def client_of(instance: Instance, name: str) -> openai.OpenAI:
    key = route_access.KEYS[name]
    return openai.OpenAI(base_url=f"{instance.url}/v1", api_key=key, max_retries=0, timeout=60)


def test_a_caller_sees_its_own_files_and_batches_only_and_an_admin_all(instance: Instance) -> None:
    with (
        client_of(instance, "user") as user,
        client_of(instance, "other") as other,
        client_of(instance, "admin") as admin,
    ):
        batch = wait_for_end(user, create(user, [chat_line(1)]))
        assert batch.output_file_id is not None
        for call in (
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.files.retrieve(batch.input_file_id),
            lambda: other.files.content(batch.output_file_id or ""),
            lambda: other.files.delete(batch.input_file_id),
            lambda: other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert not other.batches.list().data and not other.files.list().data
        with pytest.raises(openai.NotFoundError) as theirs:
            other.batches.retrieve(batch.id)
        with pytest.raises(openai.NotFoundError) as nobodys:
            other.batches.retrieve("batch_" + "0" * 32)
        assert theirs.value.message.replace(batch.id, "") == nobodys.value.message.replace("batch_" + "0" * 32, "")
        assert [one.id for one in admin.batches.list()] == [batch.id]
        assert admin.files.content(batch.output_file_id).content
        with pytest.raises(openai.BadRequestError):
            admin.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")


def test_requests_of_a_batch_are_their_caller_s(instance: Instance) -> None:
    with client_of(instance, "user") as user:
        wait_for_end(user, create(user, [chat_line(1)]))
    assert {submit.caller for submit in instance.engine.submits} == {"user"}


def test_the_bytes_of_one_caller_s_files_are_bounded_and_others_are_not_affected(instance: Instance) -> None:
    content = b"x" * 40_000
    with client_of(instance, "user") as user, client_of(instance, "other") as other:
        file = user.files.create(file=("a", content), purpose="batch")
        with pytest.raises(openai.APIStatusError) as refused:
            user.files.create(file=("b", content), purpose="batch")
        assert refused.value.status_code == 413
        other.files.create(file=("a", content), purpose="batch")
        user.files.delete(file.id)
        user.files.create(file=("b", content), purpose="batch")


def test_a_batch_whose_results_would_be_too_large_fails_and_keeps_those_it_has(instance: Instance) -> None:
    with client_of(instance, "user") as user:
        batch = create(user, [chat_line(number, max_tokens=40) for number in range(100)])
        batch = wait_for_end(user, batch)
        assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
        assert [error.code for error in batch.errors.data] == ["quota_exceeded"]
        counts, lines = batch.request_counts, results(user, batch.output_file_id)
        assert counts is not None and 0 < len(lines) == counts.completed < 100


def test_a_batch_of_a_key_that_is_removed_fails_and_runs_nothing_more(instance: Instance) -> None:
    instance.engine.paused = True
    with client_of(instance, "user") as user:
        batch = create(user, [chat_line(number) for number in range(20)])
    instance.wait_until(lambda: len(instance.engine.running) == 8)
    give_keys(instance, [entry for entry in route_access.entries() if entry.name != "user"])
    num_submits = len(instance.engine.submits)
    with client_of(instance, "admin") as admin:
        batch = wait_for_end(admin, batch, 30.0)
    instance.wait_until(lambda: not instance.engine.running)
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    assert [error.code for error in batch.errors.data] == ["key_removed"]
    assert len(instance.engine.submits) == num_submits


def test_batches_of_two_callers_run_side_by_side_and_those_of_one_in_turn(instance: Instance) -> None:
    instance.engine.paused = True
    with client_of(instance, "user") as user, client_of(instance, "other") as other:
        first = create(user, [chat_line(number) for number in range(30)])
        second = create(user, [chat_line(number) for number in range(30)])
        third = create(other, [chat_line(number) for number in range(30)])
        instance.wait_until(lambda: len(instance.engine.running) == 16)
        in_flight = [one.submit.caller for one in instance.engine.running.values()]
        assert in_flight.count("user") == in_flight.count("other") == 8
        assert user.batches.retrieve(second.id).status == "validating"
        instance.engine.paused = False
        for client, batch in ((user, first), (user, second), (other, third)):
            assert wait_for_end(client, batch).status == "completed"


def test_the_limits_of_a_key_leave_room_for_other_requests_of_its_caller() -> None:
    assert concurrency_of(Caller("a"), LIMITS) == 8
    assert concurrency_of(Caller("a", max_in_flight=100), LIMITS) == 8
    assert concurrency_of(Caller("a", max_in_flight=6), LIMITS) == 3
    assert concurrency_of(Caller("a", max_in_flight=1), LIMITS) == 1
    assert caller_of_batches(Caller("a", "user", 6, 7, 5000)) == Caller("a", "user", 6, 7, 5000)
    assert caller_of_batches(Caller("a")).priority == batch_policy.BATCH_PRIORITY


def test_a_caller_may_have_so_many_files_and_batches() -> None:
    batch_policy.check_file_quota(batch_policy.MAX_FILES - 1, 900, 100, LIMITS)
    for num_files, num_bytes, added in ((batch_policy.MAX_FILES, 0, 0), (1, 900, 101)):
        with pytest.raises(InvalidRequest) as refused:
            batch_policy.check_file_quota(num_files, num_bytes, added, LIMITS)
        assert refused.value.code == "quota_exceeded"
    batch_policy.check_batch_quota(batch_policy.MAX_BATCHES - 1, batch_policy.MAX_KEPT_BATCHES - 1)
    for num_unfinished, num_kept in ((batch_policy.MAX_BATCHES, 5), (5, batch_policy.MAX_KEPT_BATCHES)):
        with pytest.raises(RateLimited):
            batch_policy.check_batch_quota(num_unfinished, num_kept)


def test_a_seed_depends_on_batch_and_request_only() -> None:
    assert seed_of(7, "a") == seed_of(7, "a") != seed_of(7, "b") != seed_of(8, "b")
    assert all(0 <= seed_of(number, "\ud800") < 1 << 53 for number in range(100))


def test_uploads_of_one_caller_at_the_same_time_are_bounded(instance: Instance) -> None:
    begun, end = threading.Semaphore(0), threading.Event()
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    headers = {**route_access.header("user"), "content-type": "multipart/form-data; boundary=b"}

    def slow() -> Iterator[bytes]:
        yield head
        begun.release()
        end.wait(60)
        yield b"--b--\r\n"

    def upload() -> Any:
        return httpx.post(
            f"{instance.url}/v1/files", content=slow(), headers=headers, timeout=60, verify=NO_CERTIFICATES
        )

    uploads = [threading.Thread(target=upload) for _ in range(batch_policy.MAX_UPLOADS)]
    for thread in uploads:
        thread.start()
        assert begun.acquire(timeout=60)
    with client_of(instance, "user") as user, client_of(instance, "other") as other:

        def is_full() -> bool:
            try:
                user.files.create(file=("a", jsonl([])), purpose="batch")
            except openai.RateLimitError:
                return True
            return False

        until(is_full)
        other.files.create(file=("a", jsonl([])), purpose="batch")
        end.set()
        for thread in uploads:
            thread.join(60)
        user.files.create(file=("a", jsonl([])), purpose="batch")


def test_a_record_on_disk_names_no_key(instance: Instance, tmp_path: Path) -> None:
    with client_of(instance, "user") as user:
        create(user, [chat_line(1)])
    content = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert route_access.KEYS["user"].encode() not in content
    assert tmp_path.joinpath("callers", "user").stat().st_mode & 0o077 == 0
