"""The few fields of a request for a response that decide how it is served and stored, for api processes and routers."""

import msgspec

from onward.web.openai_api.response_ids import PATH


class ResponseOptions(msgspec.Struct, frozen=True):
    model: str = ""
    background: bool | None = None
    store: bool | None = None


_sketches = msgspec.json.Decoder(ResponseOptions)


def response_options(body: bytes) -> ResponseOptions:
    try:
        return _sketches.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ResponseOptions()


def is_stored(path: str, body: bytes) -> bool:
    """Returns whether a request is for a response that is stored under its id."""
    return path == PATH and response_options(body).store is not False
