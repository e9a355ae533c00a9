"""The rule by which a worker follows a request's thinking, from the model's tags and the request's budget."""

from collections.abc import Sequence

from onward.proto.thinking import ThinkingRule
from onward.text.reasoning.tags import ReasoningFormat
from onward.text.tokenizer import Tokenizer

PROMPT_END_TOKENS = 16
"""So many of a prompt's last tokens say whether it has opened the thinking."""


def is_open_behind(
    form: ReasoningFormat, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, goes_on: bool = False
) -> bool:
    """Whether an output begins inside the thinking. `goes_on`: its message has begun in the prompt, and whoever wrote that
    has said so if it is thinking."""
    end = tokenizer.decode(prompt_token_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
    return form.is_opened_by(end) if goes_on else form.is_open(end)


def thinking_rule(
    form: ReasoningFormat, tokenizer: Tokenizer, *, begins_inside: bool, budget: int | None
) -> ThinkingRule | None:
    """None if the tags are no tokens of their own: the same tag may be spelled in many ways then, and cannot be followed
    without the text."""
    begin, end = tokenizer.token_id(form.begin), tokenizer.token_id(form.end)
    if begin is None or end is None:
        return None
    lead = tuple(tokenizer.encode(form.forced_lead, add_special_tokens=False))
    return ThinkingRule((begin,), (end,), begins_inside, budget, lead)
