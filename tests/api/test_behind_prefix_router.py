"""A real router in front of a real api process: that the router tokenizes shows in nothing that a client can read."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvloop

from tests.api import small_model
from tests.api.instance import Instance, running
from tests.api.reader import read
from tests.router.harness import CHAT, Answer, running_router

COMPLETIONS, GENERATE = "/v1/completions", "/v1/generate"
TEMPLATE = (
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ word }}{{ reasoning_effort }}"
    "{{ enable_thinking }}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    + small_model.TEMPLATE
    + "{% if not add_generation_prompt %}…{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]
CUSTOM = {"type": "custom", "custom": {"name": "p", "format": {"type": "text"}}}
TOOL = {"type": "function", "function": {"name": "weather"}}
MANY = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "first ÿ"}, {"type": "text", "text": "second"}]},
    {"role": "assistant", "content": "…", "unknown": 7},
    {"role": "user", "content": "<|im_end|> and so on"},
]  # fmt: skip
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}

Cases = dict[str, tuple[str, dict[str, Any]]]
ANSWERED: Cases = {
    "a chat, whole": (CHAT, {"messages": HELLO}),
    "a chat, streamed": (CHAT, {"messages": HELLO, **WITH_USAGE}),
    "many messages, several choices": (CHAT, {"messages": MANY, "n": 3, "temperature": 1.0, **WITH_USAGE}),
    "with logprobs": (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 2}),
    "with prompt logprobs": (CHAT, {"messages": HELLO, "prompt_logprobs": 1}),
    "a text, whole": (COMPLETIONS, {"prompt": "once upon a time", "logprobs": 1, "prompt_logprobs": 1}),
    "a text, streamed": (COMPLETIONS, {"prompt": "once <|im_start|>upon\n", "n": 2, **WITH_USAGE}),
    "a text, continued": (COMPLETIONS, {"prompt": "once", "generated_token_ids": [97, 98]}),
    "a chat, continued": (CHAT, {"messages": HELLO, "n": 2, "generated_token_ids": [[97], [98]], **WITH_USAGE}),
    "token ids": (COMPLETIONS, {"prompt": [97, 98, 99]}),
    "only token ids": (GENERATE, {"prompt_token_ids": [97, 98, 99], **WITH_USAGE}),
    "an open message": (CHAT, {"messages": HELLO, "continue_final_message": True}),
    "words for the template": (
        CHAT,
        {"messages": HELLO, "chat_template_kwargs": {"word": "ÿ"}, "reasoning_effort": "low"},
    ),
    "tools": (CHAT, {"messages": HELLO, "tools": [TOOL], "parallel_tool_calls": False, **WITH_USAGE}),
    "custom tools": (CHAT, {"messages": HELLO, "tools": [TOOL, CUSTOM]}),
    "functions": (CHAT, {"messages": HELLO, "functions": [TOOL["function"]], "function_call": "auto"}),
    "functions that are not to be called": (
        CHAT,
        {"messages": HELLO, "functions": [TOOL["function"]], "function_call": "none"},
    ),
    "an older call, its result and a role of the client's own": (
        CHAT,
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
                {"role": "function", "name": "f", "content": "5"},
                {"role": "critic", "content": "x"},
            ]
        },
    ),
    "echo of a chat": (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "so"}], "echo": True}),
    "cut from the right": (
        CHAT,
        {"messages": HELLO, "truncate_prompt_tokens": 9, "truncation_side": "right", "return_token_ids": True},
    ),
    "tools that are not to be called": (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": "none"}),
    "no thinking": (CHAT, {"messages": HELLO, "reasoning_effort": "none"}),
    "no beginning of an answer": (CHAT, {"messages": HELLO, "add_generation_prompt": False}),
    "a chat of token ids": (CHAT, {"messages": [], "prompt_token_ids": [97, 98], "return_token_ids": True}),
    "echo": (COMPLETIONS, {"prompt": "once", "echo": True, "logprobs": 1, **WITH_USAGE}),
    "a stop string": (CHAT, {"messages": HELLO, "stop": ["e", "t"], "max_tokens": 60}),
}
PASSED_ON: Cases = {
    "several prompts": (COMPLETIONS, {"prompt": ["one", "two"], "n": 2, "return_token_ids": True}),
    "several prompts, streamed": (COMPLETIONS, {"prompt": [[97], [98, 99]], "echo": True, "logprobs": 0, **WITH_USAGE}),
    "several prompts, continued": (
        COMPLETIONS,
        {"prompt": ["one", "two"], "generated_token_ids": [[97], [98, 99]], **WITH_USAGE},
    ),
    "cut to what fits": (CHAT, {"messages": HELLO, "truncate_prompt_tokens": -1, "return_token_ids": True}),
    "the best of several": (COMPLETIONS, {"prompt": ["one", "two"], "best_of": 3}),
}
REFUSED: Cases = {
    "no messages": (CHAT, {"messages": []}),
    "messages that are none": (CHAT, {"messages": "hello"}),
    "a role that is none": (CHAT, {"messages": [{"role": "a king", "content": "hello"}]}),
    "no content": (CHAT, {"messages": [{"role": "user"}]}),
    "what the template refuses": (CHAT, {"messages": [{"role": "tool", "content": "x"}]}),
    "a tool that is none": (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}),
    "a custom tool that is none": (CHAT, {"messages": HELLO, "tools": [{"type": "custom"}]}),
    "a format that is none": (
        CHAT,
        {"messages": HELLO, "tools": [{"type": "custom", "custom": {"name": "p", "format": {"type": "x"}}}]},
    ),
    "a choice among no tools": (CHAT, {"messages": HELLO, "tool_choice": "required"}),
    "calls that are none": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "x", "function": 5}]}]}),
    "a picture": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}),
    "too long a chat": (CHAT, {"messages": [{"role": "user", "content": "long " * 60}]}),
    "too long an answer": (CHAT, {"messages": HELLO, "max_tokens": 250}),
    "another model": (CHAT, {"messages": HELLO, "model": "another"}),
    "an empty text": (COMPLETIONS, {"prompt": ""}),
    "too long a text": (COMPLETIONS, {"prompt": "long " * 60}),
    "too many token ids": (GENERATE, {"prompt_token_ids": [97] * 300}),
    "a template of its own": (CHAT, {"messages": HELLO, "chat_template": "x"}),
    "one of several prompts": (COMPLETIONS, {"prompt": ["one", ""]}),
    "a field that is wrong": (COMPLETIONS, {"prompt": "once", "temperature": 9}),
    "both wrong": (CHAT, {"messages": [{"role": "tool", "content": "x"}], "temperature": 9}),
}


@pytest.fixture
def tokenizing_instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    model = small_model.prepare(Path(tmp_path_factory.mktemp("small-model")))
    with running(msgspec.structs.replace(model, chat_template=TEMPLATE)) as instance:
        yield instance


def body_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "small-model", "seed": 7, "max_tokens": 12} | fields


async def asked(instance: Instance, policy: str, cases: Cases) -> tuple[dict[str, Answer], str]:
    """The answers by their cases, and the router's metrics after them."""
    async with running_router(instances=instance.url, policy=policy, settle_s=4.0) as router:
        serving = router.process.stream_runner
        while not serving.core.can_serve(serving.clock.now_s()):
            await serving.wait_for_change(5.0)
        answers = {name: await router.post(body_of(fields), path=path) for name, (path, fields) in cases.items()}
        return answers, (await router.get("/metrics")).body.decode()


def comparable(answer: Answer, fields: dict[str, Any]) -> Any:
    """Without what is new for each request (its id, and the second it came in), nor how a stream was cut into events."""
    if answer.status == 200 and fields.get("stream"):
        streamed = read(httpx.Response(200, content=answer.body), fields)
        return streamed.choices, streamed.usage, streamed.cursor and streamed.cursor.choices
    text = re.sub(r"[0-9a-f]{32}", "ID", answer.body.decode())
    return answer.status, re.sub(r'"created":\d+', '"created":0', text)


def compared(instance: Instance, cases: Cases) -> tuple[dict[str, Answer], str]:
    """What comes behind `prefix`, after a look that the same comes behind `least_loaded`."""
    plain, _ = uvloop.run(asked(instance, "least_loaded", cases))
    tokenized, metrics = uvloop.run(asked(instance, "prefix", cases))
    for name, (_, fields) in cases.items():
        assert comparable(tokenized[name], fields) == comparable(plain[name], fields), name
    return tokenized, metrics


def counted(metrics: str, name: str) -> int:
    return sum(int(float(value)) for value in re.findall(rf"^{re.escape(name)} (\S+)$", metrics, re.MULTILINE))


def test_answers_are_the_same_whoever_tokenizes(tokenizing_instance: Instance) -> None:
    answers, metrics = compared(tokenizing_instance, ANSWERED)
    assert {answer.status for answer in answers.values()} == {200}
    prompts = [fields.get("messages") or fields.get("prompt") for _, fields in ANSWERED.values()]
    num_texts = sum(isinstance(prompt, str) or isinstance((prompt or [None])[0], dict) for prompt in prompts)
    assert counted(metrics, "onward_router_tokenize_seconds_count") == num_texts
    assert "onward_router_untokenized_total{" not in metrics
    submits = tokenizing_instance.engine.submits
    plain, tokenized = submits[: len(submits) // 2], submits[len(submits) // 2 :]
    assert [one.prompt_token_ids for one in plain] == [one.prompt_token_ids for one in tokenized]


def test_several_prompts_and_those_cut_to_what_fits_are_tokenized_by_the_instance(
    tokenizing_instance: Instance,
) -> None:
    answers, metrics = compared(tokenizing_instance, PASSED_ON)
    assert {answer.status for answer in answers.values()} == {200}
    assert counted(metrics, 'onward_router_untokenized_total{reason="refused"}') == len(PASSED_ON)


def test_what_is_refused_is_refused_in_the_same_words(tokenizing_instance: Instance) -> None:
    answers, metrics = compared(tokenizing_instance, REFUSED)
    assert {answer.status for answer in answers.values()} == {400, 404}
    assert counted(metrics, 'onward_router_untokenized_total{reason="refused"}') > 0
