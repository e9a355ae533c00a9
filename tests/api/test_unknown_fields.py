"""Fields of other servers: each is acted on, refused by name, or reported to the client as ignored."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from onward.api.requests import unsupported_fields
from onward.api.requests.decoding import decode_chat, decode_completion, decode_tokens
from onward.api.requests.embedding_request import decode_embedding
from onward.api.requests.schemas import ValidationContext
from onward.api.requests.unsupported_fields import UnknownFieldReporter
from onward.config import ApiConfig
from onward.errors import InvalidRequest
from onward.obs.metrics import Registry
from onward.proto.model import PreparedModel
from onward.proto.router import IGNORED_FIELDS_HEADER
from tests.api.instance import Instance, running

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"model": "small-model", "messages": MESSAGES, "max_tokens": 1}
BOUNDS = ValidationContext("small-model", 320, 16)
REFUSED: list[tuple[str, Any]] = [
    ("no_stop_trim", True),
    ("use_beam_search", True),
    ("prompt_embeds", "AAAA"),
    ("bootstrap_room", 5),
    ("kv_transfer_params", {"a": 1}),
    ("custom_logit_processor", "x"),
    ("lora_path", "x"),
    ("separate_reasoning", False),
    ("length_penalty", 1.5),
    ("mirostat", 2),
    ("repeat_penalty", 1.2),
    ("typical_p", 0.9),
    ("xtc_probability", 0.1),
    ("dry_multiplier", 0.8),
    ("n_predict", 5),
    ("samplers", ["top_k"]),
    ("max_new_tokens", 5),
    ("adapter_id", "x"),
    ("watermark", True),
    ("enable_thinking", False),
    ("system", "be brief"),
    ("stop_sequences", ["x"]),
]


def decoded(kind: str, fields: dict[str, Any]) -> tuple[str, ...]:
    own: dict[str, Any] = {
        "chat": {"messages": MESSAGES},
        "completion": {"prompt": "x"},
        "tokens": {"prompt_token_ids": [1]},
    }[kind]
    decode = {"chat": decode_chat, "completion": decode_completion, "tokens": decode_tokens}[kind]
    return decode(json.dumps({"model": "small-model"} | own | fields).encode(), BOUNDS)[1]


@pytest.mark.parametrize("kind", ["chat", "completion", "tokens"])
def test_a_field_of_another_server_that_changes_the_answer_is_refused_by_name(kind: str) -> None:
    for name, value in REFUSED:
        with pytest.raises(InvalidRequest) as refused:
            decoded(kind, {name: value})
        assert refused.value.param == name
        assert decoded(kind, {name: None}) == ()


def test_values_that_ask_for_what_is_done_anyway_are_accepted() -> None:
    inert = {
        "stop_regex": [],
        "mirostat": 0,
        "repeat_penalty": 1.0,
        "typical_p": 1.0,
        "n_predict": -1,
        "watermark": False,
    }
    labels = {"user": "me", "rid": "1", "cache_prompt": True, "mirostat_tau": 5.0}
    assert decoded("chat", inert | labels | {"add_special_tokens": False}) == ()
    assert decoded("completion", inert | labels | {"add_special_tokens": True}) == ()


@pytest.mark.parametrize(("kind", "value"), [("chat", True), ("completion", False)])
def test_special_tokens_are_added_as_the_endpoint_does_it_or_not_at_all(kind: str, value: bool) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decoded(kind, {"add_special_tokens": value})
    assert refused.value.param == "add_special_tokens"


def test_every_endpoint_names_the_fields_that_it_does_not_know() -> None:
    for kind in ("chat", "completion", "tokens"):
        assert decoded(kind, {"zeta": 1, "alpha": None}) == ("alpha", "zeta")
    body = json.dumps({"model": "small-model", "input": "x", "alpha": 1}).encode()
    assert decode_embedding(body, BOUNDS, 8)[1] == ("alpha",)


@pytest.mark.parametrize("name", ["input_type", "truncate_prompt_tokens", "task", "messages"])
def test_a_field_that_changes_a_vector_is_refused_by_name(name: str) -> None:
    body = json.dumps({"model": "small-model", "input": "x", name: ["query"]}).encode()
    with pytest.raises(InvalidRequest) as refused:
        decode_embedding(body, BOUNDS, 8)
    assert refused.value.param == name


def test_an_unknown_option_of_speculation_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        decoded("chat", {"speculative": {"num_drafts": 4}})
    assert refused.value.param == "speculative.num_drafts"


def test_the_header_is_printable_and_bounded() -> None:
    assert unsupported_fields.format_names(["a b", "ü\n"]) == "a%20b, %C3%BC%0A"
    many = unsupported_fields.format_names([f"f{index}" for index in range(100)])
    assert many.endswith("f15, and 84 more")
    assert len(unsupported_fields.format_names(["x" * 10_000])) == unsupported_fields.MAX_NAME_LENGTH
    unsupported_fields.format_names(["\ud800"]).encode("ascii")


def test_each_name_is_logged_once_and_only_so_many(caplog: pytest.LogCaptureFixture) -> None:
    counter = Registry().counter("onward_unknown_fields_total", "")
    noted = UnknownFieldReporter(counter, max_logged=2)
    for names in (("a",), ("a", "b"), ("c",), ("d", "e")):
        noted.report(names, "/v1/chat/completions", {"id": "id"})
    assert [record.message.split("fields=")[1].split()[0] for record in caplog.records] == ["a", "b"]
    assert counter.value() == 6


def test_a_response_names_the_fields_that_were_ignored(instance: Instance) -> None:
    with httpx.Client(base_url=instance.url, timeout=30) as http:
        whole = http.post("/v1/chat/completions", json=CHAT | {"frobnicate": 1, "x": {}})
        assert (whole.status_code, whole.headers[IGNORED_FIELDS_HEADER]) == (200, "frobnicate, x")
        streamed = http.post("/v1/completions", json={"model": "small-model", "prompt": "x", "stream": True, "y": 1})
        assert (streamed.status_code, streamed.headers[IGNORED_FIELDS_HEADER]) == (200, "y")
        assert IGNORED_FIELDS_HEADER not in http.post("/v1/chat/completions", json=CHAT).headers
        tokenized = http.post("/tokenize", json={"prompt": "x", "frobnicate": 1})
        assert (tokenized.status_code, tokenized.json()["error"]["param"]) == (400, "frobnicate")


@pytest.fixture(scope="module")
def strict(model: PreparedModel) -> Iterator[Instance]:
    with running(model, ApiConfig(strict_fields=True, serve_config={"port": 0})) as instance:
        yield instance


def test_a_strict_server_refuses_unknown_fields_and_takes_all_others(strict: Instance) -> None:
    with httpx.Client(base_url=strict.url, timeout=30) as http:
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"model": "small-model", "prompt": "x", "max_tokens": 1}),
            ("/v1/generate", {"model": "small-model", "prompt_token_ids": [1], "max_tokens": 1}),
            ("/v1/embeddings", {"model": "small-model", "input": "x"}),
            ("/v1/rerank", {"model": "small-model", "query": "x", "documents": ["y"]}),
            ("/v1/score", {"model": "small-model", "text_1": "x", "text_2": "y"}),
        ):
            refused = http.post(path, json=body | {"frobnicate": 1})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "frobnicate"), path
        assert http.post("/v1/chat/completions", json=CHAT | {"user": "me", "top_k": 3}).status_code == 200
