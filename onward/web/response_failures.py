"""Failures in the words of responses."""

from typing import Any

from onward.proto.engine import ErrorInfo


def response_error_fields(info: ErrorInfo) -> dict[str, Any]:
    """OpenAI knows a few codes only; ours stands in `type`."""
    if info.status == 429:
        code = "rate_limit_exceeded"
    else:
        code = "invalid_prompt" if info.status == 400 else "server_error"
    return {"code": code, "message": info.message, "type": info.code, "param": info.param}
