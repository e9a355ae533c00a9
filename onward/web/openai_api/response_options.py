"""The few fields of a request for a response that decide how it is served and kept. For the api, and for routers."""

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
    """Whether a request is for a response that can be asked for by its id."""
    return path == PATH and response_options(body).store is not False
