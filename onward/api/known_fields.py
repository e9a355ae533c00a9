"""Fields of requests that we know and do not act on. What nobody knows is ignored, and counted.

A field that would change the answer is refused unless it says what we do anyway; one that would not is let pass.
"""

from collections.abc import Collection
from typing import Any

import msgspec

from onward.web.body import plain, wrong

# Each with the values that ask for nothing.
_INERT: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "include_stop_str_in_output": (False,),
    "return_token_ids": (False, True),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
}
_WHY = {"suffix": "not supported: this server continues a text, and does not fill in its middle"}

# For the books of whoever serves, or for speed alone: an answer is the same without them. `store` is for keeping
# answers at OpenAI's, `prediction` a guess at the answer.
_LABELS = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "parallel_tool_calls",
        "store",
        "prediction",
    }
)


def check_known(fields: dict[str, msgspec.Raw], body: bytes, own: Collection[str]) -> int:
    """Refuses what asks for something that we do not do. Returns how many fields nobody knows. `own`: those that the
    endpoint acts on."""
    for name in (fields.keys() & _INERT.keys()).difference(own):
        _refuse_unless_inert(name, plain(fields[name], body))
    return len(fields.keys() - _INERT.keys() - _LABELS - set(own))


def _refuse_unless_inert(name: str, value: Any) -> None:
    # `False == 0`, so the type is compared too, except between the two kinds of number.
    for inert in _INERT[name]:
        if value == inert and isinstance(value, bool) == isinstance(inert, bool):
            return
    if value is not None:
        raise wrong(name, _WHY.get(name, "not supported by this server"))
