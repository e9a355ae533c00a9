"""`/tokenize` and `/detokenize`, at an instance and behind a router."""

from typing import Any

import httpx
import pytest
import uvloop

from onward.config import ApiConfig
from onward.proto.model import PreparedModel
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.small_model import EOS, IM_START, chat_prompt
from tests.router.harness import running_router

HELLO = [{"role": "user", "content": "hello"}]


def ask(instance: Instance, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(instance.url + path, json=fields, timeout=30, verify=NO_CERTIFICATES)


def test_a_text_has_token_ids(instance: Instance) -> None:
    answer = ask(instance, "/tokenize", model="small-model", prompt="é<|im_end|>")
    assert answer.json() == {
        "count": 3,
        "max_model_len": 256,
        "tokens": [*"é".encode(), EOS],
        "token_strs": None,
    }
    assert ask(instance, "/tokenize", prompt="", add_special_tokens=False).json()["tokens"] == []


def test_tokens_have_texts_where_asked_for(instance: Instance) -> None:
    shown = ask(instance, "/tokenize", prompt="aé<|im_end|>", return_token_strs=True).json()["token_strs"]
    assert shown == ["a", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}", "<|im_end|>"]


def test_a_chat_has_those_of_its_prompt(instance: Instance) -> None:
    assert ask(instance, "/tokenize", messages=HELLO).json()["tokens"] == chat_prompt("hello")
    open_ended = ask(instance, "/tokenize", messages=HELLO, continue_final_message=True).json()["tokens"]
    assert open_ended == [IM_START, *b"user\nhello"]


def test_token_ids_become_text_again_special_ones_too(instance: Instance) -> None:
    answer = ask(instance, "/detokenize", model="small-model", tokens=[*"né".encode(), EOS])
    assert answer.json() == {"prompt": "né<|im_end|>"}
    assert ask(instance, "/detokenize", tokens=[]).json() == {"prompt": ""}


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": HELLO}, "messages"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("/tokenize", {"messages": HELLO, "chat_template": "x"}, "chat_template"),
    ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [320]}, "tokens[0]"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
]


@pytest.mark.parametrize(("path", "fields", "param"), BAD, ids=str)
def test_what_is_wrong_is_named(instance: Instance, path: str, fields: dict[str, Any], param: str) -> None:
    answer = ask(instance, path, **fields)
    assert answer.status_code == (404 if param == "model" else 400)
    error = answer.json()["error"]
    assert error["param"] == param or (error["param"] is None and param in error["message"])


def test_a_router_passes_questions_on_and_answers_too(model: PreparedModel) -> None:
    key = "ab" * 32

    async def scenario(instance: Instance) -> None:
        async with running_router(instances=instance.url, cluster_key=key, settle_s=4.0) as router:
            serving = router.process.stream_runner
            while not serving.core.can_serve(serving.clock.now_s()):
                await serving.wait_for_change(5.0)
            answer = await router.post({"prompt": "ab"}, path="/tokenize")
            assert (answer.status, answer.json["tokens"]) == (200, [97, 98])
            answer = await router.post({"tokens": [97]}, path="/detokenize")
            assert (answer.status, answer.json) == (200, {"prompt": "a"})
            refused = await router.post({"tokens": [999]}, path="/detokenize")
            assert (refused.status, refused.json["error"]["param"]) == (400, "tokens[0]")
            told = await router.get("/openapi.json")
            assert told.status == 200 and "/tokenize" in told.json["paths"]

    with running(model, ApiConfig(cluster_key=key)) as instance:
        uvloop.run(scenario(instance))


def test_special_tokens_and_template_are_shown_where_the_operator_allows_it(model: PreparedModel) -> None:
    key = "ab" * 32

    async def scenario(instance: Instance) -> None:
        async with running_router(instances=instance.url, cluster_key=key, settle_s=4.0) as router:
            serving = router.process.stream_runner
            while not serving.core.serving_instances(serving.clock.now_s()):
                await serving.wait_for_change(5.0)
            shown = await router.get("/tokenizer_info")
            direct = httpx.get(instance.url + "/tokenizer_info", timeout=30, verify=NO_CERTIFICATES).json()
            assert shown.json == direct
            assert (await router.get("/tokenizer_info?model=small-model")).json == direct
            assert (await router.get("/tokenizer_info?model=other")).status == 404
            assert (direct["eos_token"], direct["chat_template"]) == (model.eos_token, model.chat_template)
            assert (direct["model"], direct["vocab_size"]) == ("small-model", model.config.vocab_size)

    with running(model, ApiConfig(cluster_key=key, tokenizer_info=True)) as instance:
        uvloop.run(scenario(instance))


def test_a_template_is_not_shown_unless_the_operator_allows_it(instance: Instance) -> None:
    response = httpx.get(instance.url + "/tokenizer_info", timeout=30, verify=NO_CERTIFICATES)
    assert response.status_code == 404
    assert "--tokenizer-info" in response.json()["error"]["message"]


def test_a_router_without_instances_says_so() -> None:
    async def scenario() -> None:
        async with running_router(settle_s=0.0) as router:
            answer = await router.post({"prompt": "ab"}, path="/tokenize")
            assert (answer.status, answer.json["error"]["code"]) == (503, "unavailable")

    uvloop.run(scenario())
