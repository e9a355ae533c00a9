"""`/v1/rerank` and `/v1/score`, at an instance and behind a router: the cosines of embedding vectors."""

import math
from array import array
from typing import Any

import httpx
import msgspec
import pytest
import uvloop

from onward.api.endpoints.embedding_kinds import KINDS
from onward.api.requests.embedding_request import MAX_INPUTS
from onward.api.requests.similarity_request import ScoreRequest
from onward.config import ApiConfig
from onward.proto import SCHEMA_VERSION
from onward.proto.engine import ErrorInfo
from onward.proto.model import PreparedModel
from onward.proto.router import Attempt
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.stand_in_engine import made_up_vector
from tests.api.test_embeddings import router_of

RERANK, SCORE = "/v1/rerank", "/v1/score"
DOCUMENTS = ["apples and pears", "the weather", "a", "Zürich"]


def ask(url: str, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(url + path, json={"model": "small-model"} | fields, timeout=30, verify=NO_CERTIFICATES)


def cosine(first: str, second: str, pooling: Any = "mean") -> float:
    one, other = (made_up_vector(text.encode(), pooling) for text in (first, second))
    return math.fsum(x * y for x, y in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)


def expected_order(query: str) -> list[int]:
    return sorted(range(len(DOCUMENTS)), key=lambda index: -cosine(query, DOCUMENTS[index]))


def test_documents_come_in_the_order_of_their_similarity_to_the_query(instance: Instance) -> None:
    answer = ask(instance.url, RERANK, query="fruit", documents=DOCUMENTS).json()
    results = answer["results"]
    assert [one["index"] for one in results] == expected_order("fruit")
    for one in results:
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
        assert one["relevance_score"] == pytest.approx(cosine("fruit", one["document"]["text"]), abs=1e-6)
    num_tokens = sum(len(text.encode()) for text in ["fruit", *DOCUMENTS])
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert answer["id"].startswith("rerank-") and answer["model"] == "small-model"


def test_only_the_first_results_are_returned_and_without_documents_where_none_are_wanted(instance: Instance) -> None:
    documents = [{"text": text} for text in DOCUMENTS]
    answer = ask(instance.url, RERANK, query="fruit", documents=documents, top_n=2, return_documents=False).json()
    assert [one["index"] for one in answer["results"]] == expected_order("fruit")[:2]
    assert all(one.keys() == {"index", "relevance_score"} for one in answer["results"])


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("a", "bc", [("a", "bc")]),
        ("a", ["bc", "d"], [("a", "bc"), ("a", "d")]),
        (["a"], ["bc", "d"], [("a", "bc"), ("a", "d")]),
        (["a", "e"], ["bc", "d"], [("a", "bc"), ("e", "d")]),
    ],
)
def test_each_pair_has_a_score(instance: Instance, first: Any, second: Any, pairs: list[tuple[str, str]]) -> None:
    answer = ask(instance.url, SCORE, text_1=first, text_2=second, pooling="last").json()
    assert [(one["object"], one["index"]) for one in answer["data"]] == [("score", at) for at in range(len(pairs))]
    scores = [one["score"] for one in answer["data"]]
    assert scores == pytest.approx([cosine(*pair, "last") for pair in pairs], abs=1e-6)
    assert (answer["object"], answer["model"]) == ("list", "small-model") and answer["id"].startswith("score-")


def test_a_text_is_as_similar_to_itself_as_can_be(instance: Instance) -> None:
    [one] = ask(instance.url, SCORE, text_1="the same", text_2="the same").json()["data"]
    assert one["score"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_no_score_is_beyond_the_range_of_a_cosine(sign: int) -> None:
    """Vectors of length 1 are rounded, so the sum of their squares can be above 1."""
    request = ScoreRequest(model="m", text_1="a", text_2="a")
    attempt = Attempt(
        schema_version=SCHEMA_VERSION, path=SCORE, body=b"", request_id="r", attempt_epoch=1, seed=0, created_s=1
    )
    scores: list[float] = []
    for last in range(1, 50):
        vector = array("f", [0.1, 0.2, 0.3, last / 10])
        other = array("f", [sign * value for value in vector])
        body = KINDS[SCORE].body(attempt, request, 2, [vector.tobytes(), other.tobytes()])
        scores += [one["score"] for one in msgspec.json.decode(body)["data"]]
    assert all(-1 <= score <= 1 for score in scores)
    assert scores == pytest.approx([sign] * len(scores), abs=1e-6)


BAD: list[tuple[str, dict[str, Any], str]] = [
    (RERANK, {"documents": ["a"]}, "query"),
    (RERANK, {"query": "", "documents": ["a"]}, "query"),
    (RERANK, {"query": "a"}, "documents"),
    (RERANK, {"query": "a", "documents": []}, "documents"),
    (RERANK, {"query": "a", "documents": ["a"] * (MAX_INPUTS + 1)}, "documents"),
    (RERANK, {"query": "a", "documents": ["b", ""]}, "documents[1]"),
    (RERANK, {"query": "a", "documents": ["b", {"image": "x"}]}, "documents[1]"),
    (RERANK, {"query": "a", "documents": ["b", "c" * 300]}, "documents[1]"),
    (RERANK, {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    (RERANK, {"query": "a", "documents": ["b"], "pooling": "max"}, "pooling"),
    (RERANK, {"query": "a", "documents": ["b"], "model": "other"}, "model"),
    (SCORE, {"text_1": "a"}, "text_2"),
    (SCORE, {"text_1": [], "text_2": "a"}, "text_1"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    (SCORE, {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
    (SCORE, {"text_1": "", "text_2": "a"}, "text_1"),
]


@pytest.mark.parametrize(("path", "fields", "param"), BAD, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_named(instance: Instance, path: str, fields: dict[str, Any], param: str) -> None:
    answer = ask(instance.url, path, **fields)
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert (error["param"], error["message"].startswith(f"{param}: ")) == (param, True)
    assert not instance.engine.running


@pytest.mark.parametrize("alias", ["/rerank", "/v2/rerank", "/score"])
def test_other_paths_of_the_same_routes_give_the_same(instance: Instance, alias: str) -> None:
    fields = {"text_1": "a", "text_2": ["b", "c"]} if alias == "/score" else {"query": "fruit", "documents": DOCUMENTS}
    answers = [ask(instance.url, path, **fields).json() for path in (alias, SCORE if alias == "/score" else RERANK)]
    for answer in answers:
        del answer["id"]
        answer.pop("created", None)
    assert answers[0] == answers[1] and "error" not in answers[0]


def test_a_router_asks_the_next_instance_if_one_is_full(model: PreparedModel) -> None:
    key = "ab" * 32

    async def scenario(first: Instance, second: Instance) -> None:
        async with router_of(key, first, second) as router:
            first.engine.refusal = ErrorInfo("overloaded", "full", 429, True, retry_after_s=1.0)
            for _ in range(3):
                body: dict[str, Any] = {"model": "small-model", "query": "fruit", "documents": DOCUMENTS}
                answer = await router.post(body, path=RERANK)
                assert [one["index"] for one in answer.json["results"]] == expected_order("fruit")
                for alias in ("/rerank", "/v2/rerank"):
                    assert (await router.post(body, path=alias)).json["results"] == answer.json["results"]
                for alias in (SCORE, "/score"):
                    score = await router.post({"model": "small-model", "text_1": "a", "text_2": "b"}, path=alias)
                    assert score.json["data"][0]["score"] == pytest.approx(cosine("a", "b"), abs=1e-6)
            refused = await router.post({"model": "small-model", "query": "", "documents": ["a"]}, path=RERANK)
            assert (refused.status, refused.json["error"]["param"]) == (400, "query")

    config = ApiConfig(cluster_key=key)
    with running(model, config, name="first") as first, running(model, config, name="second") as second:
        uvloop.run(scenario(first, second))
