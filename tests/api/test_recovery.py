"""What a client sees when the layers below it fail, and what they see when it goes away."""

import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from benchmarks.harness.metrics_text import parse_metrics
from onward.config import ApiConfig
from onward.proto.engine import ErrorInfo, FromEngine, HeldRequestsReport, RequestAccepted
from onward.proto.model import PreparedModel
from onward.proto.sampling_params import SamplingParams
from tests.api.instance import Instance, running
from tests.api.small_model import EOS
from tests.api.stand_in_engine import StandInEngine, expected_tokens

PROMPT = [97, 98, 99]
CRASHED = ErrorInfo("crashed_worker", "it crashed the worker three times", 500)


def expected_text(count: int, seed: int = 7, choice: int = 0) -> str:
    return bytes(expected_tokens(PROMPT, SamplingParams(seed=seed, choice_index=choice), count)).decode()


def stream(client: openai.OpenAI, max_tokens: int = 40, **more: Any) -> Iterator[Any]:
    return iter(
        client.completions.create(
            model="small-model", prompt=PROMPT, max_tokens=max_tokens, seed=7, stream=True, **more
        )
    )


def metric(instance: Instance, name: str) -> float:
    values = parse_metrics(httpx.get(f"{instance.url}/metrics").text)
    return sum(value for key, value in values.items() if key.startswith(name))


def resubmitted(instance: Instance, cause: str) -> float:
    return metric(instance, f'onward_resubmissions_total{{cause="{cause}"}}')


def pause(engine: StandInEngine) -> None:
    engine.paused = True


def test_an_engine_that_dies_in_mid_stream_is_only_a_pause(instance: Instance, client: openai.OpenAI) -> None:
    before = resubmitted(instance, "engine_restart")
    chunks = stream(client, max_tokens=200)
    text = "".join(next(chunks).choices[0].text for _ in range(5))
    instance.engine.paused = True
    for _ in range(3):
        instance.restart_engine(pause)
    instance.engine.paused = False
    text += "".join(chunk.choices[0].text for chunk in chunks)
    assert text == expected_text(200)
    assert resubmitted(instance, "engine_restart") == before + 3
    assert instance.engine.submits[-1].generated_token_ids, "it went on from the tokens so far"
    assert instance.engine.submits[-1].num_cached_tokens == 3


def test_a_whole_answer_survives_a_dead_engine_too(instance: Instance, client: openai.OpenAI) -> None:
    instance.engine.paused = True
    answers: list[str] = []

    def ask() -> None:
        answer = client.completions.create(model="small-model", prompt=PROMPT, max_tokens=30, seed=7)
        answers.append(answer.choices[0].text)

    asking = threading.Thread(target=ask)
    asking.start()
    instance.wait_until(lambda: bool(instance.engine.running))
    instance.restart_engine()
    asking.join(20)
    assert answers == [expected_text(30)]


@pytest.mark.parametrize("seed", range(3))
def test_lost_and_repeated_messages_do_not_show(instance: Instance, client: openai.OpenAI, seed: int) -> None:
    chance = random.Random(seed)
    assert instance.engine_thread is not None

    def copies(message: FromEngine) -> int:
        return 1 if isinstance(message, HeldRequestsReport) else chance.choice([0, 1, 1, 1, 1, 1, 1, 2])

    instance.engine_thread.copies = copies
    try:
        text = "".join(chunk.choices[0].text for chunk in stream(client, max_tokens=60))
    finally:
        instance.engine_thread.copies = lambda _: 1
    assert text == expected_text(60)


def test_an_acceptance_that_is_lost_is_made_up_for(instance: Instance, client: openai.OpenAI) -> None:
    assert instance.engine_thread is not None
    instance.engine.paused = True
    instance.engine_thread.copies = lambda message: 0 if isinstance(message, RequestAccepted) else 1
    chunks = stream(client, max_tokens=3)
    instance.engine_thread.copies = lambda _: 1
    instance.engine.paused = False
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected_text(3)


def test_a_full_engine_is_a_429_with_retry_after(instance: Instance, client: openai.OpenAI) -> None:
    instance.engine.refusal = ErrorInfo("overloaded", "the queue is full", 429, True, retry_after_s=1.5)
    for streaming in (False, True):
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="small-model", prompt="x", stream=streaming)
        assert refused.value.response.headers["retry-after"] == "2"
        assert refused.value.code == "overloaded"


def test_a_request_without_an_engine_waits_for_one(instance: Instance, client: openai.OpenAI) -> None:
    instance.kill_engine()
    starting = threading.Timer(0.2, instance.start_engine)
    starting.start()
    answer = client.completions.create(model="small-model", prompt=PROMPT, max_tokens=3, seed=7)
    starting.join()
    assert answer.choices[0].text == expected_text(3)


def test_a_request_without_an_engine_waits_no_longer_than_its_deadline(
    instance: Instance, client: openai.OpenAI
) -> None:
    instance.kill_engine()
    try:
        with pytest.raises(openai.InternalServerError) as late:
            client.completions.create(model="small-model", prompt="x", extra_body={"deadline_ms": 50})
    finally:
        instance.start_engine()
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")


def test_a_fault_in_mid_stream_is_one_error_event_and_an_end(instance: Instance) -> None:
    fields = {"model": "small-model", "prompt": PROMPT, "max_tokens": 200, "seed": 7, "stream": True}
    with httpx.stream("POST", f"{instance.url}/v1/completions", json=fields) as response:
        lines = response.iter_lines()
        seen = [next(lines) for _ in range(6)]
        instance.lose_requests(1, CRASHED)
        seen += list(lines)
    assert response.status_code == 200
    assert [line for line in seen if line.startswith("event:")] == ["event: error"]
    data = [line for line in seen if line.startswith("data: ")]
    assert '"code":"crashed_worker"' in data[-2]
    assert data[-1] == "data: [DONE]"


def test_the_openai_client_raises_a_fault_in_mid_stream(instance: Instance, client: openai.OpenAI) -> None:
    chunks = stream(client, max_tokens=200)
    next(chunks)
    instance.lose_requests(1, CRASHED)
    with pytest.raises(openai.APIError, match="three times"):
        list(chunks)


def test_a_fault_of_one_choice_ends_the_whole_request_and_leaves_nothing(instance: Instance) -> None:
    instance.engine.paused = True
    fields = {"model": "small-model", "prompt": PROMPT, "n": 2, "max_tokens": 9}
    answers: list[httpx.Response] = []
    url = f"{instance.url}/v1/completions"
    asking = threading.Thread(target=lambda: answers.append(httpx.post(url, json=fields)))
    asking.start()
    instance.wait_until(lambda: len(instance.engine.running) == 2)
    instance.lose_requests(1, CRASHED)
    asking.join(20)
    assert [answer.status_code for answer in answers] == [500]
    instance.wait_until(lambda: not instance.engine.running)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_goes_away_leaves_nothing_behind(instance: Instance, streaming: bool) -> None:
    instance.engine.paused = True
    fields = {"model": "small-model", "prompt": PROMPT, "max_tokens": 250, "n": 2, "stream": streaming}
    request = httpx.Request("POST", f"{instance.url}/v1/completions", json=fields)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection((request.url.host, request.url.port or 80)) as connection:
        connection.sendall(f"POST {request.url.path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        instance.wait_until(lambda: len(instance.engine.running) == 2)
        if streaming:
            assert connection.recv(12) == b"HTTP/1.1 200"
    instance.wait_until(lambda: not instance.engine.running)
    last = instance.engine.aborts[-2:]
    assert [(one.epoch, one.reason) for one in last] == [(1, "abort")] * 2


@pytest.mark.parametrize("given", [1, 7, 19])
def test_given_tokens_are_continued_where_their_text_ended(
    instance: Instance, client: openai.OpenAI, given: int
) -> None:
    so_far = expected_tokens(PROMPT, SamplingParams(seed=7), given)
    chunks = list(
        stream(
            client,
            max_tokens=20,
            stream_options={"include_usage": True},
            extra_body={"generated_token_ids": so_far},
        )
    )
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert bytes(so_far).decode() + text == expected_text(20)
    assert chunks[-1].usage.completion_tokens == 20
    assert instance.engine.submits[-1].generated_token_ids == so_far


def test_given_tokens_may_end_in_half_a_character_or_half_a_stop_string(
    instance: Instance, client: openai.OpenAI
) -> None:
    output = "é stop".encode()
    instance.engine.choose = lambda prompt, sampling, tokens: output[len(tokens)]
    for given in range(1, len(output)):
        answer = client.completions.create(
            model="small-model",
            prompt=PROMPT,
            max_tokens=len(output),
            stop="stoop",
            extra_body={"generated_token_ids": list(output[:given])},
        )
        shown = output[:given].decode(errors="ignore").removesuffix("s").removesuffix("st").removesuffix("sto")
        assert shown + answer.choices[0].text == "é stop"


ENDED: list[tuple[bytes, dict[str, Any], str, str]] = [
    (b"abc", {"max_tokens": 3}, "length", ""),
    (b"abc" + b"\n", {"extra": {"stop_token_ids": [10]}}, "stop", ""),
    (b"abcSTOP", {"stop": "STOP"}, "stop", ""),
    (b"abcS", {"stop": "STOP", "max_tokens": 4}, "length", "S"),
]


@pytest.mark.parametrize(("output", "fields", "reason", "rest"), ENDED)
@pytest.mark.parametrize("streaming", [False, True])
def test_given_tokens_that_have_ended_finish_without_the_engine(
    instance: Instance, output: bytes, fields: dict[str, Any], reason: str, rest: str, streaming: bool
) -> None:
    before = len(instance.engine.submits)
    body = {"model": "small-model", "prompt": PROMPT, "generated_token_ids": list(output), "stream": streaming}
    body |= {key: value for key, value in fields.items() if key != "extra"} | fields.get("extra", {})
    response = httpx.post(f"{instance.url}/v1/completions", json=body)
    assert f'"text":"{rest}"' in response.text
    assert f'"finish_reason":"{reason}"' in response.text
    if not streaming:
        assert response.json()["usage"]["completion_tokens"] == len(output)
    assert len(instance.engine.submits) == before


def test_one_choice_may_have_ended_while_another_goes_on(instance: Instance, client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="small-model",
        prompt=PROMPT,
        max_tokens=6,
        seed=7,
        n=2,
        extra_body={"generated_token_ids": [[97, EOS], []]},
    )
    assert [(one.text, one.finish_reason) for one in answer.choices] == [
        ("", "stop"),
        (expected_text(6, choice=1), "length"),
    ]
    assert answer.usage is not None and answer.usage.completion_tokens == 8


def test_two_api_processes_share_one_engine_and_one_view_of_the_instance(model: PreparedModel) -> None:
    with running(model, num_api=2) as instance:
        texts: list[str] = []

        def ask() -> None:
            with openai.OpenAI(base_url=f"{instance.url}/v1", api_key="x", max_retries=0) as client:
                texts.append("".join(chunk.choices[0].text for chunk in stream(client, max_tokens=30)))

        askers = [threading.Thread(target=ask) for _ in range(16)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join(20)
        assert texts == [expected_text(30)] * 16
        served = metric(instance, 'onward_http_requests_total{path="/v1/completions",status="200"}')
        assert served == 16


def test_streams_finish_within_the_grace_of_a_stop(model: PreparedModel) -> None:
    with running(model) as instance, openai.OpenAI(base_url=f"{instance.url}/v1", api_key="x") as client:
        chunks = stream(client, max_tokens=100)
        text = next(chunks).choices[0].text
        instance.stop(grace_s=20)
        assert text + "".join(chunk.choices[0].text for chunk in chunks) == expected_text(100)


def test_a_stream_that_outlasts_the_grace_is_told_so(model: PreparedModel) -> None:
    with running(model) as instance, openai.OpenAI(base_url=f"{instance.url}/v1", api_key="x") as client:
        chunks = stream(client, max_tokens=100)
        next(chunks)
        instance.engine.paused = True
        instance.stop(grace_s=0.2)
        with pytest.raises(openai.APIError, match="stopping"):
            list(chunks)


def test_a_second_stop_ends_streams_at_once_and_says_how_many(
    model: PreparedModel, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(model) as instance, openai.OpenAI(base_url=f"{instance.url}/v1", api_key="x") as client:
        streams = [stream(client, max_tokens=100) for _ in range(2)]
        for chunks in streams:
            next(chunks)
        instance.engine.paused = True
        instance.stop(grace_s=600.0)
        instance.stop(grace_s=0.0)
        for chunks in streams:
            with pytest.raises(openai.APIError, match="stopping"):
                list(chunks)
    assert "streams cut clients=2 routers=0" in capfd.readouterr().err


def test_an_api_process_leaves_when_its_supervisor_has_died(model: PreparedModel) -> None:
    instance = Instance(model, ApiConfig())
    child = instance.children[0]
    instance.die()
    assert child.process.wait(10) == 1
