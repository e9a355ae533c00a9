"""Where an output ends by its tokens alone: what fits, and whether a list of tokens has ended already."""

from collections.abc import Sequence

from onward.errors import InvalidRequest
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import WorkerHello


def output_limit(
    num_prompt: int,
    asked: int | None,
    min_tokens: int,
    worker: WorkerHello,
    prompt_param: str,
    asked_param: str = "max_tokens",
    default: int = 0,
) -> int:
    """How many tokens the output may have. Refuses what can never fit, before any work is done, by the names of the fields
    that prompt and limit were given in. `default`: where no limit was asked for; 0: what fits. It refuses nothing."""
    pool = worker.num_blocks * worker.block_size
    room = min(worker.max_model_len, pool)
    name = "the context" if worker.max_model_len <= pool else "the KV pool"
    if num_prompt >= room:
        raise _too_long(
            prompt_param,
            f"the prompt has {num_prompt} tokens, which leaves no room for an answer: {name} holds {room}, "
            f"so it is {num_prompt + 1 - room} too long",
        )
    if asked is not None and num_prompt + asked > room:
        raise _too_long(
            asked_param,
            f"{num_prompt} prompt tokens and {asked} of output exceed {name} of {room} tokens "
            f"by {num_prompt + asked - room}",
        )
    if num_prompt + min_tokens > room:
        raise _too_long(
            "min_tokens",
            f"{num_prompt} prompt tokens and min_tokens {min_tokens} exceed {name} of {room} tokens "
            f"by {num_prompt + min_tokens - room}",
        )
    if asked is not None:
        return asked
    return min(room - num_prompt, max(default, min_tokens) if default else room)


def check_fits(num_tokens: int, worker: WorkerHello, param: str) -> None:
    """A text of which nothing is generated may fill all there is."""
    room = min(worker.max_model_len, worker.num_blocks * worker.block_size)
    if num_tokens > room:
        raise _too_long(param, f"it has {num_tokens} tokens, {num_tokens - room} more than the {room} that fit here")


def find_end(
    token_ids: Sequence[int], sampling: SamplingParams, grammar_end: int | None = None
) -> tuple[int, str] | None:
    """If these tokens have ended an output: how many of them belong to it, and why it ended. `grammar_completed_at` of them
    complete its grammar."""
    for position, token_id in enumerate(token_ids):
        if position >= sampling.min_tokens and token_id in sampling.end_token_ids:
            return position + 1, "stop"
        if position + 1 == grammar_end:
            return position + 1, "stop"
        if position + 1 == sampling.max_tokens:
            return position + 1, "length"
    return None


def _too_long(param: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {problem}", code="context_length_exceeded", param=param)
