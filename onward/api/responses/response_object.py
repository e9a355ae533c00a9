"""The fields of a response object: what the client has asked for, told again, and what became of it."""

from typing import Any

from onward.api.lifecycle.endpoint_adapter import ObjectHeader
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.responses.chat_request import ResponseChatRequest


def response_fields(head: ObjectHeader, request: ResponseChatRequest) -> dict[str, Any]:
    """All but those that change while the answer is made."""
    said = request.body
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created_s,
        "background": bool(said.background),
        "instructions": said.instructions,
        "max_output_tokens": said.max_output_tokens,
        "model": head.model,
        "parallel_tool_calls": said.parallel_tool_calls is not False,
        "previous_response_id": said.previous_response_id,
        "reasoning": {"effort": request.reasoning_effort, "summary": None},
        "temperature": 1.0 if said.temperature is None else said.temperature,
        "text": {"format": {"type": "text"} if said.text is None or said.text.format is None else said.text.format},
        "tool_choice": "auto" if said.tool_choice is None else said.tool_choice,
        "tools": said.tools or [],
        "top_logprobs": said.top_logprobs or 0,
        "top_p": 1.0 if said.top_p is None else said.top_p,
        "truncation": "disabled",
        "user": said.user,
        "metadata": said.metadata or {},
    }


def response_usage(usage: TokenUsage, num_reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
