"""`/v1/files` and `/v1/batches` of an instance, as the official client uses them; the engine is a stand-in."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from onward.config import ApiConfig
from onward.proto.model import PreparedModel
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.stand_in_engine import hashed_token

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
PATIENCE_S, LOOK_S = 60.0, 0.05


def client_of(instance: Instance, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{instance.url}/v1", api_key=key, max_retries=0, timeout=60)


def config_with(folder: Path, **more: Any) -> ApiConfig:
    return ApiConfig(batch_dir=str(folder), serve_config={"port": 0}, **more)


@pytest.fixture(scope="module")
def shared(model: PreparedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    config = config_with(tmp_path_factory.mktemp("batches"), batch_max_bytes=1 << 20, max_body_bytes=1 << 16)
    with running(model, config) as instance:
        yield instance


@pytest.fixture
def instance(shared: Instance) -> Iterator[Instance]:
    yield shared
    shared.engine.paused, shared.engine.refusal = False, None


@pytest.fixture
def client(instance: Instance) -> Iterator[openai.OpenAI]:
    with client_of(instance) as client:
        yield client


def chat_line(number: int, url: str = CHAT, **more: Any) -> dict[str, Any]:
    body = {"model": "small-model", "messages": [{"role": "user", "content": f"Say {number}."}], "max_tokens": 5}
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body | more}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def create(client: openai.OpenAI, lines: list[dict[str, Any]], endpoint: Any = CHAT, **more: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def wait_for_end(client: openai.OpenAI, batch: Batch, patience_s: float = PATIENCE_S) -> Batch:
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        batch = client.batches.retrieve(batch.id)
        if batch.status in ENDED:
            return batch
        time.sleep(LOOK_S)
    raise AssertionError(f"the batch is still {batch.status}")


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def texts(lines: list[dict[str, Any]]) -> dict[str, str]:
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}


def test_a_batch_is_uploaded_run_and_downloaded(client: openai.OpenAI) -> None:
    batch = create(client, [chat_line(number) for number in range(30)], metadata={"team": "a"})
    assert (batch.object, batch.endpoint, batch.completion_window, batch.metadata) == (
        "batch",
        CHAT,
        "24h",
        {"team": "a"},
    )
    batch = wait_for_end(client, batch)
    assert batch.status == "completed" and batch.error_file_id is None and batch.errors is None
    counts = batch.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (30, 30, 0)
    assert batch.completed_at and batch.in_progress_at and batch.finalizing_at and not batch.failed_at
    lines = results(client, batch.output_file_id)
    assert sorted(line["custom_id"] for line in lines) == sorted(f"r{number}" for number in range(30))
    assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in lines)
    assert all(line["response"]["body"]["usage"]["completion_tokens"] == 5 for line in lines)
    assert batch.output_file_id is not None
    output = client.files.retrieve(batch.output_file_id)
    assert output.purpose == "batch_output" and output.filename == f"{batch.id}_output.jsonl"
    assert batch.id in [one.id for one in client.batches.list()]


def test_files_are_listed_downloaded_and_deleted(client: openai.OpenAI) -> None:
    content = jsonl([chat_line(1)])
    ids = [client.files.create(file=(f"in-{i}.jsonl", content), purpose="batch").id for i in range(3)]
    file = client.files.retrieve(ids[0])
    assert (file.bytes, file.filename, file.purpose, file.object) == (len(content), "in-0.jsonl", "batch", "file")
    assert client.files.content(ids[0]).content == content
    listed = [one.id for one in client.files.list(limit=2, purpose="batch")]
    assert [one for one in listed if one in ids] == ids[::-1], "newest first, over all pages"
    assert [one.id for one in client.files.list(order="asc", after=ids[1])] == [ids[2]]
    assert client.files.delete(ids[0]).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(ids[0])
    assert ids[0] not in [one.id for one in client.files.list()]


def test_a_downloaded_file_is_never_shown_as_a_page(client: openai.OpenAI) -> None:
    name = 'a"; filename*=x\r\nX-Evil: 1\u00e9.html'
    file = client.files.create(file=(name, b"<script>"), purpose="batch")
    headers = client.files.content(file.id).response.headers
    assert headers["content-type"] == "application/octet-stream" and headers["x-content-type-options"] == "nosniff"
    assert headers["content-disposition"].startswith("attachment;") and "x-evil" not in headers


def test_failed_requests_are_in_the_error_file_and_the_others_in_the_output_file(client: openai.OpenAI) -> None:
    batch = wait_for_end(client, create(client, [chat_line(1), chat_line(2, temperature=-1), chat_line(3)]))
    counts = batch.request_counts
    assert batch.status == "completed" and counts is not None and (counts.completed, counts.failed) == (2, 1)
    assert sorted(line["custom_id"] for line in results(client, batch.output_file_id)) == ["r1", "r3"]
    [failed] = results(client, batch.error_file_id)
    assert failed["custom_id"] == "r2" and failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"] == "temperature"


def test_seeds_of_requests_come_from_the_batch_and_differ(client: openai.OpenAI, instance: Instance) -> None:
    before = len(instance.engine.submits)
    wait_for_end(client, create(client, [chat_line(1), chat_line(2), chat_line(3, seed=77)]))
    seeds = [submit.sampling_params.seed for submit in instance.engine.submits[before:]]
    assert len(set(seeds)) == 3 and 77 in seeds


def test_requests_of_a_batch_have_a_low_priority(client: openai.OpenAI, instance: Instance) -> None:
    before = len(instance.engine.submits)
    wait_for_end(client, create(client, [chat_line(1), chat_line(2, priority=-5), chat_line(3, priority=5000)]))
    assert sorted(submit.priority for submit in instance.engine.submits[before:]) == [1000, 1000, 5000]


def test_other_endpoints_than_chat(client: openai.OpenAI) -> None:
    model = "small-model"
    for endpoint, body in (
        ("/v1/completions", {"model": model, "prompt": "a", "max_tokens": 3}),
        ("/v1/responses", {"model": model, "input": "a", "max_output_tokens": 3}),
        ("/v1/embeddings", {"model": model, "input": "a"}),
    ):
        line = {"custom_id": "x", "method": "POST", "url": endpoint, "body": body}
        batch = wait_for_end(client, create(client, [line], endpoint))
        assert batch.status == "completed" and batch.error_file_id is None, results(client, batch.error_file_id)


def test_a_cancelled_batch_keeps_the_answers_that_it_has(client: openai.OpenAI, instance: Instance) -> None:
    stop = threading.Event()

    def choose(prompt: Any, sampling: Any, tokens: Any) -> int:
        if len(instance.engine.submits) > before + 20 and not stop.is_set():
            instance.engine.paused = True
        return hashed_token(prompt, sampling, tokens)

    before, instance.engine.choose = len(instance.engine.submits), choose
    batch = create(client, [chat_line(number) for number in range(100)])
    instance.wait_until(lambda: instance.engine.paused)
    assert client.batches.cancel(batch.id).status == "cancelling"
    stop.set()
    batch = wait_for_end(client, batch)
    instance.engine.choose, instance.engine.paused = hashed_token, False
    assert batch.status == "cancelled" and batch.cancelled_at and batch.cancelling_at
    counts = batch.request_counts
    assert counts is not None and 10 <= counts.completed < 100 and counts.total == 100
    lines = results(client, batch.output_file_id)
    assert len({line["custom_id"] for line in lines}) == len(lines) == counts.completed
    instance.wait_until(lambda: not instance.engine.running)
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.cancel(batch.id)
    assert refused.value.code == "batch_ended"


WRONG_INPUTS = [
    (b"not json\n", 1, "malformed"),
    (jsonl([chat_line(1), chat_line(1)]), 2, "custom_id"),
    (jsonl([chat_line(1), chat_line(2, url="/v1/completions")]), 2, "url: must be /v1/chat/completions"),
    (jsonl([chat_line(1), chat_line(2, stream=True)]), 2, "body.stream"),
    (jsonl([chat_line(1, background=True)]), 1, "body.background"),
    (b"\n", None, "no requests"),
]


@pytest.mark.parametrize(("content", "line", "problem"), WRONG_INPUTS)
def test_a_batch_with_a_faulty_input_fails_and_names_the_line(
    client: openai.OpenAI, instance: Instance, content: bytes, line: int | None, problem: str
) -> None:
    before = len(instance.engine.submits)
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = wait_for_end(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"))
    assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
    assert batch.errors is not None and batch.errors.data is not None
    [error] = batch.errors.data
    assert error.line == line and error.message is not None and problem in error.message
    assert ".jsonl" not in error.message, "it tells nothing of the server's folders"
    assert len(instance.engine.submits) == before, "nothing of it was sent"


WRONG_BODIES: list[tuple[dict[str, Any], str]] = [
    ({"endpoint": "/v1/messages"}, "endpoint"),
    ({"completion_window": "1h"}, "completion_window"),
    ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ({"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
    ({"metadata": {"k": 5}}, "metadata[...]"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
    ({"output_expires_after": {"anchor": "x", "seconds": 5000}}, "output_expires_after.anchor"),
    ({"prompt": 5}, "prompt"),
    ({"input_file_id": 5}, "input_file_id"),
]


@pytest.mark.parametrize(("change", "param"), WRONG_BODIES)
def test_a_wrong_field_of_a_batch_is_named(client: openai.OpenAI, change: dict[str, Any], param: str) -> None:
    file = client.files.create(file=("in.jsonl", jsonl([chat_line(1)])), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | change
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/batches", body=body, cast_to=object)
    assert refused.value.param == param


def test_a_batch_of_a_file_that_is_not_there_is_refused(client: openai.OpenAI) -> None:
    for file_id in ("file-" + "0" * 32, "../../etc/passwd", ""):
        with pytest.raises(openai.NotFoundError) as refused:
            client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        assert refused.value.param == "input_file_id"


def test_the_input_of_a_batch_that_runs_cannot_be_deleted(client: openai.OpenAI, instance: Instance) -> None:
    instance.engine.paused = True
    batch = create(client, [chat_line(1)])
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.delete(batch.input_file_id)
    assert refused.value.code == "file_in_use"
    instance.engine.paused = False
    assert wait_for_end(client, batch).status == "completed"
    assert client.files.delete(batch.input_file_id).deleted


UPLOADS: list[tuple[dict[str, Any], int, str | None]] = [
    ({"data": {"purpose": "fine-tune"}, "files": {"file": b"x"}}, 400, "purpose"),
    ({"files": {"file": b"x"}}, 400, "purpose"),
    ({"data": {"purpose": "batch"}, "files": {"other": b"x"}}, 400, "other"),
    ({"data": {"purpose": "batch", "x": "y"}, "files": {"file": b"x"}}, 400, "x"),
    ({"data": {"purpose": "batch"}, "files": [("file", b"x"), ("file", b"y")]}, 400, "file"),
    ({"data": {"purpose": "p" * 300}, "files": {"file": b"x"}}, 400, "purpose"),
    ({"data": {"purpose": "batch"}, "files": {"file": b"x" * (2 << 20)}}, 413, "file"),
    (
        {"data": {"purpose": "batch", "expires_after[anchor]": "created_at"}, "files": {"file": b"x"}},
        400,
        "expires_after",
    ),
    (
        {
            "data": {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "9"},
            "files": {"file": b"x"},
        },
        400,
        "expires_after[seconds]",
    ),
    ({"content": b"{}", "headers": {"content-type": "application/json"}}, 415, "Content-Type"),
    ({"content": b"{}"}, 415, "Content-Type"),
    ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "Content-Type"),
    ({"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=b"}}, 400, None),
    ({"content": b"--b\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}}, 400, None),
    (
        {"content": b"--b\r\nA: " + b"x" * 9000, "headers": {"content-type": "multipart/form-data; boundary=b"}},
        400,
        None,
    ),
]


@pytest.mark.parametrize(("upload", "status", "param"), UPLOADS)
def test_a_wrong_upload_is_refused_and_leaves_nothing(
    instance: Instance, client: openai.OpenAI, upload: dict[str, Any], status: int, param: str | None
) -> None:
    before = [one.id for one in client.files.list()]
    answer = httpx.post(f"{instance.url}/v1/files", timeout=60, verify=NO_CERTIFICATES, **upload)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
    assert [one.id for one in client.files.list()] == before


def test_forms_are_accepted_for_files_only(instance: Instance) -> None:
    for path in (CHAT, "/v1/batches", "/v1/files/x", "/v1/abort", "/tokenize"):
        answer = httpx.post(instance.url + path, files={"file": b"x"}, timeout=60, verify=NO_CERTIFICATES)
        assert answer.status_code == 415, path


@pytest.mark.parametrize(
    "header", [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}]
)
def test_a_form_of_another_site_s_page_is_refused(instance: Instance, header: dict[str, str]) -> None:
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": b"x"}}
    url = f"{instance.url}/v1/files"
    answer = httpx.post(url, headers=header, timeout=60, verify=NO_CERTIFICATES, **form)
    assert answer.status_code == 403
    own = httpx.post(url, headers={"Origin": instance.url}, timeout=60, verify=NO_CERTIFICATES, **form)
    assert own.status_code == 200, "the server's own page may"


def test_without_a_folder_the_routes_name_the_flag(model: PreparedModel) -> None:
    with running(model, has_engine=False) as instance, client_of(instance) as client:
        for call in (client.files.list, client.batches.list, lambda: create(client, [chat_line(1)])):
            with pytest.raises(openai.NotFoundError) as refused:
                call()
            assert refused.value.code == "batches_disabled" and "--batch-dir" in refused.value.message
