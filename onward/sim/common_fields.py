"""What a simulated client may say to every endpoint that generates, by the same names. None: it says nothing."""

from typing import Any

from onward.sim.scenario import SimRequest


def common_fields(ask: SimRequest) -> dict[str, Any]:
    return {
        "seed": ask.seed,
        "stop": ask.stop or None,
        "presence_penalty": ask.presence_penalty or None,
        "min_tokens": ask.min_tokens or None,
        "ignore_eos": ask.ignore_eos or None,
        "priority": ask.priority or None,
        "deadline_ms": ask.deadline_ms,
        "user": ask.session or None,
        "cache_salt": ask.cache_salt or None,
    }
