"""The fields of a response object: what the client has asked for, told again, and what became of it."""

from typing import Any

from onward.api.lifecycle.endpoint_adapter import ObjectHeader
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.responses.chat_request import ResponseChatRequest


def response_fields(header: ObjectHeader, request: ResponseChatRequest) -> dict[str, Any]:
    """All but those that change while the answer is made."""
    body = request.body
    return {
        "id": header.id,
        "object": "response",
        "created_at": header.created_s,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": header.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": request.reasoning_effort, "summary": None},
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"} if body.text is None or body.text.format is None else body.text.format},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
        "metadata": body.metadata or {},
    }


def response_usage(usage: TokenUsage, num_reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
