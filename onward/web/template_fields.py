"""The fields of a chat request that its template is told: `chat_template_kwargs`, `reasoning_effort`."""

from typing import Any

from onward.web.body import wrong

NO_THINKING = "none"
EFFORTS = (NO_THINKING, "minimal", "low", "medium", "high", "xhigh")


def template_variables(kwargs: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """What `reasoning_effort` and `chat_template_kwargs` come to. The latter has the last word."""
    if effort is not None and effort not in EFFORTS:
        raise wrong("reasoning_effort", f"must be one of {', '.join(EFFORTS)}, got {effort!r:.80}")
    told: dict[str, Any] = {} if effort in (None, NO_THINKING) else {"reasoning_effort": effort}
    if effort == NO_THINKING:
        # Two names are in use for the same switch.
        told |= {"enable_thinking": False, "thinking": False}
    return told | (kwargs or {})
