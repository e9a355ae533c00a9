"""A batch whose processes are killed has each answer once, and the same answers as without a kill."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from onward.batches.records import BatchRecord
from onward.config import ApiConfig
from onward.proto.model import PreparedModel
from tests.api.instance import Instance, running
from tests.api.stand_in_engine import hashed_token
from tests.api.test_batches import chat_line, create, results, texts, wait_for_end

LINES = [chat_line(number, temperature=1.0) for number in range(60)]
"""Without seeds: the server chooses them."""
PAUSE_AFTER = 25


def client_of(instance: Instance) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{instance.url}/v1", api_key="none", max_retries=0, timeout=60)


def pausing_after(instance: Instance, num_submits: int) -> Any:
    """The engine stops in the middle of the batch, until it is told to go on."""

    def choose(prompt: Any, sampling: Any, tokens: Any) -> int:
        if len(instance.engine.submits) >= num_submits:
            instance.engine.paused = True
        return hashed_token(prompt, sampling, tokens)

    return choose


def go_on(instance: Instance) -> None:
    instance.engine.choose, instance.engine.paused = hashed_token, False


def lock_holder(folder: Path) -> int:
    """The process that runs the batches, as the kernel knows it."""
    inode = (folder / "runner.lock").stat().st_ino
    found = re.search(rf"FLOCK +ADVISORY +WRITE (\d+) [0-9a-f]+:[0-9a-f]+:{inode} ", Path("/proc/locks").read_text())
    assert found is not None, "a process runs the batches"
    return int(found[1])


def forget_answers(folder: Path, batch_id: str) -> None:
    """Writes a batch that has ended as it was when it was created, so that it runs again."""
    [path] = folder.glob(f"callers/*/batches/{batch_id}.json")
    record = msgspec.json.decode(path.read_bytes(), type=BatchRecord)
    fresh = msgspec.structs.replace(record, status="validating", ending=None, ended_s=None, has_output=False)
    path.write_bytes(msgspec.json.encode(fresh))
    for kind in ("json", "jsonl"):
        next(folder.glob(f"callers/*/files/{record.output_file_id}.{kind}")).unlink()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "batches"


@pytest.fixture
def pair(model: PreparedModel, folder: Path) -> Iterator[Instance]:
    with running(model, ApiConfig(batch_dir=str(folder)), num_api=2, has_own_ports=True) as instance:
        yield instance


def check_complete(client: openai.OpenAI, batch: Any) -> dict[str, str]:
    """Every request has one answer. Returns the texts."""
    lines = results(client, batch.output_file_id)
    assert batch.status == "completed" and batch.error_file_id is None
    assert len(lines) == len(LINES) and {line["custom_id"] for line in lines} == {line["custom_id"] for line in LINES}
    assert batch.request_counts.completed == len(LINES)
    return texts(lines)


def test_another_process_takes_over_when_the_one_that_runs_a_batch_is_killed(pair: Instance, folder: Path) -> None:
    pair.engine.choose = pausing_after(pair, PAUSE_AFTER)
    with client_of(pair) as client:
        batch = create(client, LINES)
    pair.wait_until(lambda: pair.engine.paused)
    holder = lock_holder(folder)
    [killed] = [child for child in pair.children if child.process.pid == holder]
    pair.kill_api(killed)
    pair.url = pair.children[0].url
    go_on(pair)
    with client_of(pair) as client:
        disturbed = check_complete(client, wait_for_end(client, batch))
        assert lock_holder(folder) != holder
        num_sent = len(pair.engine.submits)
        assert num_sent < len(LINES) + 2 * PAUSE_AFTER, "answers that were there are not computed again"
    # The same batch once more, by a process that does not have its old answers: it has no ended record in memory.
    quiet = replay(pair, folder, batch.id)
    assert quiet == disturbed, "the same texts as without a kill"


def replay(pair: Instance, folder: Path, batch_id: str) -> dict[str, str]:
    model, config = pair.model, ApiConfig(batch_dir=str(folder))
    pair.stop(0.0)
    for child in pair.children:
        assert child.process.wait(60) == 0
    forget_answers(folder, batch_id)
    with running(model, config) as again, client_of(again) as client:
        return check_complete(client, wait_for_end(client, client.batches.retrieve(batch_id)))


def test_a_batch_survives_the_loss_of_the_whole_server_again_and_again(model: PreparedModel, folder: Path) -> None:
    config, batch_id = ApiConfig(batch_dir=str(folder)), ""
    for life in range(3):
        with running(model, config, num_api=2) as instance:
            instance.engine.choose = pausing_after(instance, 15)
            with client_of(instance) as client:
                batch_id = batch_id or create(client, LINES).id
                instance.wait_until(lambda instance=instance: instance.engine.paused)
                assert client.batches.retrieve(batch_id).status == "in_progress", life
            for child in list(instance.children):
                instance.kill_api(child)
        [path] = folder.glob("callers/*/batches/*.json")
        record = msgspec.json.decode(path.read_bytes(), type=BatchRecord)
        [output] = folder.glob(f"callers/*/files/{record.output_file_id}.jsonl")
        with output.open("ab") as file:
            file.write(b'{"id":"batch_req_x","custom_id":"r59","resp')  # as a process that dies while it writes
    with running(model, config, num_api=2) as instance:
        with client_of(instance) as client:
            disturbed = check_complete(client, wait_for_end(client, client.batches.retrieve(batch_id)))
        assert len(instance.engine.submits) < len(LINES), "answers that were there are not computed again"
        assert replay(instance, folder, batch_id) == disturbed, "the same texts as without a kill"


def test_a_batch_that_was_cancelled_before_the_kill_does_not_go_on_after_it(model: PreparedModel, folder: Path) -> None:
    config = ApiConfig(batch_dir=str(folder))
    with running(model, config) as instance, client_of(instance) as client:
        instance.engine.choose = pausing_after(instance, PAUSE_AFTER)
        batch = create(client, LINES)
        instance.wait_until(lambda: instance.engine.paused)
        instance.kill_api(instance.children[0])
    record_path = next(folder.glob("callers/*/batches/*.json"))
    record_path.with_suffix(".cancel").write_text("1000000000.0")  # what the route writes
    with running(model, config) as instance, client_of(instance) as client:
        batch = wait_for_end(client, batch)
        assert batch.status == "cancelled" and batch.cancelling_at == 1_000_000_000
        assert not instance.engine.submits


def test_a_process_that_takes_over_while_a_batch_is_finished_finishes_it(model: PreparedModel, folder: Path) -> None:
    config = ApiConfig(batch_dir=str(folder))
    with running(model, config) as instance, client_of(instance) as client:
        batch = wait_for_end(client, create(client, LINES[:5]))
    [path] = folder.glob("callers/*/batches/*.json")
    record = msgspec.json.decode(path.read_bytes(), type=BatchRecord)
    # As it is while the process that was killed had decided that the time was over, and had written no more than that.
    late = msgspec.structs.replace(record, status="finalizing", ending="expired", ended_s=None, has_output=False)
    path.write_bytes(msgspec.json.encode(late))
    output = next(folder.glob(f"callers/*/files/{record.output_file_id}.jsonl"))
    output.with_suffix(".json").unlink()
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:2]))
    with running(model, config) as instance, client_of(instance) as client:
        batch = wait_for_end(client, batch)
        assert batch.status == "expired" and not instance.engine.submits
        answered = [line["custom_id"] for line in results(client, batch.output_file_id)]
        errors = results(client, batch.error_file_id)
        assert {line["error"]["code"] for line in errors} == {"batch_expired"}
        assert sorted([*answered, *(line["custom_id"] for line in errors)]) == [f"r{number}" for number in range(5)]


def test_a_batch_whose_time_is_over_when_the_server_comes_back_expires(model: PreparedModel, folder: Path) -> None:
    config = ApiConfig(batch_dir=str(folder))
    with running(model, config, has_engine=False) as instance, client_of(instance) as client:
        batch = create(client, LINES)
    [path] = folder.glob("callers/*/batches/*.json")
    record = msgspec.json.decode(path.read_bytes(), type=BatchRecord)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, expires_s=record.created_s)))
    with running(model, config) as instance, client_of(instance) as client:
        batch = wait_for_end(client, batch)
        assert batch.status == "expired" and batch.expired_at and batch.output_file_id is None
        counts = batch.request_counts
        assert counts is not None and (counts.completed, counts.failed) == (0, len(LINES))
        assert not instance.engine.submits
