"""`/v1/responses/compact`: a conversation becomes the user's messages and a summary, from which it goes on."""

import asyncio
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types.responses import ResponseCompactionItem

from onward.api.response_schemas import CompactedResponseObject
from onward.proto.model import PreparedModel
from onward.web.openai_api.compaction import SUMMARY_REQUEST
from tests.api.instance import Instance, running
from tests.api.responses.reading import PATH, body_of, speak_until
from tests.api.responses.test_behind_router import _is, run, until
from tests.api.test_roles import keyed, post
from tests.api.thinking_model import speak, tokens_of
from tests.router.harness import Router

COMPACT = f"{PATH}/compact"
MODEL = "small-model"
SUMMARY = "it was about lighthöuses"
TALK: list[Any] = [
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "an answer"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "a result"},
    {"role": "user", "content": [{"type": "input_text", "text": "second"}]},
]


def prompt_of(instance: Instance) -> str:
    return bytes(token for token in instance.engine.submits[-1].prompt_token_ids if token < 256).decode()


def check_compacted(fields: dict[str, Any], user_texts: list[str]) -> dict[str, Any]:
    """The compaction item of an answer with these messages of the user."""
    assert msgspec.to_builtins(msgspec.convert(fields, CompactedResponseObject)) == fields, "as /openapi.json says"
    assert fields["object"] == "response.compaction" and fields["usage"]["output_tokens"] > 0
    *kept, item = fields["output"]
    assert [(one["role"], one["content"][0]["text"]) for one in kept] == [("user", text) for text in user_texts]
    assert len({one["id"] for one in fields["output"]}) == len(fields["output"])
    ResponseCompactionItem.model_validate(item, strict=True)
    return item


def test_a_conversation_goes_on_from_its_compacted_form(keeper: Instance, client: openai.OpenAI) -> None:
    speak(keeper, tokens_of(SUMMARY))
    compacted = client.responses.compact(model=MODEL, input=TALK, instructions="be brief")  # type: ignore[call-overload]
    asked = prompt_of(keeper)
    assert all(text in asked for text in ("be brief", "first", "an answer", "a result", "second", SUMMARY_REQUEST))
    # The package's types have no user's messages here, although its documentation says that they are returned.
    fields: dict[str, Any] = compacted.to_dict(warnings=False)
    check_compacted(fields, ["first", "second"])
    speak(keeper, tokens_of("on"))
    items: Any = [*fields["output"], {"role": "user", "content": "third"}]
    answer = client.responses.create(model=MODEL, input=items)
    shown = prompt_of(keeper)
    assert answer.output_text == "on"
    assert all(text in shown for text in ("first", "second", SUMMARY, "third"))
    assert "an answer" not in shown and "a result" not in shown and SUMMARY_REQUEST not in shown


def test_a_compacted_conversation_can_be_compacted_again(keeper: Instance, http: httpx.Client) -> None:
    speak(keeper, tokens_of(SUMMARY))
    first = http.post(COMPACT, json={"model": MODEL, "input": TALK}).json()["output"]
    speak(keeper, tokens_of("shorter"))
    again = http.post(COMPACT, json={"model": MODEL, "input": [*first, {"role": "user", "content": "third"}]}).json()
    assert SUMMARY in prompt_of(keeper)
    check_compacted(again, ["first", "second", "third"])
    assert [item["type"] for item in again["output"]].count("compaction") == 1


def test_the_items_of_a_stored_response_are_compacted(keeper: Instance, http: httpx.Client) -> None:
    speak(keeper, tokens_of("né, wörds"))
    earlier = http.post(PATH, json=body_of("words", input="before")).json()["id"]
    speak(keeper, tokens_of(SUMMARY))
    body = {"model": MODEL, "previous_response_id": earlier}
    check_compacted(http.post(COMPACT, json=body).json(), ["before"])
    assert "né, wörds" in prompt_of(keeper)
    check_compacted(http.post(COMPACT, json=body | {"input": "after"}).json(), ["before", "after"])


@pytest.mark.parametrize("said", ["", " \n"])
def test_without_a_summary_nothing_is_compacted(keeper: Instance, http: httpx.Client, said: str) -> None:
    """A client would drop its conversation for it."""
    speak(keeper, tokens_of(said))
    refused = http.post(COMPACT, json={"model": MODEL, "input": TALK})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_summary")


def test_a_summary_that_was_cut_is_refused(keeper: Instance, http: httpx.Client) -> None:
    speak(keeper, tokens_of(SUMMARY))
    refused = http.post(COMPACT, json={"model": MODEL, "input": TALK, "max_output_tokens": 4})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_summary")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [*TALK, 7]}, "input[5]"),
        ({"input": [{"type": "compaction"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAAA"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction", "encrypted_content": "onward1._w=="}]}, "input[0].encrypted_content"),
        ({"stream": True}, "stream"),
        ({"store": True}, "store"),
        ({"onward_context": []}, "onward_context"),
        ({"temperature": 9}, "temperature"),
        ({"previous_response_id": 7}, "previous_response_id"),
    ],
)
def test_a_wrong_field_is_named(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    refused = http.post(COMPACT, json={"model": MODEL, "input": TALK} | fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_the_response_of_another_caller_is_not_compacted(thinker: PreparedModel) -> None:
    with keyed(thinker) as instance:
        speak(instance, tokens_of("secret"))
        earlier = post(instance, PATH, body_of("words"), "user").json()["id"]
        body = {"model": MODEL, "previous_response_id": earlier}
        assert post(instance, COMPACT, body, "user").status_code == 200
        for name in ("other", None):
            assert post(instance, COMPACT, body, name).status_code == (404 if name else 401)


def test_a_router_compacts_although_an_instance_is_killed(thinker: PreparedModel) -> None:
    tokens = tokens_of(SUMMARY)
    with running(thinker, name="a") as one, running(thinker, name="b") as other:
        pair = [one, other]

        async def scenario(router: Router) -> None:
            for instance in pair:
                speak_until(instance, 6, tokens)
            asking = asyncio.create_task(router.post({"model": MODEL, "input": TALK}, path=COMPACT))
            await until(lambda: _is(any(instance.engine.paused for instance in pair)))
            [victim] = [instance for instance in pair if instance.engine.paused]
            for instance in pair:
                speak(instance, tokens)
            await asyncio.to_thread(victim.kill_api, victim.children[0])
            item = check_compacted((await asking).json, ["first", "second"])
            [survivor] = [instance for instance in pair if instance is not victim]
            assert survivor.engine.submits[-1].generated_token_ids, "it has gone on, and not begun again"
            speak(survivor, tokens_of("on"))
            again = await router.post({"model": MODEL, "input": [item, *TALK[:1]]}, path=PATH)
            assert again.status == 200 and SUMMARY in prompt_of(survivor)
            victim.engine.paused = False

        run(pair, scenario)


def test_conversations_are_refused_with_what_to_use_instead(two: list[Instance], http: httpx.Client) -> None:
    refused = http.post(PATH, json=body_of("words", conversation="conv_1")).json()["error"]
    assert refused["param"] == "conversation" and "previous_response_id" in refused["message"]

    async def scenario(router: Router) -> None:
        for path in ("/v1/conversations", "/v1/conversations/conv_1/items"):
            unknown = await router.post({}, path=path)
            assert unknown.status == http.post(path, json={}).status_code == 404
            assert "previous_response_id" in unknown.json["error"]["message"]

    run(two, scenario)
