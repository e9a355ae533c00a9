"""What a simulated client may say to every endpoint that generates, by the same names. None: it says nothing."""

from typing import Any

from onward.sim.scenario import SimRequest


def common_fields(request: SimRequest) -> dict[str, Any]:
    return {
        "seed": request.seed,
        "stop": request.stop or None,
        "presence_penalty": request.presence_penalty or None,
        "min_tokens": request.min_tokens or None,
        "ignore_eos": request.ignore_eos or None,
        "priority": request.priority or None,
        "deadline_ms": request.deadline_ms,
        "user": request.session or None,
        "cache_salt": request.cache_salt or None,
    }
