"""Penalties, biases, bad words, logprobs and the endpoint that speaks tokens, with the real model: from body to answer."""

import math
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest

from tests.e2e.server import Server
from tests.e2e.streams import Stream

MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
CHANT: dict[str, Any] = {"model": MODEL, "prompt": "A B C A B C A B C A B C A B C", "max_tokens": 32, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--internal-adapter") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def generate(server: Server, **fields: Any) -> dict[str, Any]:
    status, answer = server.post("/v1/generate", {"model": MODEL, "temperature": 0} | fields)
    assert status == 200, answer
    return answer


def read_stream(server: Server, path: str, body: dict[str, Any], kill_pid: int | None = None) -> list[dict[str, Any]]:
    """All events of a stream; a process may be killed when five of them have come."""
    events: list[dict[str, Any]] = []
    with httpx.stream("POST", server.url + path, json=body | {"stream": True}, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                events.append(msgspec.json.decode(line[6:]))
                if kill_pid is not None and len(events) == 5:
                    os.kill(kill_pid, signal.SIGKILL)
    return events


def chant_tokens(server: Server, **fields: Any) -> list[str]:
    status, answer = server.post("/v1/completions", CHANT | {"logprobs": 0, "ignore_eos": True} | fields)
    assert status == 200, answer
    return answer["choices"][0]["logprobs"]["tokens"]


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 2.0}, {"repetition_penalty": 1.8}, {"presence_penalty": 2.0}]
)
def test_a_penalty_breaks_a_chant(server: Server, penalty: dict[str, float]) -> None:
    chanted, penalised = Counter(chant_tokens(server)), Counter(chant_tokens(server, **penalty))
    assert len(chanted) <= 6, "without a penalty it repeats itself"
    assert len(penalised) > 2 * len(chanted)


def test_a_bias_forces_a_token_and_another_forbids_one(server: Server) -> None:
    prompt = [[504, 2, 9], [1, 4093, 198]]
    for ids in prompt:
        [plain] = generate(server, prompt_token_ids=ids, max_tokens=4, ignore_eos=True)["choices"]
        forced = generate(server, prompt_token_ids=ids, max_tokens=4, logit_bias={"1000": 100})["choices"][0]
        assert forced["token_ids"] == [1000] * 4
        first = plain["token_ids"][0]
        [without] = generate(server, prompt_token_ids=ids, max_tokens=4, logit_bias={str(first): -100})["choices"]
        assert first not in without["token_ids"]


def test_a_bad_word_is_never_said(client: openai.OpenAI) -> None:
    arguments: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 30}
    said = client.chat.completions.create(**arguments).choices[0].message.content or ""
    assert "Paris" in said
    kept = client.chat.completions.create(**arguments, extra_body={"bad_words": ["Paris", "France"]})
    assert "Paris" not in (kept.choices[0].message.content or "")
    assert "France" not in (kept.choices[0].message.content or "")


def test_logprobs_are_those_of_the_tokens_that_were_said(client: openai.OpenAI) -> None:
    arguments: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 5}
    answer = client.chat.completions.create(**arguments, max_tokens=20)
    assert answer.usage is not None and answer.choices[0].logprobs is not None
    told = answer.choices[0].logprobs.content or []
    assert len(told) == answer.usage.completion_tokens
    for one in told:
        assert one.top_logprobs[0].token == one.token, "greedy says the likeliest"
        assert one.top_logprobs[0].logprob == one.logprob
        likelihoods = [math.exp(top.logprob) for top in one.top_logprobs]
        assert likelihoods == sorted(likelihoods, reverse=True) and sum(likelihoods) <= 1 + 1e-6
    said = bytes(byte for one in told for byte in one.bytes or [])
    assert said.decode().removesuffix("<|im_end|>") == answer.choices[0].message.content


@pytest.mark.parametrize("choices", [1, 3])
def test_a_stream_tells_the_same_logprobs_as_a_whole_answer(client: openai.OpenAI, choices: int) -> None:
    arguments: Any = {
        "model": MODEL,
        "prompt": "The weather in Reykjavík is 雨 and",
        "max_tokens": 16,
        "seed": 3,
        "logprobs": 2,
        "n": choices,
    }
    whole = client.completions.create(**arguments)
    told: list[dict[str, list[Any]]] = [{} for _ in range(choices)]
    for chunk in client.completions.create(**arguments, stream=True):
        logprobs = chunk.choices[0].logprobs
        for name, values in logprobs.model_dump().items() if logprobs else ():
            told[chunk.choices[0].index].setdefault(name, []).extend(values)
    assert told == [choice.logprobs.model_dump() for choice in whole.choices if choice.logprobs]
    assert all(len(one["tokens"]) == 16 for one in told)


def test_the_prompts_logprobs_do_not_depend_on_what_is_cached(server: Server) -> None:
    prompt = list(range(500, 560))
    generate(server, prompt_token_ids=prompt, max_tokens=1)
    asked = [generate(server, prompt_token_ids=prompt, max_tokens=1, prompt_logprobs=2) for _ in range(2)]
    cached = generate(server, prompt_token_ids=prompt, max_tokens=1)
    assert asked[0]["prompt_logprobs"] == asked[1]["prompt_logprobs"]
    first, *others = asked[0]["prompt_logprobs"]
    assert first is None and len(others) == len(prompt) - 1
    assert all(str(token_id) in told for token_id, told in zip(prompt[1:], others, strict=True))
    figures = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (*asked, cached)]
    assert figures[:2] == [0, 0], "the whole prompt was looked at"
    assert figures[2] >= 48


def test_logprobs_of_an_output_are_found_again_where_it_is_a_prompt(server: Server) -> None:
    prompt = list(range(700, 720))
    answer = generate(server, prompt_token_ids=prompt, max_tokens=6, logprobs=0, ignore_eos=True)
    said = answer["choices"][0]["token_ids"]
    again = generate(server, prompt_token_ids=prompt + said, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    expected = [one["logprob"] for one in answer["choices"][0]["logprobs"]]
    assert [told[str(token)]["logprob"] for token, told in zip(said, again[-6:], strict=True)] == expected


OPTIONS: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Tell me about tea, glass and owls.",
    "max_tokens": 48,
    "seed": 11,
    "temperature": 0.9,
    "ignore_eos": True,
    "frequency_penalty": 0.7,
    "presence_penalty": 0.4,
    "repetition_penalty": 1.2,
    "bad_words": ["the", "owl"],
    "logit_bias": {"28": -5},
    "logprobs": 2,
    "prompt_logprobs": 1,
    "stream_options": {"include_usage": True},
}


def told_by(events: list[dict[str, Any]]) -> tuple[str, list[Any], list[Any], Any]:
    """Text, tokens with their logprobs, what was said of the prompt, and the usage."""
    choices = [choice for event in events for choice in event["choices"]]
    logprobs = [one["logprobs"] for one in choices if one["logprobs"]]
    tokens = [row for one in logprobs for row in zip(*one.values(), strict=True)]
    prompts = [one["prompt_logprobs"] for one in choices if "prompt_logprobs" in one]
    return "".join(one["text"] for one in choices), tokens, prompts, events[-1]["usage"]


@pytest.mark.parametrize("role", ["worker", "engine"])
def test_every_option_survives_the_death_of_a_process(server: Server, role: str) -> None:
    undisturbed = told_by(read_stream(server, "/v1/completions", OPTIONS))
    disturbed = told_by(read_stream(server, "/v1/completions", OPTIONS, kill_pid=server.pid(role)))
    assert disturbed == undisturbed
    assert len(undisturbed[1]) == 48 and len(undisturbed[2]) == 1
    assert "owl" not in undisturbed[0]


ALLOWED = [*range(300, 2300)]
RESTRICTED: dict[str, Any] = {
    "model": MODEL, "prompt": "Once upon a time", "max_tokens": 48, "temperature": 1.0, "seed": 5, "logprobs": 1,
    "allowed_token_ids": ALLOWED, "stop_regex": ["[aeiou]{4,6}q"], "return_token_ids": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip


@pytest.mark.parametrize("role", ["worker", "engine"])
def test_only_allowed_tokens_come_also_after_the_death_of_a_process(server: Server, role: str) -> None:
    undisturbed = read_stream(server, "/v1/completions", RESTRICTED)
    disturbed = read_stream(server, "/v1/completions", RESTRICTED, kill_pid=server.pid(role))
    assert told_by(disturbed) == told_by(undisturbed)
    choices = [choice for event in undisturbed for choice in event["choices"]]
    token_ids = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
    assert len(token_ids) == 48 and {*token_ids} <= {*ALLOWED}


def test_tokens_in_tokens_out_is_what_a_completion_says(server: Server) -> None:
    ids = list(range(900, 930))
    body = {"model": MODEL, "prompt": ids, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    _, completion = server.post("/v1/completions", body)
    answer = generate(server, prompt_token_ids=ids, max_tokens=12, ignore_eos=True)
    stream = Stream(body | {"prompt_token_ids": ids}, "/v1/generate")
    events = read_stream(server, stream.path, stream.body)
    streamed = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    assert answer["choices"][0]["token_ids"] == streamed
    logprobs = [one["logprob"] for event in events for choice in event["choices"] for one in choice["logprobs"]]
    assert logprobs == completion["choices"][0]["logprobs"]["token_logprobs"]


def test_the_internal_adapter_hides_the_token_that_ended_the_output(server: Server) -> None:
    chat = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 40, "logprobs": True}
    _, said = server.post("/v1/chat/completions", chat | {"prompt_logprobs": 0})
    assert said["choices"][0]["finish_reason"] == "stop"
    # The template's own tokens, as the prompt's logprobs name them: all but the first, `<|im_start|>`.
    ids = [1, *(int(next(iter(told))) for told in said["prompt_logprobs"][1:])]
    answer = generate(server, prompt_token_ids=ids, max_tokens=40)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] - 1
    assert answer["usage"]["completion_tokens"] == said["usage"]["completion_tokens"]
    [whole] = generate(server, prompt_token_ids=ids, max_tokens=40, ignore_eos=True)["choices"]
    assert whole["token_ids"][: len(choice["token_ids"])] == choice["token_ids"]
    assert len(whole["token_ids"]) == 40
