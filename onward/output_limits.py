"""Limits on the length of an output, and the check whether a list of tokens is already a complete output.

The api process and `onward.LLM` check clients' requests; the engine checks submitted requests by the same rule.
"""

from collections.abc import Sequence

from onward.errors import InvalidRequest
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import WorkerHello


def output_limit(
    num_prompt_tokens: int,
    max_tokens: int | None,
    min_tokens: int,
    worker: WorkerHello,
    prompt_param: str,
    max_tokens_param: str = "max_tokens",
    default: int = 0,
) -> int:
    """Returns how many tokens the output may have. Raises as `check_output_fits` does. `default` applies if
    `max_tokens` is None; 0 means as many as fit. A `default` that does not fit is lowered and causes no error."""
    check_output_fits(num_prompt_tokens, max_tokens, min_tokens, worker, prompt_param, max_tokens_param)
    if max_tokens is not None:
        return max_tokens
    max_len = worker.max_request_tokens
    return min(max_len - num_prompt_tokens, max(default, min_tokens) if default else max_len)


def check_output_fits(
    num_prompt_tokens: int,
    max_tokens: int | None,
    min_tokens: int,
    worker: WorkerHello,
    prompt_param: str,
    max_tokens_param: str = "max_tokens",
) -> None:
    """Raises `InvalidRequest` if prompt and output can never fit, before any work is done. The error names the field of
    the prompt or of the limit."""
    max_len = worker.max_request_tokens
    limit_name = "the context" if max_len == worker.max_model_len else "the KV pool"
    if num_prompt_tokens >= max_len:
        raise _too_long(
            prompt_param,
            f"the prompt has {num_prompt_tokens} tokens, which leaves no room for an answer: {limit_name} holds {max_len}, "
            f"so it is {num_prompt_tokens + 1 - max_len} too long",
        )
    if max_tokens is not None and num_prompt_tokens + max_tokens > max_len:
        raise _too_long(
            max_tokens_param,
            f"{num_prompt_tokens} prompt tokens and {max_tokens} of output exceed {limit_name} of {max_len} tokens "
            f"by {num_prompt_tokens + max_tokens - max_len}",
        )
    if num_prompt_tokens + min_tokens > max_len:
        raise _too_long(
            "min_tokens",
            f"{num_prompt_tokens} prompt tokens and min_tokens {min_tokens} exceed {limit_name} of {max_len} tokens "
            f"by {num_prompt_tokens + min_tokens - max_len}",
        )


def check_fits(num_tokens: int, worker: WorkerHello, param: str) -> None:
    """Raises `InvalidRequest` if a text does not fit. Nothing is generated from it, so it may use all positions."""
    max_len = worker.max_request_tokens
    if num_tokens > max_len:
        raise _too_long(
            param, f"it has {num_tokens} tokens, {num_tokens - max_len} more than the {max_len} that fit here"
        )


def find_end(
    token_ids: Sequence[int], sampling: SamplingParams, grammar_completed_at: int | None = None
) -> tuple[int, str] | None:
    """Returns how many of these tokens belong to the output and its finish reason, or None if the output has not ended.
    The first `grammar_completed_at` tokens complete its grammar."""
    for position, token_id in enumerate(token_ids):
        if position >= sampling.min_tokens and token_id in sampling.end_token_ids:
            return position + 1, "stop"
        if position + 1 == grammar_completed_at:
            return position + 1, "stop"
        if position + 1 == sampling.max_tokens:
            return position + 1, "length"
    return None


def _too_long(param: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {problem}", code="context_length_exceeded", param=param)
