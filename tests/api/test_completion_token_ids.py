"""`completion_token_ids` in a request: the name that an answer gives its tokens, and the same field as
`generated_token_ids`."""

from typing import Any

import httpx
import pytest

from tests.api.instance import Instance
from tests.api.reader import PATHS, ask, request

STREAMING = pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
EVERY_PATH = pytest.mark.parametrize("path", PATHS)
FIELDS: dict[str, Any] = {"max_tokens": 9, "seed": 7}


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    return response.json()["error"]


@EVERY_PATH
@STREAMING
@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_s_tokens_are_taken_back_by_the_name_they_have_there(
    instance: Instance, path: str, streaming: bool, n: int
) -> None:
    whole = ask(instance.url, path, request(path, True, n=n, **FIELDS))
    each = [choice.token_ids[:4] for choice in whole.choices]
    so_far = each[0] if n == 1 else each
    expected = ask(instance.url, path, request(path, streaming, n=n, generated_token_ids=so_far, **FIELDS))
    answer = ask(instance.url, path, request(path, streaming, n=n, completion_token_ids=so_far, **FIELDS))
    assert [one.generated_token_ids for one in instance.engine.submits[-n:]] == each
    assert (answer.texts, answer.usage) == (expected.texts, expected.usage)
    assert [one.token_ids for one in answer.choices] == [one.token_ids for one in expected.choices]


@EVERY_PATH
def test_both_names_may_say_the_same(instance: Instance, path: str) -> None:
    both = {"generated_token_ids": [97, 98], "completion_token_ids": [97, 98]}
    ask(instance.url, path, request(path, False, **both, **FIELDS))
    assert instance.engine.submits[-1].generated_token_ids == [97, 98]


@EVERY_PATH
@pytest.mark.parametrize(("generated", "completion"), [([97], [98]), ([97], []), ([], [97]), ([97, 98], [97])])
def test_a_request_in_which_the_two_names_disagree_is_refused_and_told_both(
    instance: Instance, path: str, generated: list[int], completion: list[int]
) -> None:
    before = len(instance.engine.submits)
    both = {"generated_token_ids": generated, "completion_token_ids": completion}
    error = error_of(httpx.post(instance.url + path, json=request(path, False, **both, **FIELDS), timeout=30))
    assert error["param"] == "completion_token_ids"
    assert "completion_token_ids" in error["message"] and "generated_token_ids" in error["message"]
    assert len(instance.engine.submits) == before


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"completion_token_ids": [320]}, "completion_token_ids[0]"),
        ({"completion_token_ids": "ab"}, "completion_token_ids"),
        ({"completion_token_ids": [[97], [-1]], "n": 2}, "completion_token_ids[1][0]"),
        ({"completion_token_ids": [97], "n": 2}, "completion_token_ids"),
        ({"completion_token_ids": [97], "guided_choice": ["xy"]}, "completion_token_ids[0]"),
    ],
)
@EVERY_PATH
def test_an_error_names_the_field_that_was_sent(
    instance: Instance, path: str, fields: dict[str, Any], param: str
) -> None:
    response = httpx.post(instance.url + path, json=request(path, False, **FIELDS) | fields, timeout=30)
    assert error_of(response)["param"] == param


def test_a_null_is_no_list_of_tokens(instance: Instance) -> None:
    path = "/v1/completions"
    for fields in (
        {"completion_token_ids": None, "generated_token_ids": [97]},
        {"completion_token_ids": [97], "generated_token_ids": None},
    ):
        ask(instance.url, path, request(path, False, **fields, **FIELDS))
        assert instance.engine.submits[-1].generated_token_ids == [97]


def test_what_goes_with_given_tokens_goes_with_this_name_too(instance: Instance) -> None:
    path = "/v1/completions"
    given = {"completion_token_ids": [97, 98], **FIELDS}
    before = len(instance.engine.submits)
    ended = ask(instance.url, path, request(path, False, generated_finish_reasons=["stop"], **given))
    assert (ended.reasons, len(instance.engine.submits)) == (["stop"], before), "it is not run again"
    ask(instance.url, path, request(path, False, rescore_from=1, logprobs=1, **given))
    assert instance.engine.submits[-1].rescore_from == 1
    plain = ask(instance.url, path, request(path, False, **given))
    echoed = ask(instance.url, path, request(path, False, echo=True, **given))
    assert echoed.texts == plain.texts, "the prompt came with the earlier answer"


@EVERY_PATH
def test_the_openapi_document_has_both_names_for_every_endpoint_that_takes_tokens(
    instance: Instance, path: str
) -> None:
    document = httpx.get(f"{instance.url}/openapi.json", timeout=30).json()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    properties = document["components"]["schemas"][body.rpartition("/")[2]]["properties"]
    alias = properties["completion_token_ids"]
    assert alias["anyOf"] == properties["generated_token_ids"]["anyOf"]
    assert "generated_token_ids" in alias["description"]
