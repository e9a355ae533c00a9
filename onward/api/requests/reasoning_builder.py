"""A request's `thinking_budget`, as the rule by which a worker follows the thinking in the tokens."""

from collections.abc import Collection, Sequence

from onward.proto.reasoning_params import ReasoningParams
from onward.text.reasoning.prompt_state import make_reasoning_params, starts_in_reasoning
from onward.text.reasoning.reasoning_formats import ReasoningFormat
from onward.text.reasoning.reasoning_tracker import find_forbidden_forced_token
from onward.text.tokenizer import Tokenizer
from onward.web.json_body import field_error


def check_forced_end(params: ReasoningParams | None, end_token_ids: Collection[int], min_tokens: int) -> None:
    """Refuses a request whose budget forces a token that its `min_tokens` forbids."""
    token_id = None if params is None else find_forbidden_forced_token(params, end_token_ids, min_tokens)
    if params is not None and token_id is not None:
        problem = f"token {token_id} ends thinking when thinking_budget ({params.budget}) is used up, and min_tokens"
        raise field_error(
            "stop_token_ids", f"{problem} ({min_tokens}) forbids it there; leave it out or lower min_tokens"
        )


def build_reasoning_params(
    reasoning_format: ReasoningFormat | None,
    tokenizer: Tokenizer | None,
    prompt_token_ids: Sequence[int],
    budget: int | None,
    *,
    has_grammar: bool,
    continues_message: bool = False,
) -> ReasoningParams | None:
    """None where nobody needs to follow the thinking: only a budget, and a grammar for what comes behind it, do.
    `continues_message`: with a message that has begun in the prompt."""
    if reasoning_format is None or tokenizer is None:
        if budget is not None:
            raise field_error("thinking_budget", "this model does not mark its thinking, or --reasoning-parser is none")
        return None
    if budget is None and not has_grammar:
        return None
    starts_inside = starts_in_reasoning(
        reasoning_format, tokenizer, prompt_token_ids, continues_message=continues_message
    )
    params = make_reasoning_params(reasoning_format, tokenizer, starts_inside=starts_inside, budget=budget)
    if params is None and budget is not None:
        problem = f"the tags {reasoning_format.begin} and {reasoning_format.end} are not in this model's vocabulary"
        raise field_error("thinking_budget", f"{problem}, so thinking cannot be followed")
    return params
