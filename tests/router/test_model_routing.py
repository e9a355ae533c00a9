"""Which model answers a request: routes as they are written, shares, and what a stream with tokens keeps to."""

from collections import Counter
from random import Random

import pytest

from onward.errors import InvalidRequest, StartupError
from onward.proto.cursor import ChoiceCursor as Place
from onward.proto.cursor import Cursor, format_cursor, model_tag, parse_cursor, parse_cursor_slow
from onward.router.model_routing import ServedModels, choose_version, parse_routes
from onward.web.openai_api.model_names import with_model


def request_ids(count: int) -> list[str]:
    random = Random(1)
    return [f"{random.getrandbits(128):032x}" for _ in range(count)]


def served(routes: str = "m=v1:0.5,v2:0.5", **aliases: set[str]) -> ServedModels:
    return ServedModels({"v1": aliases.get("v1", set()), "v2": aliases.get("v2", set())}, parse_routes([routes]))


@pytest.mark.parametrize(
    ("value", "shares"),
    [
        ("m=v1:0.9,v2:0.1", {"v1": 0.9, "v2": 0.1}),
        (" m = v1:1 , v2:0 ", {"v1": 1.0, "v2": 0.0}),
        ("m=v1", {"v1": 1.0}),
        ("m=org/a:tag:0.25,org/a:other:0.75", {"org/a:tag": 0.25, "org/a:other": 0.75}),
    ],
)
def test_a_route_says_the_share_of_each_version(value: str, shares: dict[str, float]) -> None:
    assert parse_routes([value]) == {"m": shares}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (["m"], "--route 'm' has no '='"),
        (["=v1:1"], "the name before '=' is empty"),
        (["m="], "a model is empty"),
        (["m=:1"], "a model is empty"),
        (["m=v1:0.9,v2"], "'v2' has no share; write v2:0.1"),
        (["m=v1:0.9,"], "'' has no share"),
        (["m=v1:most,v2:0.1"], "the share 'most' of 'v1' is not a number"),
        (["m=v1:1.5,v2:-0.5"], "the share 1.5 of 'v1' is not within 0 to 1"),
        (["m=v1:nan"], "the share nan of 'v1' is not within 0 to 1"),
        (["m=v1:0.9,v2:0.01"], "the shares add up to 0.91, not to 1"),
        (["m=v1:0.5,v1:0.5"], "names 'v1' twice"),
        (["m=v1", "m=v2"], "'m' has a route already"),
        (["m=" + "x" * 257], "more than 256 printable characters"),
        (["m=" + ",".join(f"v{index}:0" for index in range(17))], "has 17 models, more than 16"),
        ([f"m{index}=v1" for index in range(65)], "--route is given 65 times"),
    ],
)
def test_a_route_that_is_wrong_is_named_with_its_mistake(values: list[str], problem: str) -> None:
    with pytest.raises(StartupError, match="--route") as refused:
        parse_routes(values)
    assert problem in refused.value.message


def test_shares_are_kept_and_a_request_id_always_falls_to_the_same_version() -> None:
    shares, alive = {"v1": 0.9, "v2": 0.1}, {"v1", "v2"}
    ids = request_ids(5000)
    chosen = [choose_version(shares, request_id, alive) for request_id in ids]
    assert 400 < Counter(chosen)["v2"] < 600
    assert chosen == [choose_version(shares, request_id, alive) for request_id in ids]


def test_a_version_without_a_share_is_never_chosen_also_where_no_other_is_alive() -> None:
    shares = {"v1": 1.0, "v2": 0.0}
    assert {choose_version(shares, request_id, {"v2"}) for request_id in request_ids(50)} == {"v1"}


def test_where_no_instance_of_the_version_is_alive_another_version_is_chosen() -> None:
    shares = {"v1": 0.5, "v2": 0.3, "v3": 0.2}
    ids = request_ids(2000)
    first = [choose_version(shares, request_id, {"v1", "v2", "v3"}) for request_id in ids]
    second = [choose_version(shares, request_id, {"v2", "v3"}) for request_id in ids]
    assert "v1" not in second
    assert all(one == other for one, other in zip(first, second, strict=True) if one != "v1"), "the others stay"


def test_a_route_comes_before_a_model_and_a_model_before_an_alias() -> None:
    models = served("v1=v1:0.9,v2:0.1", v2={"v1", "m", "old"}, v1={"m"})
    assert models.shares_of("v1") == {"v1": 0.9, "v2": 0.1}
    assert models.shares_of("v2") == {"v2": 1.0}
    assert models.shares_of("old") == {"v2": 1.0}
    assert models.shares_of("m") == {"v1": 0.5, "v2": 0.5}, "an alias of two models stands for equal shares"
    assert models.shares_of("unknown") == {}
    assert models.names() == ["m", "old", "v1", "v2"]


def test_a_stream_with_tokens_keeps_to_the_model_that_its_cursor_names() -> None:
    models = served()
    assert models.pinned_version("m", model_tag("v2")) == "v2"
    assert models.pinned_version("m", model_tag("gone")) is None
    assert models.pinned_version("v1", "") == "v1"
    assert models.pinned_version("m", "") is None, "the request names no model itself, and the shares decide no more"


def test_a_record_belongs_to_the_model_that_it_names_and_not_to_the_versions_of_a_route() -> None:
    models = served("v1=v1:0.5,v2:0.5", v1={"m", "old"}, v2={"m", "v1"})
    assert models.models_of_record("v1", "") == {"v1"}
    assert models.models_of_record("old", model_tag("v2")) == {"v2"}
    assert models.models_of_record("m", "") == {"v1", "v2"}
    assert models.models_of_record("unknown", "") == set()


def test_a_request_without_a_model_needs_one_where_several_are_served() -> None:
    assert ServedModels({"v1": set()}, {}).only_model() == "v1"
    with pytest.raises(InvalidRequest, match="model: is required, since several are served here: 'm', 'v1', 'v2'"):
        served().only_model()


def test_a_body_keeps_its_other_fields_as_they_were_written() -> None:
    body = b'{"seed":18446744073709551615,"model":"m","x":[1.0,"\\u00e9"],"n":1e2}'
    assert with_model(body, 'v"1') == b'{"seed":18446744073709551615,"model":"v\\"1","x":[1.0,"\\u00e9"],"n":1e2}'


@pytest.mark.parametrize("trace_id", ["", "0" * 32])
def test_a_cursor_names_the_model_that_made_its_tokens(trace_id: str) -> None:
    cursor = Cursor("abc", 1, 2, [Place(1)], {0: [5]}, trace_id=trace_id, model_tag=model_tag("v2"))
    text = format_cursor(cursor)
    assert parse_cursor(text) == parse_cursor_slow(text) == cursor
    for broken in ("@xyz", "@", "@" + "A" * 8, "@0" * 2):
        with pytest.raises(ValueError, match="model tag"):
            parse_cursor(text.replace("@" + model_tag("v2"), broken))
