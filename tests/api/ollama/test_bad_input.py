"""What Ollama's API cannot be asked for is refused in Ollama's form, and the error names the client's own field."""

from typing import Any

import httpx
import pytest

from onward.config import ApiConfig
from onward.proto.model import PreparedModel
from tests.api.instance import Instance, running
from tests.api.ollama.reading import CHAT, GENERATE, MODEL, error_of
from tests.api.test_roles import get, keyed, post
from tests.api.thinking_model import TOOL, speak, tokens_of

HI = {"role": "user", "content": "hi"}
CALLS = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}

WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 9}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"top_p": 2}, "top_p"),
    ({"min_p": -1}, "min_p"),
    ({"seed": 1.5}, "seed"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": 7}, "stop"),
    ({"num_predict": 0}, "num_predict"),
    ({"num_predict": -3}, "num_predict"),
    ({"num_predict": True}, "num_predict"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"mirostat": 1}, "mirostat"),
    ({"typical_p": 0.5}, "typical_p"),
    ({"tfs_z": 0.5}, "tfs_z"),
    ({"penalize_newline": False}, "penalize_newline"),
    ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    *((CHAT, {"options": options}, f"options.{name}") for options, name in WRONG_OPTIONS),
    *((GENERATE, {"options": options}, f"options.{name}") for options, name in WRONG_OPTIONS),
    (CHAT, {"options": 7}, "options"),
    (CHAT, {"messages": [HI | {"role": 5}]}, "messages[0].role"),
    (CHAT, {"messages": [HI, HI | {"content": 7}]}, "messages[1].content"),
    (CHAT, {"messages": [HI | {"images": ["aGk="]}]}, "messages[0].images"),
    (CHAT, {"messages": [CALLS | {"role": "user"}]}, "messages[0].tool_calls"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (CHAT, {"tools": ["f"]}, "tools[0]"),
    (CHAT, {"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
    (CHAT, {"tools": [{"type": "other", "function": {"name": "f"}}]}, "tools[0].type"),
    (CHAT, {"format": "xml"}, "format"),
    (CHAT, {"format": {"type": "odd"}}, "format"),
    (CHAT, {"think": "much"}, "think"),
    (CHAT, {"shift": True}, "shift"),
    (CHAT, {"keep_alive": []}, "keep_alive"),
    (CHAT, {"stream": "yes"}, "stream"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    (CHAT, {"deadline_ms": 0}, "deadline_ms"),
    (GENERATE, {"suffix": "end"}, "suffix"),
    (GENERATE, {"template": "{{ .Prompt }}"}, "template"),
    (GENERATE, {"context": [1, 2]}, "context"),
    (GENERATE, {"images": ["aGk="]}, "images"),
    (GENERATE, {"raw": True, "system": "be brief"}, "system"),
    (GENERATE, {"raw": True, "think": True}, "think"),
    (GENERATE, {"raw": True, "logprobs": True}, "logprobs"),
    (GENERATE, {"prompt": "word " * 2000}, "prompt"),
    (GENERATE, {"format": {"type": "odd"}}, "format"),
    ("/api/embed", {"input": 7}, "input"),
    ("/api/embed", {"input": ["a", 7]}, "input[1]"),
    ("/api/embed", {"dimensions": 0}, "dimensions"),
    ("/api/embed", {"options": {"mirostat": 1}}, "options.mirostat"),
    ("/api/show", {"model": None}, "model"),
]
COMPLETE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HI]},
    GENERATE: {"prompt": "hi"},
    "/api/embed": {"input": "hi"},
    "/api/show": {},
}


@pytest.mark.parametrize(("path", "fields", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_field_is_named(http: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:
    refused = http.post(path, json={"model": MODEL} | COMPLETE[path] | fields)
    assert refused.status_code == 400, refused.text
    assert error_of(refused).startswith(f"{param}: ")


def test_every_refusal_has_ollama_s_form(http: httpx.Client) -> None:
    json_type = {"content-type": "application/json"}
    refusals = {
        404: [
            http.post(CHAT, json={"model": "other", "messages": [HI]}),
            http.post("/api/show", json={"model": "other"}),
            http.post("/api/pull", json={"model": "other"}),
        ],
        400: [http.post(CHAT, content=b"{", headers=json_type), http.post(GENERATE, json={"prompt": "hi"})],
        405: [http.get(CHAT), http.post("/api/tags", json={})],
        415: [http.post(CHAT, content=b"x", headers={"content-type": "text/plain"})],
    }
    for status, some in refusals.items():
        assert [(refused.status_code, bool(error_of(refused))) for refused in some] == [(status, True)] * len(some)


def test_a_key_is_required_and_its_absence_has_ollama_s_form(thinker: PreparedModel) -> None:
    with keyed(thinker) as instance:
        for path in ("/api/tags", "/api/ps", "/api/version"):
            refused = get(instance, path)
            assert (refused.status_code, bool(error_of(refused))) == (401, True)
        refused = post(instance, CHAT, {"model": MODEL, "messages": [HI]})
        assert (refused.status_code, bool(error_of(refused))) == (401, True)


def test_what_changes_nothing_is_accepted(keeper: Instance, http: httpx.Client) -> None:
    speak(keeper, tokens_of("ok"))
    options = {
        "num_batch": 5, "num_gpu": 1, "main_gpu": 0, "num_thread": 2, "use_mmap": True, "low_vram": False,
        "num_keep": 4, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "typical_p": 1.0, "tfs_z": 1.0,
        "penalize_newline": True, "repeat_last_n": 64, "repeat_penalty": 1.0, "num_predict": -1, "seed": -1,
        "numa": False, "use_mlock": False, "f16_kv": True, "vocab_only": False, "logits_all": False, "top_k": None,
    }  # fmt: skip
    fields = {"options": options, "keep_alive": "5m", "truncate": True, "shift": False, "tools": [], "format": ""}
    answer = http.post(CHAT, json={"model": MODEL, "messages": [HI | {"images": []}], "stream": False} | fields)
    assert answer.status_code == 200 and "x-onward-ignored-fields" not in answer.headers, answer.text


@pytest.mark.parametrize("path", [CHAT, GENERATE, "/api/embed"])
def test_unknown_fields_are_reported_by_their_own_names(keeper: Instance, http: httpx.Client, path: str) -> None:
    """`temperature` is a field of chats, and no field of Ollama's requests: it must not take effect."""
    speak(keeper, tokens_of("ok"))
    fields = {"odd": 1, "temperature": 9, "options": {"num_ctx": 512, "strange": 1}}
    answer = http.post(path, json={"model": MODEL} | COMPLETE[path] | fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-onward-ignored-fields"] == "odd, options.num_ctx, options.strange, temperature"


def test_unknown_fields_are_refused_where_the_operator_wants_that(thinker: PreparedModel) -> None:
    with running(thinker, ApiConfig(strict_fields=True)) as instance:
        for fields, param in (({"odd": 1}, "odd"), ({"options": {"num_ctx": 512}}, "options.num_ctx")):
            refused = post(instance, CHAT, {"model": MODEL, "messages": [HI]} | fields)
            assert refused.status_code == 400 and error_of(refused).startswith(f"{param}: ")


def test_results_without_ids_belong_to_calls_in_order(keeper: Instance, http: httpx.Client) -> None:
    speak(keeper, tokens_of("ok"))
    two_calls = {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": {}}} for name in "fg"]}
    results = [{"role": "tool", "tool_name": name, "content": f"result of {name}"} for name in ("g", "f")]
    stray = {"role": "tool", "content": "of no call"}
    body = {"model": MODEL, "messages": [HI, two_calls, *results, stray], "tools": [TOOL], "stream": False}
    assert http.post(CHAT, json=body).status_code == 200
