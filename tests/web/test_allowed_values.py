import enum
from typing import Any, Literal

import msgspec
import pytest

from onward.errors import InvalidRequest
from onward.web.allowed_values import allowed_values
from onward.web.json_body import decode


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Inner(msgspec.Struct):
    role: Literal["user", "tool"]
    colour: Colour | None = None


class Outer(msgspec.Struct):
    parts: str | list[Inner] | None = None
    one: Inner | None = None
    size: Literal["s", "m"] | None = None
    name: str = ""


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("$.size", ["s", "m"]),
        ("$.one.role", ["user", "tool"]),
        ("$.parts[3].role", ["user", "tool"]),
        ("$.parts[...].colour", ["red", "blue"]),
        ("$.name", []),
        ("$.nothing", []),
        ("$.parts.role", []),
        ("$", []),
    ],
)
def test_a_closed_set_is_found_by_its_path(path: str, values: list[str]) -> None:
    assert allowed_values(Outer, path) == values


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b'{"size": "xl"}', "size: must be one of s, m, got 'xl'"),
        (b'{"size": "it\'s"}', 'size: must be one of s, m, got "it\'s"'),
        (b'{"one": {"role": "robot"}}', "one.role: must be one of user, tool, got 'robot'"),
        (b'{"parts": [{"role": "user", "colour": "green"}]}', "parts[0].colour: must be one of red, blue, got 'green'"),
    ],
)
def test_what_is_not_in_it_is_told_what_is(body: bytes, complaint: str) -> None:
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Outer)
    with pytest.raises(InvalidRequest) as refused:
        decode(body, decoder)
    assert refused.value.message == complaint
    assert refused.value.param == complaint.partition(":")[0]
