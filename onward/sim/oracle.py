"""What a client should have got: from the hash model and the meaning of text alone, by none of the code under test.

Tokens come from `worker.expected_output`; their text is their bytes, joined and read as UTF-8, up to the first stop
string or the end token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from onward.proto.sampling_params import SamplingParams
from onward.sim.hash_worker import expected_output
from onward.sim.output_structures import STRUCTURES
from onward.sim.scenario import SimRequest
from onward.sim.vocabulary import END_ID, NUM_SAMPLED_IDS, grammars, token_bytes


@dataclass(frozen=True, slots=True)
class ExpectedChoice:
    """One choice of an undisturbed answer."""

    token_ids: list[int]
    text: str
    finish_reason: str


def expected_choice(request: SimRequest, prompt: Sequence[int], seed: int, index: int) -> ExpectedChoice:
    sampling = SamplingParams(
        seed=seed,
        choice_index=index,
        temperature=request.temperature,
        min_tokens=request.min_tokens,
        end_token_ids=() if request.ignore_eos else (END_ID,),
        presence_penalty=request.presence_penalty,
        grammar=STRUCTURES[request.structure].grammar if request.structure else None,
    )
    matcher = None if sampling.grammar is None else grammars().matcher(sampling.grammar)
    token_ids = expected_output(prompt, sampling, request.max_tokens, NUM_SAMPLED_IDS, matcher)
    stopped_at = _stop(token_ids, request)
    if stopped_at is not None:
        num_tokens, text = stopped_at
        return ExpectedChoice(token_ids[:num_tokens], text, "stop")
    has_ended = (token_ids[-1] == END_ID and not request.ignore_eos) or (matcher is not None and matcher.done)
    text = decode_text(token_ids)
    if has_ended and request.structure:
        assert STRUCTURES[request.structure].is_satisfied_by(text), f"{text!r} is no {request.structure}"
    return ExpectedChoice(token_ids, text, "stop" if has_ended else "length")


def decode_text(token_ids: Sequence[int]) -> str:
    return b"".join(token_bytes()[token_id] for token_id in token_ids).decode("utf-8", "replace")


def shown_text(token_ids: Sequence[int], request: SimRequest) -> list[str]:
    """What may be shown when an answer is cut behind these tokens: never half a character. Where a stop string may begin,
    less than all."""
    text = _complete(b"".join(token_bytes()[token_id] for token_id in token_ids))
    num_held = max((len(stop) for stop in request.stop or ()), default=0)
    return [text[: len(text) - held] for held in range(min(num_held, len(text)) + 1)]


def _stop(token_ids: Sequence[int], request: SimRequest) -> tuple[int, str] | None:
    """How many tokens there are when a stop string is complete, and the text before it."""
    if not request.stop:
        return None
    data, before = b"", ""
    for num_tokens, token_id in enumerate(token_ids, 1):
        if token_id == END_ID and not request.ignore_eos:
            return None
        data += token_bytes()[token_id]
        text = _complete(data)
        for end in range(len(before) + 1, len(text) + 1):
            found = [stop for stop in request.stop if text[:end].endswith(stop)]
            if found and num_tokens >= request.min_tokens:
                return num_tokens, text[: end - max(map(len, found))]
        before = text
    return None


def _complete(data: bytes) -> str:
    """Without the beginning of a character whose rest may come."""
    for num_cut in range(min(4, len(data) + 1)):
        tail = data[len(data) - num_cut :]
        if num_cut and _begins_character(tail):
            return data[: len(data) - num_cut].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


def _begins_character(tail: bytes) -> bool:
    """Whether these bytes are a character's first ones, and not all of them."""
    try:
        tail.decode("utf-8")
    except UnicodeDecodeError as fault:
        return fault.reason == "unexpected end of data" and fault.start == 0
    return False
