"""The `model` of a request: the error if it is not served, which is the same at an instance and at a router, and a body
with another model."""

from collections.abc import Iterable

import msgspec

from onward.errors import NotFound
from onward.web.json_body import short_repr, undecoded_fields

MAX_NAMES_SHOWN = 16


def model_not_found(name: str, served: Iterable[str]) -> NotFound:
    """Returns the error for a model name that is not served. `served`: every name that clients may use; the error lists
    the first few."""
    names = [short_repr(served_name) for served_name in served]
    shown = ", ".join(names[:MAX_NAMES_SHOWN])
    if len(names) > MAX_NAMES_SHOWN:
        shown += f" and {len(names) - MAX_NAMES_SHOWN} more"
    problem = f"model: {short_repr(name)} is not served here; {shown} {'is' if len(names) == 1 else 'are'}"
    return NotFound(problem, code="model_not_found", param="model")


def with_default_model(body: bytes, model: str) -> bytes:
    """Returns the body, with `model` if it names none: if the field is missing, null or empty."""
    named = undecoded_fields(body).get("model")
    return with_model(body, model) if named is None or bytes(named) in (b"null", b'""') else body


def with_model(body: bytes, model: str) -> bytes:
    """Returns the same body with another `model`. Every other field stays as it was written. Raises `InvalidRequest` if
    the name of a field is not UTF-8."""
    return msgspec.json.encode(undecoded_fields(body) | {"model": msgspec.Raw(msgspec.json.encode(model))})
