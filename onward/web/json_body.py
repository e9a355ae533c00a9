"""Decodes JSON bodies into typed requests. Errors name the byte or the field. This module knows no field by itself."""

import re
from typing import Any, TypeVar

import msgspec

from onward.errors import InvalidRequest
from onward.web.allowed_values import allowed_values
from onward.web.body_parts import check_parts

T = TypeVar("T")

_WITH_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_NO_MEMBER = re.compile(r"Invalid enum value (.*)", re.DOTALL)
_MAX_NAME = 80
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """Returns the fields of a JSON object, each still undecoded. Refuses a body that would take long to decode."""
    check_parts(body)
    return undecoded_fields(body)


def undecoded_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """Returns the fields of a JSON object, each still undecoded, without the limit of `decode_fields`. It is for
    callers that decode few fields: the other parts of the body cost nothing, so they are not counted."""
    try:
        return _top_level.decode(body)
    except msgspec.ValidationError as fault:
        raise validation_error(fault) from fault
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise _json_error(body, fault) from fault


def decode(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as fault:
        raise validation_error(fault, decoder.type) from fault
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise _json_error(body, fault) from fault


def field_error(param: str, problem: str) -> InvalidRequest:
    """Returns a field error. All have the same form: the path of the field, then what is wrong with it."""
    return InvalidRequest(f"{param}: {problem}", param=param)


def short_repr(value: object) -> str:
    """Returns a client's value for an error message, cut if it is long."""
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def validation_error(error: msgspec.ValidationError, decoded_type: Any = None, parent_path: str = "") -> InvalidRequest:
    """Returns the error for the client: msgspec's message with the path of the field. `decoded_type` and `parent_path`
    are the type and the path of the decoded value."""
    match = _WITH_PATH.match(str(error))
    assert match is not None
    problem, path = match["what"], parent_path + (match["path"] or "$").removeprefix("$")
    if missing := _MISSING.fullmatch(problem):
        path, problem = f"{path}.{missing[1]}", "is required"
    elif unknown := _UNKNOWN.fullmatch(problem):
        path, problem = f"{path}.{unknown[1][:_MAX_NAME]}", "there is no such field"
    elif (value := _NO_MEMBER.fullmatch(problem)) and (allowed := allowed_values(decoded_type, match["path"] or "$")):
        problem = f"must be one of {', '.join(allowed)}, got {_cut(value[1])}"
    path, problem = path.removeprefix("."), problem.replace("`", "").replace(" | null", "")
    return field_error(path, problem) if path else InvalidRequest(f"the body: {problem}")


def nested_too_deeply() -> InvalidRequest:
    return _json_error(b"", RecursionError())


def _json_error(body: bytes, error: Exception) -> InvalidRequest:
    return InvalidRequest(f"the body is not valid JSON: {_json_problem(body, error)}", code="invalid_json")


def _json_problem(body: bytes, error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"invalid UTF-8 (byte {_first_bad_byte(body)})"
    message = str(error).removeprefix("JSON is malformed: ")
    if trailing := _TRAILING.fullmatch(message):
        # In this message msgspec counts from one, in all others from zero.
        return f"trailing characters (byte {int(trailing[1]) - 1})"
    return message if "(byte " in message else f"{message} (byte {len(body)})"


def _first_bad_byte(body: bytes) -> int:
    try:
        body.decode()
    except UnicodeDecodeError as fault:
        return fault.start
    return len(body)


def compact_json(body: bytes) -> bytes:
    """Returns the same JSON without whitespace between tokens, which is the form in which a request is kept. Bytes that
    are not JSON are returned unchanged, and the decoder refuses them. Without whitespace the result is `body` itself,
    so that a large one is held once."""
    try:
        formatted = msgspec.json.format(body, indent=-1)
        return body if len(formatted) == len(body) else formatted
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body


def decode_raw(value: msgspec.Raw, body: bytes) -> Any:
    """Decodes a field of `body` that was left undecoded, and so unchecked: its text need not even be UTF-8."""
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise _json_error(body, fault) from fault
