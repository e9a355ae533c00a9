"""The real openai package against the real api process: synchronous and not, streaming and not."""

import asyncio

import openai
import pytest

from onward.proto.cursor import parse_cursor
from onward.proto.sampling_params import SamplingParams
from tests.api.instance import Instance
from tests.api.small_model import EOS, chat_prompt
from tests.api.stand_in_engine import expected_tokens

HELLO = [{"role": "user", "content": "hello"}]


def expected_text(prompt: list[int], count: int, seed: int = 7, choice: int = 0) -> str:
    return bytes(expected_tokens(prompt, SamplingParams(seed=seed, choice_index=choice), count)).decode()


def test_a_chat_is_answered_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="small-model", messages=HELLO, max_tokens=12, seed=7, extra_body={"top_k": 5}
    )
    [choice] = answer.choices
    assert choice.message.content == expected_text(chat_prompt("hello"), 12)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.id.startswith("chatcmpl-")
    assert (answer.model, answer.system_fingerprint) == ("small-model", "fp-small")
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens == len(chat_prompt("hello"))
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (12, 12 + answer.usage.prompt_tokens)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_a_chat_is_streamed_and_says_the_same(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="small-model",
            messages=HELLO,
            max_tokens=12,
            seed=7,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    said = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(one.delta.content or "" for one in said) == expected_text(chat_prompt("hello"), 12)
    assert [one.finish_reason for one in said if one.finish_reason] == ["length"]
    assert chunks[-1].usage is not None and not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


def test_without_include_usage_there_is_no_usage_chunk(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="small-model", messages=HELLO, max_tokens=2, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_a_completion_takes_text_or_token_ids(client: openai.OpenAI) -> None:
    by_text = client.completions.create(model="small-model", prompt="abc", max_tokens=5, seed=7)
    by_ids = client.completions.create(model="small-model", prompt=[97, 98, 99], max_tokens=5, seed=7)
    assert by_text.choices[0].text == by_ids.choices[0].text == expected_text([97, 98, 99], 5)
    assert by_text.id.startswith("cmpl-")


def test_a_completion_is_streamed(client: openai.OpenAI) -> None:
    chunks = client.completions.create(model="small-model", prompt="abc", max_tokens=5, seed=7, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected_text([97, 98, 99], 5)


def test_each_choice_has_its_own_noise(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="small-model", messages=HELLO, max_tokens=6, seed=7, n=3)
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [expected_text(chat_prompt("hello"), 6, choice=choice) for choice in range(3)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 18


def test_choices_are_streamed_side_by_side(client: openai.OpenAI) -> None:
    texts = ["", "", ""]
    ends: dict[int, str] = {}
    for chunk in client.chat.completions.create(
        model="small-model", messages=HELLO, max_tokens=6, seed=7, n=3, stream=True
    ):
        [choice] = chunk.choices
        assert choice.index not in ends
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert texts == [expected_text(chat_prompt("hello"), 6, choice=choice) for choice in range(3)]
    assert ends == {0: "length", 1: "length", 2: "length"}


def test_the_async_client_streams_and_collects(instance: Instance) -> None:
    async def both() -> tuple[str, str]:
        async with openai.AsyncOpenAI(
            base_url=f"{instance.url}/v1", api_key="none", max_retries=0, timeout=30
        ) as client:
            whole, stream = await asyncio.gather(
                client.chat.completions.create(model="small-model", messages=HELLO, max_tokens=9, seed=7),
                client.chat.completions.create(model="small-model", messages=HELLO, max_tokens=9, seed=7, stream=True),
            )
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content or "", "".join(parts)

    assert asyncio.run(both()) == (expected_text(chat_prompt("hello"), 9),) * 2


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small-model"]
    assert client.models.retrieve("small-model").id == "small-model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another/model")


def test_without_max_tokens_the_answer_fills_the_context(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="small-model", prompt=[1] * 250, seed=7)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 256 - 250


def test_the_models_end_token_ends_the_answer_and_is_not_shown(instance: Instance, client: openai.OpenAI) -> None:
    instance.engine.choose = lambda prompt, sampling, tokens: EOS if len(tokens) == 3 else 97
    ended = client.completions.create(model="small-model", prompt="x", max_tokens=6)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("aaa", "stop")
    assert ended.usage is not None and ended.usage.completion_tokens == 4
    ignored = client.completions.create(model="small-model", prompt="x", max_tokens=6, extra_body={"ignore_eos": True})
    assert (ignored.choices[0].text, ignored.choices[0].finish_reason) == ("aaaaa", "length")


def test_a_stop_string_ends_the_answer_before_it_and_the_engine_is_told_where(
    instance: Instance, client: openai.OpenAI
) -> None:
    text = b"one two three".ljust(200, b".")
    instance.engine.choose = lambda prompt, sampling, tokens: text[len(tokens)]
    answer = client.completions.create(model="small-model", prompt="x", max_tokens=200, stop=["thr", "zzz"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one two ", "stop")
    assert answer.usage is not None and answer.usage.completion_tokens == len("one two thr")
    request_id = answer.id.removeprefix("cmpl-") + "-0"
    instance.wait_until(lambda: request_id not in instance.engine.running)
    abort = next(one for one in instance.engine.aborts if one.request_id == request_id)
    assert (abort.reason, abort.num_tokens, abort.epoch) == ("stop", len("one two thr"), 1)


def test_a_stream_holds_back_what_may_become_a_stop_string(instance: Instance, client: openai.OpenAI) -> None:
    instance.engine.choose = lambda prompt, sampling, tokens: b"one twist"[len(tokens)]
    chunks = client.completions.create(model="small-model", prompt="x", max_tokens=9, stop="two", stream=True)
    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == "one twist"
    assert not any(text.endswith("t") for text in texts[:-1])


def test_a_character_is_never_split(instance: Instance, client: openai.OpenAI) -> None:
    instance.engine.choose = lambda prompt, sampling, tokens: "añ😀é".encode()[len(tokens)]
    chunks = client.completions.create(model="small-model", prompt="x", max_tokens=9, stream=True)
    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == "añ😀é"
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts)


def test_a_label_is_echoed_and_an_id_is_given_without_one(instance: Instance, client: openai.OpenAI) -> None:
    create = client.chat.completions.with_raw_response.create
    labelled = create(model="small-model", messages=HELLO, max_tokens=1, extra_headers={"X-Request-Id": "my label"})
    assert labelled.headers["x-request-id"] == "my label"
    assert instance.engine.submits[-1].client_request_id == "my label"
    unlabelled = create(model="small-model", messages=HELLO, max_tokens=1)
    assert instance.engine.submits[-1].client_request_id == ""
    assert unlabelled.parse().id == "chatcmpl-" + unlabelled.headers["x-request-id"]


def test_every_event_with_tokens_carries_a_cursor(client: openai.OpenAI) -> None:
    with client.chat.completions.with_streaming_response.create(
        model="small-model", messages=HELLO, max_tokens=5, seed=7, n=2, stream=True
    ) as response:
        lines = list(response.iter_lines())
    cursors = [parse_cursor(line.removeprefix("id: ")) for line in lines if line.startswith("id: ")]
    tokens: list[list[int]] = [[], []]
    for cursor in cursors:
        assert (cursor.seed, cursor.request_id) == (7, response.headers["x-request-id"])
        for choice, ids in cursor.new_tokens.items():
            tokens[choice] += ids
            assert cursor.choices[choice].position == len(tokens[choice])
    prompt = chat_prompt("hello")
    assert tokens == [expected_tokens(prompt, SamplingParams(seed=7, choice_index=c), 5) for c in range(2)]
    assert [choice.finish_reason for choice in cursors[-1].choices] == ["length", "length"]
    assert lines[-2:] == ["data: [DONE]", ""]


def test_the_messages_roles_names_and_parts_reach_the_template(instance: Instance, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="small-model",
        max_tokens=1,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b"},
            {"role": "tool", "tool_call_id": "t", "content": "c"},
        ],
    )
    submit = instance.engine.submits[-1]
    text = bytes(token for token in submit.prompt_token_ids if token < 256).decode()
    assert text == "system\nbe brief\nuser Ann\na\nassistant\nb\ntool\nc\nassistant\n"


def test_sampling_reaches_the_engine_as_it_was_sent(instance: Instance, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="small-model",
        messages=HELLO,
        max_completion_tokens=4,
        temperature=0.5,
        top_p=0.9,
        seed=-5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"7": -100, "3": 1.5},
        logprobs=True,
        top_logprobs=4,
        extra_body={
            "top_k": -1,
            "min_p": 0.1,
            "min_tokens": 2,
            "stop_token_ids": [65],
            "repetition_penalty": 1.5,
            "bad_words": ["no", " no", "q"],
            "prompt_logprobs": 1,
            "priority": -3,
            "cache_salt": "tenant",
            "deadline_ms": 60_000,
        },
    )
    submit = instance.engine.submits[-1]
    assert submit.sampling_params == SamplingParams(
        -5,
        0,
        0.5,
        0,
        0.9,
        0.1,
        4,
        2,
        (65, EOS),
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias=((3, 1.5), (7, -100.0)),
        bad_words=((*b"no",), (*b" no",), (*b"q",), (*b" q",)),
        logprobs=4,
        prompt_logprobs=1,
    )
    assert (submit.priority, submit.cache_salt) == (-3, "tenant")
    assert submit.deadline_in_s is not None and 50 < submit.deadline_in_s <= 60


def test_a_label_that_is_in_use_is_a_409_and_free_again_afterwards(instance: Instance, client: openai.OpenAI) -> None:
    label = {"X-Request-Id": "twice"}
    instance.engine.paused = True
    stream = client.completions.create(model="small-model", prompt="x", max_tokens=3, stream=True, extra_headers=label)
    with pytest.raises(openai.ConflictError) as refused:
        client.completions.create(model="small-model", prompt="x", extra_headers=label)
    assert (refused.value.code, refused.value.param) == ("conflict", "X-Request-Id")
    instance.engine.paused = False
    list(stream)
    assert client.completions.create(model="small-model", prompt="x", max_tokens=1, extra_headers=label).choices
