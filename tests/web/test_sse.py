import pytest

from onward.errors import InvalidRequest
from onward.proto.cursor import ChoiceCursor, Cursor, format_cursor
from onward.web.sse import parse_last_event_id
from tests.web.exchange import request_scope

PLACE = Cursor("ab" * 16, 7, 1, [ChoiceCursor(3, None)], {})


def test_a_client_names_the_place_that_it_has_read_to() -> None:
    assert parse_last_event_id(request_scope(headers={"Last-Event-ID": format_cursor(PLACE)})) == PLACE


def test_no_header_and_an_empty_one_name_no_place() -> None:
    assert parse_last_event_id(request_scope()) is None
    assert parse_last_event_id(request_scope(headers={"Last-Event-ID": ""})) is None


@pytest.mark.parametrize("line", ["nonsense", "1;r;7;1;1", "caf\xe9"])
def test_anything_else_is_refused_by_the_header_s_name(line: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_last_event_id(request_scope(headers={"Last-Event-ID": line}))
    assert refused.value.param == "Last-Event-ID"
