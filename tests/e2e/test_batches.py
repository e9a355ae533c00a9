"""`/v1/batches` with the real model: whatever is killed, each request has one answer, the one it has without a kill."""

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai.types import Batch

from onward.batches.batch_policy import seed_of
from onward.batches.records import BatchRecord
from tests.e2e.cluster import SMALL, Instance, Router
from tests.e2e.pd_instances import wait_for
from tests.e2e.server import Server

MODEL = "smollm2-135m-instruct"
NUM_REQUESTS = 24
BODIES = {
    f"r{number}": {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Tell me something about the number {number}."}],
        "max_tokens": 48,
        "temperature": 1.0,
    }
    for number in range(NUM_REQUESTS)
}


@contextlib.contextmanager
def client_of(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def create(client: openai.OpenAI) -> Batch:
    lines = [
        {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
        for custom_id, body in BODIES.items()
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


def num_answered(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return 0 if counts is None else counts.completed


def wait_until_begun(client: openai.OpenAI, batch_id: str, least: int) -> None:
    wait_for(lambda: num_answered(client, batch_id) >= least, f"{least} answers")
    assert num_answered(client, batch_id) < NUM_REQUESTS, "killed partway"


def check_answers(client: openai.OpenAI, batch_id: str, folder: Path) -> None:
    """Each request has one answer, and it is the one that the server gives to the same request and seed."""
    wait_for(lambda: client.batches.retrieve(batch_id).status == "completed", "the end of the batch")
    batch = client.batches.retrieve(batch_id)
    assert batch.error_file_id is None and batch.output_file_id is not None
    lines = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    texts = {line["custom_id"]: _text(line["response"]["body"]) for line in lines}
    assert len(lines) == NUM_REQUESTS and texts.keys() == BODIES.keys()
    [path] = folder.glob(f"callers/*/batches/{batch_id}.json")
    seed = msgspec.json.decode(path.read_bytes(), type=BatchRecord).seed
    for custom_id, body in BODIES.items():
        quiet: Any = client.post("/chat/completions", body={**body, "seed": seed_of(seed, custom_id)}, cast_to=object)
        assert texts[custom_id] == _text(quiet), custom_id


def _text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "batches"


def test_a_batch_goes_on_when_the_whole_server_is_killed_and_started_again(folder: Path) -> None:
    flags = (*SMALL, "--batch-dir", str(folder), "--batch-concurrency", "2", "--api-processes", "2")
    with Server(*flags) as server, client_of(server.url) as client:
        batch_id = create(client).id
        wait_until_begun(client, batch_id, 3)
        server.stop(signal.SIGKILL)
    with Server(*flags) as server, client_of(server.url) as client:
        check_answers(client, batch_id, folder)


def test_a_batch_of_a_router_goes_on_when_an_instance_or_the_router_is_killed(folder: Path) -> None:
    router = Router("--batch-dir", str(folder), "--batch-concurrency", "2")
    with contextlib.ExitStack() as owned:
        owned.enter_context(contextlib.closing(router))
        instances = [
            owned.enter_context(contextlib.closing(Instance(name, "mixed", *SMALL, "--router", router.url)))
            for name in ("one", "two")
        ]
        wait_for(lambda: len(router.status()["instances"]) == 2, "both instances")
        client = owned.enter_context(client_of(router.url))
        batch_id = create(client).id
        wait_until_begun(client, batch_id, 3)
        router.kill()
        router.start_again()
        wait_for(lambda: len(router.status()["instances"]) == 2, "both instances")
        wait_until_begun(client, batch_id, 6)
        instances[0].kill("instance")
        check_answers(client, batch_id, folder)
