"""Of a prompt's candidates, those that an answer has: the likeliest ones, by the mean logprob of their tokens."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from onward.api.pieces import Piece
from onward.api.requests import GenerationRequest


def with_shared_prompts(choices: Sequence[Piece], num_each: int) -> list[Piece]:
    """The first choice of a prompt has looked at it for all."""
    return [
        replace(piece, prompt_logprobs=group[0].prompt_logprobs)
        for group in _groups(choices, num_each)
        for piece in group
    ]


def best_of_each(choices: Sequence[Piece], request: GenerationRequest) -> list[Piece]:
    """Numbered as the answer shows them, the best of each prompt first. Equally likely ones keep their order."""
    best: list[Piece] = []
    for group in _groups(choices, request.num_candidates):
        best += sorted(group, key=mean_logprob, reverse=True)[: request.num_told]
    hidden = {"logprobs": None, "text_offsets": None} if request.num_logprobs is None else {}
    return [replace(piece, choice=index, **hidden) for index, piece in enumerate(best)]


def mean_logprob(piece: Piece) -> float:
    scores = [one.logprob for one in piece.logprobs or []]
    return sum(scores) / len(scores) if scores else float("-inf")


def _groups(choices: Sequence[Piece], num_each: int) -> Iterator[Sequence[Piece]]:
    for first in range(0, len(choices), num_each):
        yield choices[first : first + num_each]
