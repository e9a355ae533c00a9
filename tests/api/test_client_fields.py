"""What clients can ask for beside the usual, by the openai package: each field does what it says, streamed and not."""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.stream_formatters import mean_logprob
from onward.config import ApiConfig
from onward.proto.engine import ErrorInfo
from onward.proto.model import SamplingDefaults
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import TokenLogprobs
from tests.api import small_model
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.routed import attempt_of, given, hear
from tests.api.small_model import EOS, IM_START, chat_prompt
from tests.api.stand_in_engine import expected_tokens

HELLO = [{"role": "user", "content": "hello"}]
TEMPLATE = small_model.TEMPLATE.replace(
    "{{ '<|im_start|>assistant\n' }}",
    "{{ mood }}{{ reasoning_effort }}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
)


def made(prompt: list[int], count: int, choice: int = 0) -> str:
    return bytes(expected_tokens(prompt, SamplingParams(seed=7, choice_index=choice), count)).decode()


def complete(client: openai.OpenAI, streaming: bool = False, **fields: Any) -> list[dict[str, Any]]:
    """The choices, put together where they come in chunks."""
    own = {"extra_body": fields.pop("extra_body", {})}
    asked = {"model": "small-model", "max_tokens": 5, "seed": 7} | fields
    if not streaming:
        return [one.model_dump() for one in client.completions.create(**asked, **own).choices]
    choices: dict[int, dict[str, Any]] = {}
    for chunk in client.completions.create(**asked, **own, stream=True):
        for one in chunk.choices:
            told = choices.setdefault(one.index, {"index": one.index, "text": "", "tokens": []})
            told["text"] += one.text
            told["tokens"] += one.logprobs.tokens if one.logprobs else []
            told["finish_reason"] = one.finish_reason
    return [choices[index] for index in sorted(choices)]


STREAMING = pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])


@STREAMING
def test_several_prompts_are_answered_side_by_side(client: openai.OpenAI, streaming: bool) -> None:
    for prompts in (["abc", "de"], [[*b"abc"], [*b"de"]]):
        choices = complete(client, streaming, prompt=prompts, n=2)
        assert [one["index"] for one in choices] == [0, 1, 2, 3]
        assert [one["text"] for one in choices] == [
            made(list(prompt), 5, index) for index, prompt in enumerate([b"abc", b"abc", b"de", b"de"])
        ], "the choices of the first prompt, then those of the second, each with noise of its own"


def test_prompts_count_once_each_and_all_outputs_count(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="small-model", prompt=["abc", "de"], n=2, max_tokens=5)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 20)
    assert answer.usage.prompt_tokens_details.cached_tokens == 6


def test_as_many_choices_as_a_cursor_can_name_are_made(client: openai.OpenAI) -> None:
    assert len(complete(client, True, prompt=["x"] * 128, max_tokens=1)) == 128
    assert len(complete(client, prompt=["x"] * 8, n=16, max_tokens=1)) == 128


@STREAMING
def test_echo_puts_the_prompt_in_front(client: openai.OpenAI, streaming: bool) -> None:
    for prompt in ("où", [*"où".encode()]):
        [choice] = complete(client, streaming, prompt=prompt, echo=True)
        assert choice["text"] == "où" + made([*"où".encode()], 5)


@STREAMING
@pytest.mark.parametrize("logprobs", [None, 1])
def test_echo_keeps_special_tokens_of_token_prompts_and_of_strings(
    client: openai.OpenAI, streaming: bool, logprobs: int | None
) -> None:
    scores = {} if logprobs is None else {"logprobs": logprobs}
    as_ids, as_text = (
        complete(client, streaming, prompt=prompt, echo=True, **scores)[0] for prompt in ([97, EOS, 98], "a<|im_end|>b")
    )
    assert as_ids["text"] == "a<|im_end|>b" + made([97, EOS, 98], 5) == as_text["text"]
    if logprobs is not None and not streaming:
        assert as_ids["logprobs"]["text_offset"][:4] == [0, 1, 11, 12] == as_text["logprobs"]["text_offset"][:4]


@STREAMING
def test_echo_with_logprobs_tells_those_of_the_prompt(client: openai.OpenAI, streaming: bool) -> None:
    choices = complete(client, streaming, prompt=["ab", "c"], echo=True, logprobs=1, n=2)
    texts = [text + made(list(text.encode()), 5, index) for index, text in enumerate(["ab", "ab", "c", "c"])]
    assert [one["text"] for one in choices] == texts
    if streaming:
        assert [one["tokens"] for one in choices] == [list(text) for text in texts]
        return
    for one, text in zip(choices, texts, strict=True):
        logprobs = one["logprobs"]
        assert logprobs["tokens"] == list(text)
        assert logprobs["text_offset"] == list(range(len(text)))
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert None not in logprobs["token_logprobs"][1:] + logprobs["top_logprobs"][1:]


def test_a_prompt_is_not_echoed_to_a_client_that_brings_tokens(client: openai.OpenAI) -> None:
    so_far = expected_tokens([97], SamplingParams(seed=7), 2)
    [choice] = complete(client, prompt="a", echo=True, extra_body={"generated_token_ids": so_far})
    assert bytes(so_far).decode() + choice["text"] == made([97], 5)


def test_the_best_are_the_likeliest_by_their_mean_logprob(instance: Instance, client: openai.OpenAI) -> None:
    # The stand-in's logprobs fall with the position, so the shortest output is the likeliest.
    lengths = [4, 2, 3, 1, 3, 2]
    instance.engine.choose = lambda prompt, sampling, tokens: (
        EOS if len(tokens) + 1 == lengths[sampling.choice_index] else 97 + sampling.choice_index
    )
    best = client.completions.create(model="small-model", prompt=["x", "y"], n=2, best_of=3, max_tokens=9)
    assert [(one.index, one.text) for one in best.choices] == [(0, "b"), (1, "cc"), (2, ""), (3, "f")]
    assert all(one.logprobs is None for one in best.choices)
    assert best.usage is not None and best.usage.completion_tokens == sum(lengths)
    scored = client.completions.create(model="small-model", prompt=["x", "y"], best_of=3, max_tokens=9, logprobs=1)
    assert [one.text for one in scored.choices] == ["b", ""]
    assert scored.choices[0].logprobs is not None and len(scored.choices[0].logprobs.tokens or []) == 2


def test_equally_likely_ones_keep_their_order_and_nothing_is_the_least_likely() -> None:
    said = ChoiceUpdate(0, [1, 2], "", logprobs=[TokenLogprobs(-1.0, 1), TokenLogprobs(-2.0, 1)])
    assert mean_logprob(said) == -1.5
    assert mean_logprob(ChoiceUpdate(0, [], "")) == float("-inf")


@STREAMING
def test_what_ends_the_output_is_shown_where_asked_for(
    instance: Instance, client: openai.OpenAI, streaming: bool
) -> None:
    text = b"one two three".ljust(200, b".")
    instance.engine.choose = lambda prompt, sampling, tokens: text[len(tokens)]
    for more, shown in (
        ({"stop": ["two"]}, "one two"),
        ({"extra_body": {"stop_token_ids": [ord("w")]}}, "one tw"),
    ):
        extra = more.get("extra_body", {}) | {"include_stop_str_in_output": True}
        [choice] = complete(client, streaming, prompt="x", max_tokens=50, **(more | {"extra_body": extra}))
        assert (choice["text"], choice["finish_reason"]) == (shown, "stop")


def test_an_end_token_of_the_model_is_not_text(instance: Instance, client: openai.OpenAI) -> None:
    instance.engine.choose = lambda prompt, sampling, tokens: EOS if len(tokens) == 2 else 97
    [choice] = complete(client, prompt="x", extra_body={"include_stop_str_in_output": True})
    assert (choice["text"], choice["finish_reason"]) == ("aa", "stop")


def test_token_ids_are_returned_where_asked_for(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small-model", "max_tokens": 3, "seed": 7, "n": 2}
    asked["extra_body"] = {"return_token_ids": True}
    prompt = chat_prompt("hello")
    chat = client.chat.completions.create(messages=HELLO, **asked).model_dump()
    outputs = [expected_tokens(prompt, SamplingParams(seed=7, choice_index=choice), 3) for choice in range(2)]
    assert chat["prompt_token_ids"] == prompt
    assert [one["token_ids"] for one in chat["choices"]] == outputs
    chunks = [one.model_dump() for one in client.chat.completions.create(messages=HELLO, stream=True, **asked)]
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [prompt]
    streamed: list[list[int]] = [[], []]
    for [choice] in (chunk["choices"] for chunk in chunks):
        streamed[choice["index"]] += choice.get("token_ids", [])
    assert streamed == outputs
    texts = client.completions.create(prompt=["a", "b"], **asked).model_dump()["choices"]
    assert [one["prompt_token_ids"] for one in texts] == [[97], [97], [98], [98]]
    assert all(len(one["token_ids"]) == 3 for one in texts)


def test_token_ids_may_stand_instead_of_messages_or_a_prompt(instance: Instance, client: openai.OpenAI) -> None:
    ids = [5, IM_START, 7]
    client.chat.completions.create(model="small-model", messages=[], max_tokens=1, extra_body={"prompt_token_ids": ids})
    assert instance.engine.submits[-1].prompt_token_ids == ids
    client.completions.create(
        model="small-model", prompt=None, max_tokens=1, extra_body={"prompt_token_ids": [ids, [9]]}
    )
    assert [submit.prompt_token_ids for submit in instance.engine.submits[-2:]] == [ids, [9]]


def test_every_chunk_may_have_the_usage_so_far(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.chat.completions.create(
        model="small-model",
        messages=HELLO,
        max_tokens=6,
        n=2,
        stream=True,
        stream_options=options,
        extra_body={"return_token_ids": True},
    )
    *chunks, last = [chunk.model_dump() for chunk in stream]
    num_told = 0
    for chunk in chunks:
        num_told += sum(len(choice.get("token_ids", [])) for choice in chunk["choices"])
        usage = chunk["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(chat_prompt("hello")), num_told)
    assert num_told == last["usage"]["completion_tokens"] == 12


def test_chunks_may_have_the_usage_so_far_without_one_at_the_end(client: openai.OpenAI) -> None:
    options: Any = {"continuous_usage_stats": True}
    stream = client.completions.create(
        model="small-model", prompt="hi", max_tokens=4, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert all(chunk.choices and chunk.usage is not None for chunk in chunks)
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 4


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_stop_string_or_token_that_ended_an_output_is_named(instance: Instance, is_chat: bool) -> None:
    text = [*b"one two"]
    instance.engine.choose = lambda prompt, sampling, tokens: text[len(tokens)] if len(tokens) < len(text) else EOS
    prompt: dict[str, Any] = {"messages": HELLO} if is_chat else {"prompt": "hi"}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    ends: list[tuple[dict[str, Any], Any]] = [
        ({"stop": ["x", " tw"]}, " tw"),
        ({"stop_token_ids": [ord("t")]}, ord("t")),
        ({}, None),
        ({"max_tokens": 2}, None),
    ]
    for fields, matched in ends:
        body = {"model": "small-model", "max_tokens": 20, **prompt, **fields}
        answer = httpx.post(instance.url + path, json=body, timeout=60, verify=NO_CERTIFICATES)
        [whole] = answer.json()["choices"]
        assert (whole.get("stop_reason"), whole.get("matched_stop")) == (matched, matched)
        streamed = httpx.post(instance.url + path, json={**body, "stream": True}, timeout=60, verify=NO_CERTIFICATES)
        last = json.loads(streamed.text.split("\n\n")[-3].partition("data: ")[2])["choices"][0]
        assert (last.get("stop_reason"), last.get("matched_stop")) == (matched, matched)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_logprobs_may_name_tokens_by_their_ids(instance: Instance, path: str) -> None:
    chat = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    body = chat if "chat" in path else {"prompt": "hi", "logprobs": 2}
    body |= {"model": "small-model", "max_tokens": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    [choice] = httpx.post(instance.url + path, json=body, timeout=60, verify=NO_CERTIFICATES).json()["choices"]
    names = (
        [entry["token"] for entry in choice["logprobs"]["content"]] if "chat" in path else choice["logprobs"]["tokens"]
    )
    assert names == [f"token_id:{token_id}" for token_id in choice["token_ids"]]


@pytest.mark.parametrize("is_routed", [False, True])
def test_a_prompt_may_be_cut_to_its_last_tokens(instance: Instance, is_routed: bool) -> None:
    """Also where a router has made its tokens, and in every attempt."""
    prompt = [*range(97, 117)]
    body = {"model": "small-model", "prompt": prompt, "max_tokens": 4, "truncate_prompt_tokens": 5, "stream": True}
    if is_routed:
        attempt = attempt_of("/v1/completions", body, request_id=secrets.token_hex(16), prompt_token_ids=prompt)
        hear(instance.url, attempt)
        later = msgspec.structs.replace(attempt, attempt_epoch=attempt.attempt_epoch + 1, choices=given(([97], None)))
        assert hear(instance.url, later).facts[0].num_prompt_tokens == 5
    else:
        httpx.post(instance.url + "/v1/completions", json=body, timeout=60, verify=NO_CERTIFICATES)
    assert instance.engine.submits[-1].prompt_token_ids == prompt[-5:]


@pytest.mark.parametrize("is_routed", [False, True])
def test_a_prompt_may_be_cut_to_its_first_tokens(instance: Instance, is_routed: bool) -> None:
    prompt = [*range(97, 117)]
    body = {"model": "small-model", "prompt": prompt, "max_tokens": 4, "truncate_prompt_tokens": 5}
    body |= {"truncation_side": "right", "stream": True}
    if is_routed:
        hear(
            instance.url, attempt_of("/v1/completions", body, request_id=secrets.token_hex(16), prompt_token_ids=prompt)
        )
    else:
        httpx.post(instance.url + "/v1/completions", json=body, timeout=60, verify=NO_CERTIFICATES)
    assert instance.engine.submits[-1].prompt_token_ids == prompt[:5]


@pytest.mark.parametrize("is_routed", [False, True])
def test_a_prompt_may_be_cut_to_what_fits_and_stays_so_in_every_attempt(instance: Instance, is_routed: bool) -> None:
    """The context has 256 tokens. An instance with another one continues the prompt as the first one has cut it."""
    prompt = [97 + index % 26 for index in range(400)]
    body = {"model": "small-model", "prompt": prompt, "max_tokens": 6, "truncate_prompt_tokens": -1, "stream": True}
    if not is_routed:
        response = httpx.post(instance.url + "/v1/completions", json=body, timeout=60, verify=NO_CERTIFICATES)
        assert response.status_code == 200, response.text
    else:
        attempt = attempt_of("/v1/completions", body, request_id=secrets.token_hex(16))
        assert hear(instance.url, attempt).facts[0].max_prompt_tokens == 250
    assert instance.engine.submits[-1].prompt_token_ids == prompt[-250:]
    if is_routed:
        elsewhere = attempt_of("/v1/completions", body, request_id=secrets.token_hex(16), max_prompt_tokens=100)
        assert hear(instance.url, elsewhere).facts[0].num_prompt_tokens == 100


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_side_of_truncation_that_does_not_exist_is_refused(instance: Instance, path: str) -> None:
    prompt = {"messages": HELLO} if "chat" in path else {"prompt": "hi"}
    body = {"model": "small-model", **prompt, "truncate_prompt_tokens": 5, "truncation_side": "middle"}
    refused = httpx.post(instance.url + path, json=body, timeout=60, verify=NO_CERTIFICATES)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncation_side")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_text_of_any_length_may_be_cut(instance: Instance, path: str, side: str) -> None:
    """Also one that is refused without the field, as it could not fit into the context of 256 tokens."""
    text = "".join(map(str, range(40_000)))
    prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    body = {"model": "small-model", "max_tokens": 4, **prompt}
    refused = httpx.post(instance.url + path, json=body, timeout=60, verify=NO_CERTIFICATES)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    response = httpx.post(
        instance.url + path,
        json=body | {"truncate_prompt_tokens": 200, "truncation_side": side},
        timeout=60,
        verify=NO_CERTIFICATES,
    )
    assert response.json()["usage"]["prompt_tokens"] == 200, response.text
    cut = instance.engine.submits[-1].prompt_token_ids
    assert len(cut) == 200 and bytes(token_id for token_id in cut if token_id < 256).decode()[50:150] in text


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/generate", "/v1/responses", "/v1/messages"]
)
def test_the_engine_gets_the_only_tokens_that_are_allowed(instance: Instance, path: str) -> None:
    body = UNNAMED[path] | {"allowed_token_ids": [99, 97, 99]}
    response = httpx.post(instance.url + path, json=body, timeout=60, verify=NO_CERTIFICATES)
    assert response.status_code == 200, response.text
    assert instance.engine.submits[-1].sampling_params.allowed_token_ids == (97, 99)


UNNAMED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/generate": {"prompt_token_ids": [97], "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
}


@pytest.mark.parametrize("path", UNNAMED)
@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}])
def test_a_request_need_not_name_the_only_model(instance: Instance, path: str, named: dict[str, Any]) -> None:
    response = httpx.post(instance.url + path, json=UNNAMED[path] | named, timeout=60, verify=NO_CERTIFICATES)
    assert (response.status_code, response.json()["model"]) == (200, "small-model"), response.text


DEFAULTS: dict[str, Any] = {
    "store": True,
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "reasoning_effort": "medium",
    "modalities": ["text"],
    "prediction": None,
    "safety_identifier": "someone",
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "user": "me",
    "metadata": {"a": "b"},
    "logprobs": False,
    "verbosity": "medium",
    "tools": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "logit_bias": {},
    "stop": None,
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_clients_send_without_meaning_anything_by_it_changes_nothing(client: openai.OpenAI, name: str) -> None:
    def texts(**more: Any) -> list[str | None]:
        asked: dict[str, Any] = {"model": "small-model", "messages": HELLO, "max_tokens": 3, "seed": 7} | more
        return [one.message.content for one in client.chat.completions.create(**asked).choices]

    assert texts(**{name: DEFAULTS[name]}) == texts()


def test_a_stream_need_not_be_obfuscated(client: openai.OpenAI) -> None:
    for wanted in (True, False):
        stream = client.chat.completions.create(
            model="small-model",
            messages=HELLO,
            max_tokens=2,
            stream=True,
            stream_options={"include_obfuscation": wanted},
        )
        assert all(chunk.choices for chunk in stream)


def test_where_a_request_does_not_say_the_model_does(tmp_path: Path) -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.2)
    model = msgspec.structs.replace(small_model.prepare(tmp_path), sampling_defaults=defaults)
    with (
        running(model) as instance,
        openai.OpenAI(base_url=f"{instance.url}/v1", api_key="none", max_retries=0) as client,
    ):
        complete(client, prompt="x")
        said = instance.engine.submits[-1].sampling_params
        assert (said.temperature, said.top_p, said.top_k, said.min_p) == (0.6, 0.9, 20, 0.1)
        assert said.repetition_penalty == 1.2
        own = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        complete(client, prompt="x", temperature=0, top_p=1, extra_body=own)
        asked = instance.engine.submits[-1].sampling_params
        assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (0.0, 1.0, 0, 0.0)
        assert asked.repetition_penalty == 1.0


def test_of_the_best_that_were_given_up_nothing_is_told(instance: Instance, client: openai.OpenAI) -> None:
    given_up = ErrorInfo("pd_preempted", "PD Error: out of blocks", 503, True)
    instance.engine.give_up = lambda sampling, position: (
        given_up if (sampling.choice_index, position) == (1, 3) else None
    )
    with pytest.raises(openai.InternalServerError) as refused:
        client.completions.create(model="small-model", prompt="x", best_of=3, max_tokens=9)
    assert (refused.value.status_code, refused.value.code) == (503, "pd_preempted")
    instance.wait_until(lambda: not instance.engine.running)


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    model = small_model.prepare(Path(tmp_path_factory.mktemp("small-model")))
    config = ApiConfig(trust_request_chat_template=True)
    with running(msgspec.structs.replace(model, chat_template=TEMPLATE), config) as instance:
        yield instance


def rendered(trusting: Instance, messages: list[dict[str, Any]], **fields: Any) -> str:
    with openai.OpenAI(base_url=f"{trusting.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        client.chat.completions.create(
            model="small-model",
            messages=messages,  # pyright: ignore[reportArgumentType]
            max_tokens=1,
            extra_body=fields,
        )
    named = {EOS: "<e>", IM_START: "<s>"}
    return "".join(named.get(one) or chr(one) for one in trusting.engine.submits[-1].prompt_token_ids)


def test_templates_are_told_what_clients_say_to_them(trusting: Instance) -> None:
    plain = "<s>user\nhello<e>\n"
    assert rendered(trusting, HELLO) == plain + "<s>assistant\n"
    assert rendered(trusting, HELLO, add_generation_prompt=False) == plain
    assert rendered(trusting, HELLO, chat_template_kwargs={"mood": "!"}) == plain + "!<s>assistant\n"
    assert rendered(trusting, HELLO, reasoning_effort="low") == plain + "low<s>assistant\n"
    both = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "!", "messages": "no"}}
    assert rendered(trusting, HELLO, **both) == plain + "!<s>assistant\n", "said to the template directly"


@pytest.mark.parametrize("content", ["Once ", [{"type": "text", "text": "On"}, {"type": "text", "text": "ce "}]])
def test_the_last_message_may_be_left_open(trusting: Instance, content: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]
    expected = "Once " if isinstance(content, str) else "On\nce "
    open_ended = rendered(trusting, messages, continue_final_message=True)
    assert open_ended == f"<s>user\nhello<e>\n<s>assistant\n{expected}"


def test_a_client_may_bring_its_template_where_that_is_allowed(trusting: Instance) -> None:
    source = "{{ messages[0].content | upper }}{{ eos_token }}{{ mood }}"
    asked: dict[str, Any] = {"chat_template": source, "chat_template_kwargs": {"mood": "?"}}
    assert rendered(trusting, HELLO, **asked) == "HELLO<e>?"
    messages = [{"role": "assistant", "content": "so"}]
    assert (
        rendered(trusting, messages, chat_template="[{{ messages[0].content }}]", continue_final_message=True) == "[so"
    )


@pytest.mark.parametrize("source", ["{% for %}", "{{ raise_exception('no') }}", "x" * 70_000, "{{ 'x' * 10**9 }}"])
def test_a_template_that_does_not_work_is_named(trusting: Instance, source: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        rendered(trusting, HELLO, chat_template=source)
    assert refused.value.param == "chat_template"


def test_a_template_that_hides_the_last_message_cannot_leave_it_open(trusting: Instance) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        rendered(trusting, HELLO, chat_template="nothing", continue_final_message=True)
    assert refused.value.param == "continue_final_message"
