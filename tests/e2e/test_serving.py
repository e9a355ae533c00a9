"""The whole server with the real model, as clients use it: the `openai` package, two api processes, one instance."""

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.e2e.server import Server
from tests.e2e.streams import chat_body, run_streams

MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--api-processes", "2") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_client_gets_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=30)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_as_an_answer_in_one_piece(client: openai.OpenAI) -> None:
    arguments = {"model": MODEL, "messages": QUESTION, "temperature": 0.8, "seed": 7, "max_tokens": 40}
    whole = client.chat.completions.create(**arguments)
    with client.chat.completions.create(**arguments, stream=True) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content


def test_the_asynchronous_client_reads_many_streams_at_once(server: Server) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, seed=seed, max_tokens=24, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, seed % 4) for seed in range(8)))

    texts = asyncio.run(all_at_once())
    assert texts[:4] == texts[4:], "the same seed gives the same text"
    assert len(set(texts)) > 1, "another seed gives another one"


def test_completions_work_too(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=0, n=2)
    assert len(answer.choices) == 2
    assert answer.choices[0].text == answer.choices[1].text != ""


def test_each_choice_has_noise_of_its_own_and_keeps_it(client: openai.OpenAI) -> None:
    def texts() -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, n=3, seed=5, temperature=1.2, max_tokens=20
        )
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    arguments = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 30}
    whole = client.chat.completions.create(**arguments).choices[0].message.content or ""
    cut = client.chat.completions.create(**arguments, stop="France").choices[0]
    assert cut.message.content == whole.split("France")[0]
    assert cut.finish_reason == "stop"


def test_a_follow_up_question_finds_the_conversation_in_the_cache(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Describe a lighthouse in a storm, in detail. " * 4}]
    first = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=40)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Go on."},
    ]
    second = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_tokens_of_an_earlier_attempt_are_continued_and_not_repeated(server: Server) -> None:
    [whole] = run_streams(server.url, [chat_body(3, 40)])
    for position in (1, 17, 39):
        [rest] = run_streams(server.url, [chat_body(3, 40, generated_token_ids=whole.token_ids[:position])])
        assert whole.text.endswith(rest.text)
        assert whole.usage is not None
        assert rest.usage is not None
        assert rest.usage["completion_tokens"] == whole.usage["completion_tokens"] == 40
        assert rest.token_ids == whole.token_ids


def test_a_client_that_goes_away_stops_its_work(server: Server) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            body = chat_body(1, 4000) | {"stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("id: "):
                        return

    finished = 'onward_requests_finished_total{reason="abort"}'
    before = server.metrics().get(finished, 0)
    asyncio.run(leave())
    # The next request is behind the abort in the engine's inbox, if it goes through the same api process; else the
    # abort is at most one event-loop turn away. A bounded number of looks settles it.
    for _ in range(200):
        if server.metrics().get(finished, 0) == before + 1:
            break
    metrics = server.metrics()
    assert metrics[finished] == before + 1
    assert metrics['onward_requests{state="running"}'] == 0
    assert metrics['onward_kv_blocks{state="owned"}'] == 0


def test_metrics_show_the_whole_instance_whichever_process_is_asked(server: Server) -> None:
    assert len(server.get("/info")["pids"]["api"]) == 2
    run_streams(server.url, [chat_body(i, 4) for i in range(8)])
    generated = {server.metrics()['onward_tokens_total{kind="generated"}'] for _ in range(8)}
    assert len(generated) == 1
    served = [server.metrics()['onward_http_requests_total{path="/metrics",status="200"}'] for _ in range(8)]
    assert served == sorted(served)


def test_steps_are_planned_while_others_run(server: Server) -> None:
    def steps() -> tuple[float, float]:
        metrics = server.metrics()
        return tuple(metrics.get(f'onward_steps_total{{overlapped="{value}"}}', 0.0) for value in ("true", "false"))

    before = steps()
    run_streams(server.url, [chat_body(i, 48) for i in range(8)])
    overlapped, alone = (after - was for after, was in zip(steps(), before, strict=True))
    assert overlapped >= 0.9 * (overlapped + alone)


def test_a_prompt_that_can_never_fit_is_refused_and_told_by_how_much(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=[1] * 8000, max_tokens=500)
    assert refused.value.code == "context_length_exceeded"
    assert "308" in refused.value.message


def test_health_and_models_answer(server: Server, client: openai.OpenAI) -> None:
    assert server.get("/health")["status"] == "ok"
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert server.get("/version")["version"]
