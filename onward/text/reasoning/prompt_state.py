"""The rule by which a worker follows a request's thinking, from the model's tags and the request's budget."""

from collections.abc import Sequence

from onward.proto.reasoning_params import ReasoningParams
from onward.text.reasoning.reasoning_formats import ReasoningFormat
from onward.text.tokenizer import Tokenizer

PROMPT_END_TOKENS = 16
"""Number of last tokens of a prompt that show whether it has opened the reasoning."""


def starts_in_reasoning(
    reasoning_format: ReasoningFormat,
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    *,
    continues_message: bool = False,
) -> bool:
    """Returns whether an output begins inside the reasoning. With `continues_message`, the message began in the prompt,
    and only the prompt itself can have opened the reasoning."""
    prompt_end = tokenizer.decode(prompt_token_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
    return (
        reasoning_format.prompt_ends_inside(prompt_end)
        if continues_message
        else reasoning_format.output_starts_inside(prompt_end)
    )


def make_reasoning_params(
    reasoning_format: ReasoningFormat, tokenizer: Tokenizer, *, starts_inside: bool, budget: int | None
) -> ReasoningParams | None:
    """Returns the rule by which the worker follows the reasoning and its budget. Returns None if a tag is not a single
    token: it can then be written in many ways, and cannot be followed without the text."""
    begin_id, end_id = tokenizer.token_id(reasoning_format.begin), tokenizer.token_id(reasoning_format.end)
    if begin_id is None or end_id is None:
        return None
    prefix = tuple(tokenizer.encode(reasoning_format.forced_end_prefix, add_special_tokens=False))
    return ReasoningParams((begin_id,), (end_id,), starts_inside, budget, prefix)
