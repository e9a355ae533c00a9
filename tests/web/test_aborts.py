import pytest

from onward.errors import InvalidRequest
from onward.web.openai_api.abort_request import MAX_IDS, decode_abort, without_id_prefix

HEX = "5f0c" * 8


def test_names_come_as_they_were_given_and_all_of_them_as_none() -> None:
    assert decode_abort(b'{"ids": ["a", "b c"]}') == ["a", "b c"]
    assert decode_abort(b'{"ids": [], "all": false}') == []
    assert decode_abort(b'{"all": true}') is None
    assert decode_abort(b'{"ids": [%b]}' % b",".join([b'"x"'] * MAX_IDS)) == ["x"] * MAX_IDS


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"{}", "ids", "is required"),
        (b'{"ids": ["a"], "all": true}', "ids", "not allowed"),
        (b'{"ids": [%b]}' % b",".join([b'"x"'] * (MAX_IDS + 1)), "ids", "at most"),
        (b'{"ids": ["a", ""]}', "ids[1]", "1 to 256 characters"),
        (b'{"ids": ["%b"]}' % (b"x" * 257), "ids[0]", "1 to 256 characters"),
        (b'{"ids": "a"}', "ids", "array"),
        (b'{"id": ["a"]}', "id", "no such field"),
        (b'{"ids": [', None, "not valid JSON"),
        (b'{"ids": ["\xff"]}', None, "UTF-8"),
    ],
)
def test_a_wrong_body_is_refused_by_the_name_of_its_field(body: bytes, param: str | None, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        decode_abort(body)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("given", "bare"),
    [
        (f"chatcmpl-{HEX}", HEX),
        (f"cmpl-{HEX}", HEX),
        (f"gen-{HEX}", HEX),
        (HEX, HEX),
        (f"other-{HEX}", f"other-{HEX}"),
        (f"cmpl-{HEX}0", f"cmpl-{HEX}0"),
        ("my label", "my label"),
    ],
)
def test_only_what_stands_before_an_id_of_ours_is_taken_off(given: str, bare: str) -> None:
    assert without_id_prefix(given) == bare
