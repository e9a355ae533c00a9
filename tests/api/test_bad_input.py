"""Whatever is sent, the answer names what is wrong with it, nothing reaches the engine, and the server goes on."""

from typing import Any

import httpx
import pytest

from benchmarks.harness.metrics_text import parse_metrics
from tests.api.conftest import MAX_BODY_BYTES
from tests.api.instance import Instance

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

# A field of a chat request, and the path that the error must name.
BAD_CHAT_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "a robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name"),
    ({"messages": [{"role": "assistant", "function_call": {"arguments": "{}"}}]}, "messages[0].function_call.name"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "x"}}]},
        "messages[0].function_call.arguments",
    ),
    ({"messages": [{"role": "user", "content": "x", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
    ({"functions": [{"name": "a b"}]}, "functions[0].name"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
    ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
    ({"function_call": {"name": "g"}}, "function_call"),
    ({"functions": [{"name": "f"}], "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"messages": [], "prompt_token_ids": [97], "echo": True}, "echo"),
    ({"echo": True, "truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
    ({"echo": True, "truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
    ({"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": -1}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"min_p": -0.5}, "min_p"),
    ({"min_p": 1.01}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 100_000}, "max_completion_tokens"),
    ({"max_tokens": 100_000}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"min_tokens": 1000}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": "7"}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["ok", ""]}, "stop[1]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 513}, "stop"),
    ({"stop": [5]}, "stop[0]"),
    ({"stop_token_ids": [320]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [5, -1]}, "stop_token_ids[1]"),
    ({"stop_token_ids": "a"}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    ({"priority": 2**31}, "priority"),
    ({"deadline_ms": 0}, "deadline_ms"),
    ({"speculative": 4}, "speculative"),
    ({"speculative": {"num_draft_tokens": -1}}, "speculative.num_draft_tokens"),
    ({"speculative": {"num_draft_tokens": 17}}, "speculative.num_draft_tokens"),
    ({"speculative": {"num_draft_tokens": "4"}}, "speculative.num_draft_tokens"),
    ({"return_speculative_stats": 1}, "return_speculative_stats"),
    ({"return_speculative_stats": True, "stream": True}, "return_speculative_stats"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"generated_token_ids": [320]}, "generated_token_ids[0]"),
    ({"generated_token_ids": [[1]]}, "generated_token_ids[0]"),
    ({"generated_token_ids": [1, 2], "n": 2}, "generated_token_ids[0]"),
    ({"generated_token_ids": [[1]], "n": 2}, "generated_token_ids"),
    ({"generated_token_ids": [[1], [-1]], "n": 2}, "generated_token_ids[1][0]"),
    ({"generated_finish_reasons": ["stop"]}, "generated_finish_reasons"),
    ({"generated_token_ids": [1], "generated_finish_reasons": "stop"}, "generated_finish_reasons"),
    ({"generated_token_ids": [1], "generated_finish_reasons": []}, "generated_finish_reasons"),
    ({"generated_token_ids": [1], "generated_finish_reasons": [None, None]}, "generated_finish_reasons"),
    ({"generated_token_ids": [1], "generated_finish_reasons": [5]}, "generated_finish_reasons[0]"),
    (
        {"generated_token_ids": [[1], [2]], "n": 2, "generated_finish_reasons": [None, "bored"]},
        "generated_finish_reasons[1]",
    ),
    ({"rescore_from": 0, "logprobs": True}, "rescore_from"),
    ({"generated_token_ids": [1], "rescore_from": 0}, "rescore_from"),
    ({"generated_token_ids": [1], "logprobs": True, "rescore_from": -1}, "rescore_from"),
    ({"generated_token_ids": [1], "logprobs": True, "rescore_from": 2}, "rescore_from"),
    ({"generated_token_ids": [1], "logprobs": True, "rescore_from": 0.5}, "rescore_from"),
    ({"generated_token_ids": [1], "logprobs": True, "rescore_from": [0, 0]}, "rescore_from"),
    ({"generated_token_ids": [1], "logprobs": True, "rescore_from": 0, "max_tokens": 1}, "rescore_from"),
    ({"generated_token_ids": [[1], [2, 3]], "n": 2, "logprobs": True, "rescore_from": 2}, "rescore_from"),
    ({"generated_token_ids": [[1], [2]], "n": 2, "logprobs": True, "rescore_from": [1, 2]}, "rescore_from[1]"),
    (
        {
            "generated_token_ids": [1],
            "logprobs": True,
            "rescore_from": 0,
            "generated_finish_reasons": ["stop"],
        },
        "rescore_from",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions[0].name"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"logit_bias": {"320": 1}}, "logit_bias['320']"),
    ({"logit_bias": {"5": 1, "-1": 1}}, "logit_bias['-1']"),
    ({"logit_bias": {"05": 1}}, "logit_bias['05']"),
    ({"logit_bias": {"²": 1}}, "logit_bias['²']"),
    ({"logit_bias": {"": 1}}, "logit_bias['']"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias['5']"),
    ({"logit_bias": {"5": -101}}, "logit_bias['5']"),
    ({"logit_bias": {"5": "up"}}, "logit_bias[...]"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"presence_penalty": "high"}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"repetition_penalty": 10.5}, "repetition_penalty"),
    ({"bad_words": "word"}, "bad_words"),
    ({"stop_regex": "a+"}, "stop_regex[0]"),
    ({"stop_regex": ["a", "("]}, "stop_regex[1]"),
    ({"stop_regex": ["a"] * 17}, "stop_regex"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [5] * 4097}, "allowed_token_ids"),
    ({"allowed_token_ids": [5, 320]}, "allowed_token_ids[1]"),
    ({"allowed_token_ids": [97], "stop_token_ids": [97], "min_tokens": 1}, "allowed_token_ids"),
    ({"allowed_token_ids": [97], "thinking_budget": 5}, "thinking_budget"),
    ({"bad_words": ["ok", ""]}, "bad_words[1]"),
    ({"bad_words": ["  "]}, "bad_words[0]"),
    ({"bad_words": [5]}, "bad_words[0]"),
    ({"bad_words": ["x" * 129]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"moderation": {"model": "x"}}, "moderation"),
    ({"verbosity": "low"}, "verbosity"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"best_of": 2}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"prompt_token_ids": [1]}, "prompt_token_ids"),
    ({"messages": [], "prompt_token_ids": [320]}, "prompt_token_ids[0]"),
    ({"messages": [], "prompt_token_ids": [[1]]}, "prompt_token_ids[0]"),
    ({"messages": [], "prompt_token_ids": [1] * 300}, "prompt_token_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"add_generation_prompt": "no"}, "add_generation_prompt"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"reasoning_effort": "enormous"}, "reasoning_effort"),
    ({"model": 5}, "model"),
]
BAD_COMPLETION_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a", [1]]}, "prompt[1]"),
    ({"prompt": [[1, 2], "a"]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [[1], [2, 320]]}, "prompt[1][1]"),
    ({"prompt": [[[1]]]}, "prompt[0][0]"),
    ({"prompt": ["a", None]}, "prompt[1]"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 9, "n": 16}, "prompt"),
    ({"prompt": [[1], [1] * 300]}, "prompt[1]"),
    ({"prompt": None, "prompt_token_ids": [1, 320]}, "prompt_token_ids[1]"),
    ({"prompt": None, "prompt_token_ids": []}, "prompt_token_ids"),
    ({"prompt": None, "prompt_token_ids": [[1], [1] * 300]}, "prompt_token_ids[1]"),
    ({"prompt_token_ids": [1]}, "prompt_token_ids"),
    ({"prompt": ["a", "b"], "generated_token_ids": [1]}, "generated_token_ids"),
    ({"prompt": ["a", "b"], "generated_token_ids": [1, 2]}, "generated_token_ids[0]"),
    ({"prompt": [1, 320]}, "prompt[1]"),
    ({"prompt": [1, 2.5]}, "prompt[1]"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 17}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 2, "generated_token_ids": [[1], [2]]}, "best_of"),
    ({"best_of": 16, "prompt": ["a"] * 9}, "prompt"),
    ({"echo": 1}, "echo"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
    ({"max_tokens": 0, "echo": True, "generated_token_ids": [97]}, "generated_token_ids"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"echo": True, "truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
    ({"suffix": "x"}, "suffix"),
    ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
]
BAD_TOKEN_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt_token_ids": None}, "prompt_token_ids"),
    ({"prompt_token_ids": []}, "prompt_token_ids"),
    ({"prompt_token_ids": "hello"}, "prompt_token_ids"),
    ({"prompt_token_ids": [1, 320]}, "prompt_token_ids[1]"),
    ({"prompt_token_ids": [1, -1]}, "prompt_token_ids[1]"),
    ({"prompt_token_ids": [1, 2.5]}, "prompt_token_ids[1]"),
    ({"prompt_token_ids": [1] * 300}, "prompt_token_ids"),
    ({"logprobs": 21}, "logprobs"),
    ({"temperature": -1}, "temperature"),
    ({"tools": [{}]}, "tools"),
]
BAD_ABORTS: list[tuple[Any, str]] = [
    ({}, "ids"),
    ({"all": False}, "ids"),
    ({"ids": None}, "ids"),
    ({"ids": "x"}, "ids"),
    ({"ids": [""]}, "ids[0]"),
    ({"ids": ["x", 5]}, "ids[1]"),
    ({"ids": ["x", None]}, "ids[1]"),
    ({"ids": ["x" * 257]}, "ids[0]"),
    ({"ids": ["x"] * 1025}, "ids"),
    ({"ids": ["x"], "all": True}, "ids"),
    ({"all": "yes"}, "all"),
    ({"all": 1}, "all"),
]
# A body that is no JSON, and the byte at which that shows.
BROKEN_JSON: list[tuple[bytes, str]] = [
    (b"", "byte 0"),
    (b"{", "byte 1"),
    (b'{"model": "small-model", "temperature": NaN}', "byte 40"),
    (b'{"model": "small-model", "temperature": Infinity}', "byte 40"),
    (b'{"model": "small-model",}', "byte 24"),
    (b'{"model": "x"} {', "byte 15"),
    (b'{"model": "\xff\xfe"}', "byte 11"),
    (b'{"messages": ' + b"[" * 100_000, "nested too deeply"),
]


@pytest.fixture
def http(instance: Instance) -> Any:
    with httpx.Client(base_url=instance.url, timeout=30) as http:
        yield http
        num_submits = len(instance.engine.submits)
        good = http.post(CHAT, json={"model": "small-model", "messages": MESSAGES, "max_tokens": 1})
        assert good.status_code == 200, "the server goes on"
        assert len(instance.engine.submits) == num_submits + 1


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "retryable"}
    assert error["retryable"] is False
    return error


@pytest.mark.parametrize(("fields", "path"), BAD_CHAT_FIELDS, ids=lambda value: str(value)[:40])
def test_a_bad_chat_field_is_named(http: httpx.Client, instance: Instance, fields: Any, path: str) -> None:
    before = len(instance.engine.submits)
    error = error_of(http.post(CHAT, json={"model": "small-model", "messages": MESSAGES} | fields))
    assert error["param"] == path
    assert error["message"].startswith(path)
    assert error["type"] == "invalid_request_error"
    assert len(instance.engine.submits) == before


@pytest.mark.parametrize("token_id", [-9, -1, 320, 10**20])
@pytest.mark.parametrize(
    "fields",
    [
        lambda one: {"prompt_token_ids": [one], "messages": None},
        lambda one: {"stop_token_ids": [one]},
        lambda one: {"generated_token_ids": [one]},
        lambda one: {"logit_bias": {str(one): 1}},
    ],
    ids=["prompt", "stop", "generated", "bias"],
)
def test_the_error_for_a_token_id_states_the_range_of_token_ids(http: httpx.Client, fields: Any, token_id: int) -> None:
    body = {"model": "small-model", "messages": MESSAGES} | fields(token_id)
    error = error_of(http.post(CHAT, json={name: value for name, value in body.items() if value is not None}))
    assert "between 0 and 319" in error["message"] and str(token_id) in error["message"]


@pytest.mark.parametrize(("fields", "path"), BAD_COMPLETION_FIELDS, ids=lambda value: str(value)[:40])
def test_a_bad_completion_field_is_named(http: httpx.Client, fields: Any, path: str) -> None:
    error = error_of(http.post(COMPLETION, json={"model": "small-model", "prompt": "x"} | fields))
    assert error["param"] == path


@pytest.mark.parametrize(("fields", "path"), BAD_TOKEN_FIELDS, ids=lambda value: str(value)[:40])
def test_a_bad_field_of_a_request_in_tokens_is_named(http: httpx.Client, fields: Any, path: str) -> None:
    error = error_of(http.post("/v1/generate", json={"model": "small-model", "prompt_token_ids": [1]} | fields))
    assert error["param"] == path


@pytest.mark.parametrize(("body", "path"), BAD_ABORTS, ids=lambda value: str(value)[:40])
def test_a_bad_abort_is_named_and_aborts_nothing(http: httpx.Client, instance: Instance, body: Any, path: str) -> None:
    def num_asked() -> int:
        """Without those of other tests that a new engine is told again."""
        return sum(asked.received_ago_s is None for asked in instance.engine.asked_aborts)

    before = num_asked()
    assert error_of(http.post("/v1/abort", json=body))["param"] == path
    assert num_asked() == before


def test_an_abort_with_a_field_that_nobody_knows_is_refused(http: httpx.Client) -> None:
    assert "everything" in error_of(http.post("/v1/abort", json={"ids": ["x"], "everything": True}))["message"]
    assert error_of(http.post("/v1/abort", content=b"{"))["code"] == "invalid_json"


@pytest.mark.parametrize(("body", "place"), BROKEN_JSON, ids=lambda value: str(value)[:40])
def test_where_it_is_no_json_the_byte_is_named(http: httpx.Client, body: bytes, place: str) -> None:
    error = error_of(http.post(CHAT, content=body))
    assert error["code"] == "invalid_json"
    assert place in error["message"]


@pytest.mark.parametrize("body", [b"[]", b"5", b'"x"', b"null"])
def test_a_body_that_is_no_object_is_refused(http: httpx.Client, body: bytes) -> None:
    assert "object" in error_of(http.post(CHAT, content=body))["message"]


def test_a_missing_field_is_named(http: httpx.Client) -> None:
    assert error_of(http.post(CHAT, json={"model": "small-model"}))["param"] == "messages"
    error = error_of(http.post(COMPLETION, json={"model": "small-model"}))
    assert (error["param"], error["message"]) == ("prompt", "prompt: is required")


def test_a_number_too_large_for_a_float_is_refused(http: httpx.Client) -> None:
    body = b'{"model":"small-model","messages":[{"role":"user","content":"x"}],"temperature":1e999}'
    assert error_of(http.post(CHAT, content=body))["param"] == "temperature"


def test_an_unknown_model_is_not_found(http: httpx.Client) -> None:
    error = error_of(http.post(CHAT, json={"model": "gpt-x", "messages": MESSAGES}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize("size", [MAX_BODY_BYTES + 1, 10 << 20])
def test_a_body_over_the_limit_is_refused(http: httpx.Client, size: int) -> None:
    body = b'{"model": "small-model", "messages": [{"role": "user", "content": "'.ljust(size, b"x")
    error = error_of(http.post(CHAT, content=body), 413)
    assert str(MAX_BODY_BYTES) in error["message"]


def test_a_chunked_body_over_the_limit_is_refused(http: httpx.Client) -> None:
    assert error_of(http.post(CHAT, content=(b"x" * 65536 for _ in range(40))), 413)


def test_a_prompt_longer_than_the_context_says_by_how_much(http: httpx.Client) -> None:
    error = error_of(http.post(COMPLETION, json={"model": "small-model", "prompt": [1] * 300}))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "45 too long" in error["message"]
    long_chat = [{"role": "user", "content": "x" * 1000}]
    error = error_of(http.post(CHAT, json={"model": "small-model", "messages": long_chat}))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_a_text_that_is_far_too_long_is_refused_by_the_name_of_its_field(http: httpx.Client) -> None:
    text = "1" * 100_000  # of 256 tokens at most, none of which has 16 bytes
    chat = [{"role": "user", "content": text}]
    asked: list[tuple[str, dict[str, Any], str]] = [
        (COMPLETION, {"prompt": text}, "prompt"),
        (COMPLETION, {"prompt": ["x", text]}, "prompt[1]"),
        (CHAT, {"messages": chat}, "messages"),
        ("/v1/responses", {"input": text}, "input"),
        ("/v1/embeddings", {"input": ["x", text]}, "input[1]"),
        ("/tokenize", {"prompt": text}, "prompt"),
        ("/tokenize", {"messages": chat}, "messages"),
    ]
    for path, fields, field in asked:
        error = error_of(http.post(path, json={"model": "small-model", **fields}))
        assert (error["code"], error["param"]) == ("context_length_exceeded", field), path
        assert "characters" in error["message"], path


def test_a_prompt_and_max_tokens_beyond_the_context_say_by_how_much(http: httpx.Client) -> None:
    fields = {"model": "small-model", "prompt": [1] * 200, "max_tokens": 60}
    error = error_of(http.post(COMPLETION, json=fields))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "by 4" in error["message"]


def test_unsupported_fields_that_ask_for_nothing_are_fine(http: httpx.Client) -> None:
    inert = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logprobs": False,
        "top_logprobs": 0,
        "logit_bias": {},
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "modalities": ["text"],
        "audio": None,
        "user": "me",
        "stop": None,
        "temperature": None,
    }
    response = http.post(CHAT, json={"model": "small-model", "messages": MESSAGES, "max_tokens": 1} | inert)
    assert response.status_code == 200, response.text


def test_unknown_fields_are_ignored_and_counted(http: httpx.Client) -> None:
    def count() -> float:
        return parse_metrics(http.get("/metrics").text)["onward_unknown_fields_total"]

    before = count()
    fields = {"model": "small-model", "messages": MESSAGES, "max_tokens": 1, "frobnicate": 1, "x": {}}
    assert http.post(CHAT, json=fields).status_code == 200
    assert count() == before + 2


@pytest.mark.parametrize("label", ["", "x" * 257, "caf\xe9", "a\tb"])
def test_a_bad_label_is_refused(http: httpx.Client, label: str) -> None:
    headers = [(b"x-request-id", label.encode("latin-1"))]
    fields = {"model": "small-model", "messages": MESSAGES}
    assert error_of(http.post(CHAT, json=fields, headers=headers))["param"] == "X-Request-Id"


def test_an_unknown_route_and_a_wrong_method_are_told_in_the_same_form(http: httpx.Client) -> None:
    assert error_of(http.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(http.get(CHAT), 405)["code"] == "method_not_allowed"
    assert http.head(CHAT, headers={"Last-Event-ID": "1;a;0;0;1;1;0:5"}).status_code == 405
    assert error_of(http.post("/health"), 405)["code"] == "method_not_allowed"
