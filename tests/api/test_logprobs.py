"""Logprobs as clients read them: every token's, once, whichever endpoint, streaming or not, through every disturbance."""

import threading
from typing import Any

import httpx
import msgspec
import openai
import pytest

from onward.api.lifecycle import logprobs_json
from onward.api.lifecycle.logprobs_json import LOWEST_LOGPROB, TokenStrings
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import TokenLogprobs
from onward.text.token_table import TokenTable
from tests.api.instance import Instance
from tests.api.small_model import EOS, chat_prompt
from tests.api.stand_in_engine import StandInEngine, expected_tokens, made_up_logprobs

HELLO = [{"role": "user", "content": "hello"}]
PROMPT = [97, 98, 99]
PIECES = [*(bytes([byte]) for byte in range(256)), b"<|im_end|>", b"<|im_start|>"]
NAMES = TokenStrings(TokenTable(PIECES, [256, 257]))


def pause(engine: StandInEngine) -> None:
    engine.paused = True


def entry(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": bytes([token_id]).decode(errors="replace"), "logprob": logprob, "bytes": [token_id]}


def chat_entries(tokens: list[int], num_top: int, first: int = 0) -> list[dict[str, Any]]:
    entries = []
    for position, token in enumerate(tokens, first):
        one = made_up_logprobs(token, position, num_top)
        entries.append(entry(token, one.logprob) | {"top_logprobs": [entry(*top) for top in one.top]})
    return entries


def prompt_entries(prompt: list[int], num_top: int, decoded: bool = True) -> list[Any]:
    entries: list[Any] = [None]
    for position, token in enumerate(prompt[1:], 1):
        one = made_up_logprobs(token, position, num_top)
        listed = dict([(token, one.logprob), *one.top])
        entries.append(
            {
                str(each): {"logprob": logprob, "rank": rank, "decoded_token": NAMES.text(each) if decoded else None}
                for rank, (each, logprob) in enumerate(listed.items(), 1)
            }
        )
    return entries


def read_events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [msgspec.json.decode(line) for line in lines[:-1]]


def test_half_a_character_has_its_bytes_and_a_text_that_says_so() -> None:
    first, second = "é".encode()
    told = logprobs_json.chat_logprobs(NAMES, [first, second, 65], [TokenLogprobs(-1.0, 1)] * 3)["content"]
    assert [one["bytes"] for one in told] == [[first], [second], [65]]
    assert bytes(byte for one in told for byte in one["bytes"]).decode() == "éA"
    assert [one["token"] for one in told] == ["\N{REPLACEMENT CHARACTER}"] * 2 + ["A"]


def test_the_older_form_always_lists_the_token_itself() -> None:
    unlikely = TokenLogprobs(-9.0, 200, [(65, -0.5), (66, -1.0)])
    told = logprobs_json.completion_logprobs(NAMES, [67, 65], [unlikely, TokenLogprobs(-0.5, 1, [(65, -0.5)])], [0, 1])
    assert told["top_logprobs"] == [{"A": -0.5, "B": -1.0, "C": -9.0}, {"A": -0.5}]
    assert (told["tokens"], told["token_logprobs"], told["text_offset"]) == (["C", "A"], [-9.0, -0.5], [0, 1])


def test_minus_infinity_is_a_number_that_json_can_say() -> None:
    never = TokenLogprobs(float("-inf"), 300, [(65, float("-inf"))])
    for told in (
        logprobs_json.chat_logprobs(NAMES, [66], [never]),
        logprobs_json.completion_logprobs(NAMES, [66], [never], [0]),
        logprobs_json.token_logprobs([66], [never]),
        logprobs_json.prompt_logprobs([(66, never)], NAMES),
    ):
        encoded = msgspec.json.encode(told)
        assert encoded.count(str(LOWEST_LOGPROB).encode()) >= 2
        assert b'logprob":null' not in encoded


def test_an_id_that_stands_for_no_text_is_named_by_its_number() -> None:
    assert (NAMES.text(300), NAMES.utf8_bytes(300)) == ("token_id:300", [])
    assert NAMES.text(256) == "<|im_end|>"


def test_the_prompts_own_token_comes_first_with_its_rank() -> None:
    told = logprobs_json.prompt_logprobs([(67, TokenLogprobs(-9.0, 200, [(65, -0.5), (66, -1.0)]))], NAMES)
    assert told == [
        None,
        {
            "67": {"logprob": -9.0, "rank": 200, "decoded_token": "C"},
            "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
            "66": {"logprob": -1.0, "rank": 2, "decoded_token": "B"},
        },
    ]


@pytest.mark.parametrize("num_top", [None, 0, 3])
def test_a_chat_tells_the_logprobs_of_every_token(client: openai.OpenAI, num_top: int | None) -> None:
    more: Any = {} if num_top is None else {"top_logprobs": num_top}
    answer = client.chat.completions.create(
        model="small-model", messages=HELLO, max_tokens=6, seed=7, n=2, logprobs=True, **more
    )
    for choice in answer.choices:
        tokens = expected_tokens(chat_prompt("hello"), SamplingParams(seed=7, choice_index=choice.index), 6)
        assert choice.logprobs is not None and choice.logprobs.content is not None
        told = [one.model_dump() for one in choice.logprobs.content]
        assert told == chat_entries(tokens, num_top or 0)


def test_a_streamed_chat_tells_the_same_logprobs_choice_by_choice(client: openai.OpenAI) -> None:
    told: list[list[dict[str, Any]]] = [[], []]
    for chunk in client.chat.completions.create(
        model="small-model", messages=HELLO, max_tokens=6, seed=7, n=2, logprobs=True, top_logprobs=2, stream=True
    ):
        [choice] = chunk.choices
        if choice.logprobs is not None:
            told[choice.index] += [one.model_dump() for one in choice.logprobs.content or []]
    for index in range(2):
        tokens = expected_tokens(chat_prompt("hello"), SamplingParams(seed=7, choice_index=index), 6)
        assert told[index] == chat_entries(tokens, 2)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_completion_tells_logprobs_in_the_older_form(
    instance: Instance, client: openai.OpenAI, streaming: bool
) -> None:
    output = "aé😀b".encode()
    instance.engine.choose = lambda prompt, sampling, tokens: output[len(tokens)]
    arguments: Any = {"model": "small-model", "prompt": PROMPT, "max_tokens": len(output), "logprobs": 2}
    answers = (
        client.completions.create(**arguments, stream=True) if streaming else [client.completions.create(**arguments)]
    )
    told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    text = ""
    for answer in answers:
        [choice] = answer.choices
        text += choice.text
        for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
            told[name] += values
    assert text == output.decode()
    assert told["token_logprobs"] == [-float(position) for position in range(len(output))]
    assert told["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3]
    assert told["tokens"] == [bytes([byte]).decode(errors="replace") for byte in output]
    assert told["top_logprobs"][0] == {"a": 0.0, "b": -0.125}


def test_without_asking_there_are_none(client: openai.OpenAI) -> None:
    assert client.completions.create(model="small-model", prompt="x", max_tokens=2).choices[0].logprobs is None
    chunks = client.chat.completions.create(model="small-model", messages=HELLO, max_tokens=2, stream=True)
    assert all(chunk.choices[0].logprobs is None for chunk in chunks)


def test_an_end_token_and_a_stop_string_have_their_logprobs_too(instance: Instance, client: openai.OpenAI) -> None:
    instance.engine.choose = lambda prompt, sampling, tokens: [*b"on stop", EOS][len(tokens)]
    arguments: Any = {"model": "small-model", "prompt": PROMPT, "max_tokens": 20, "logprobs": 0}
    ended = client.completions.create(**arguments)
    assert ended.usage is not None and ended.choices[0].logprobs is not None
    assert (ended.choices[0].logprobs.tokens or [])[-1] == "<|im_end|>"
    assert len(ended.choices[0].logprobs.tokens or []) == ended.usage.completion_tokens == 8
    stopped = client.completions.create(**arguments, stop="sto")
    assert stopped.choices[0].logprobs is not None
    assert "".join(stopped.choices[0].logprobs.tokens or []) == "on sto"
    assert stopped.choices[0].text == "on "


def test_after_engines_have_died_no_logprob_is_missing_or_repeated(instance: Instance, client: openai.OpenAI) -> None:
    chunks = iter(
        client.completions.create(
            model="small-model",
            prompt=PROMPT,
            max_tokens=200,
            seed=7,
            logprobs=1,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    read = [next(chunks) for _ in range(4)]
    instance.engine.paused = True
    for _ in range(3):
        instance.restart_engine(pause)
    instance.engine.paused = False
    read += list(chunks)
    told = [value for chunk in read if chunk.choices for value in chunk.choices[0].logprobs.token_logprobs]
    assert told == [-float(position) for position in range(200)]
    assert instance.engine.submits[-1].generated_token_ids, "it went on from the tokens so far"
    assert read[-1].usage.prompt_tokens_details.cached_tokens == 3


def test_a_whole_answer_has_all_logprobs_although_its_engine_died(instance: Instance) -> None:
    def pause_in_the_middle(prompt: Any, sampling: SamplingParams, tokens: Any) -> int:
        instance.engine.paused = len(tokens) == 4
        return 97

    instance.engine.choose = pause_in_the_middle
    fields = {"model": "small-model", "prompt_token_ids": PROMPT, "max_tokens": 9, "logprobs": 0, "prompt_logprobs": 0}
    with httpx.Client(base_url=instance.url, timeout=30) as http:
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(http.post("/v1/generate", json=fields).json()))
        asking.start()
        instance.wait_until(lambda: instance.engine.paused)
        instance.restart_engine()
        asking.join(20)
    [choice] = answers[0]["choices"]
    assert [one["logprob"] for one in choice["logprobs"]] == [-float(position) for position in range(9)]
    assert answers[0]["prompt_logprobs"] == prompt_entries(PROMPT, 0, decoded=False)
    assert answers[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, "answer"),
        ("/v1/completions", {"prompt": PROMPT}, "choice"),
        ("/v1/generate", {"prompt_token_ids": PROMPT}, "answer"),
    ],
)
def test_the_prompts_logprobs_come_once_and_first(
    instance: Instance, path: str, fields: dict[str, Any], place: str
) -> None:
    body = {"model": "small-model", "max_tokens": 4, "prompt_logprobs": 2, "n": 2} | fields
    prompt = chat_prompt("hello") if "messages" in fields else PROMPT
    expected = prompt_entries(prompt, 2, decoded=path != "/v1/generate")
    whole = httpx.post(instance.url + path, json=body, timeout=30).json()
    assert (whole if place == "answer" else whole["choices"][1])["prompt_logprobs"] == expected
    with httpx.stream("POST", instance.url + path, json=body | {"stream": True}, timeout=30) as response:
        events = [event for event in read_events(response) if "role" not in event["choices"][0].get("delta", {})]
    told = [event if place == "answer" else event["choices"][0] for event in events]
    assert [one["prompt_logprobs"] for one in told if "prompt_logprobs" in one] == [expected]
    first = next(event for event in events if event["choices"][0]["index"] == 0)
    assert "prompt_logprobs" in (first if place == "answer" else first["choices"][0])
