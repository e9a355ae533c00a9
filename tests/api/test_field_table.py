"""docs/fields.md lists every field of the other servers, as the server handles it."""

import json
from pathlib import Path

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from onward.api.requests.decoding import decode_chat, decode_completion
from onward.api.requests.field_table import OPENAI, SERVERS, field_table
from onward.api.requests.schemas import ValidationContext
from onward.errors import InvalidRequest

PAGE = Path(__file__).parents[2] / "docs" / "fields.md"
BOUNDS = ValidationContext("m", 320, 16)
ROWS = [[cell.strip() for cell in row.split("|")[1:-1]] for row in field_table().splitlines()[2:]]


def test_the_page_has_the_table_as_it_is_generated() -> None:
    assert field_table() in PAGE.read_text(), "python -m onward.api.requests.field_table prints it"


def test_every_field_of_the_openai_package_is_listed() -> None:
    known = {*ChatParams.__annotations__, *CompletionParams.__annotations__}
    assert known - {*OPENAI} == set()


def test_no_field_is_listed_twice() -> None:
    for fields in SERVERS.values():
        assert fields == sorted(set(fields))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_field_is_handled_as_its_row_says(row: list[str]) -> None:
    """With a value that asks for something."""
    name, _, *handling = (cell.strip("`") for cell in row)
    plain = {"messages": [{"role": "user", "content": "a"}]}, {"prompt": "a"}
    for fields, decode, told in zip(plain, (decode_chat, decode_completion), handling, strict=True):
        if told == "supported":
            continue
        body = json.dumps({"model": "m", **fields, name: {"odd": [7]}}).encode()
        if told.startswith("refused"):
            with pytest.raises(InvalidRequest) as refused:
                decode(body, BOUNDS)
            assert refused.value.param == name
        else:
            _, unknown = decode(body, BOUNDS)
            assert (name in unknown) == told.startswith("unknown")
