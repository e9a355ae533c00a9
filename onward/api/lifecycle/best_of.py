"""Of a prompt's candidates, those that an answer has: the likeliest ones, by the mean logprob of their tokens."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.requests.schemas import GenerationRequest


def with_shared_prompt_logprobs(choices: Sequence[ChoiceUpdate], num_candidates: int) -> list[ChoiceUpdate]:
    """The first choice of a prompt has looked at it for all."""
    return [
        replace(update, prompt_logprobs=group[0].prompt_logprobs)
        for group in _groups(choices, num_candidates)
        for update in group
    ]


def select_best(choices: Sequence[ChoiceUpdate], request: GenerationRequest) -> list[ChoiceUpdate]:
    """Numbered as the answer shows them, the best of each prompt first. Equally likely ones keep their order."""
    best: list[ChoiceUpdate] = []
    for group in _groups(choices, request.num_candidates):
        best += sorted(group, key=mean_logprob, reverse=True)[: request.num_returned]
    hidden = {"logprobs": None, "text_offsets": None} if request.num_logprobs is None else {}
    return [replace(update, choice_index=index, **hidden) for index, update in enumerate(best)]


def mean_logprob(update: ChoiceUpdate) -> float:
    logprobs = [entry.logprob for entry in update.logprobs or []]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def _groups(choices: Sequence[ChoiceUpdate], num_candidates: int) -> Iterator[Sequence[ChoiceUpdate]]:
    for first in range(0, len(choices), num_candidates):
        yield choices[first : first + num_candidates]
