import pytest

from onward.errors import InvalidRequest
from onward.router.client_request import check_body
from onward.web.body_parts import MAX_PARTS
from onward.web.json_body import compact_json, decode_fields, undecoded_fields
from onward.web.openai_api.previous_response import PREVIOUS_ID_FIELD, previous_response_id

MANY_PARTS = b'{"model":"m","prompt":[%b]}' % b",".join([b"[]"] * MAX_PARTS)


def test_a_body_without_whitespace_is_held_once() -> None:
    body = b'{"prompt":"a b","max_tokens":1}'
    assert compact_json(body) is body
    assert compact_json(b' {"prompt": "a b", "max_tokens": 1}\n') == body


def test_bytes_that_are_no_json_stay_as_they_are() -> None:
    assert compact_json(b'{"prompt": ') == b'{"prompt": '


def test_a_body_of_very_many_small_parts_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(InvalidRequest, match="the body: has more than"):
        decode_fields(MANY_PARTS)


def test_a_router_refuses_it_too() -> None:
    with pytest.raises(InvalidRequest, match="the body: has more than"):
        check_body(MANY_PARTS)


@pytest.mark.parametrize(
    ("value", "found"), [(b'"resp_1"', "resp_1"), (b"null", None), (b"7", None), (b"[[],[]]", None), (b'{"a":1}', None)]
)
def test_only_a_string_names_the_response_before(value: bytes, found: str | None) -> None:
    body = b'{"%b": %b}' % (PREVIOUS_ID_FIELD.encode(), value)
    assert previous_response_id(undecoded_fields(body), body) == found
