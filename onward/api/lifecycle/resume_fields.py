"""Fields of a response that has ended without being complete (`pd_reschedule`, `abort` or an error), for continuing it.

Not streamed: each choice has `completion_token_ids`, all of its tokens, and `num_text_tokens`, how many of them its text
covers. A choice that was given up has the `error`. `seed` and `resume` are beside the choices.

Streamed: a choice that was cut, or that ends after another one was cut, has its ids on its last chunk. The stream's last
chunk has `seed` and `resume` beside its choice.

With an error, the same fields are in `partial` next to `error` (`partial_choices`; for a response that is not streamed,
`partial` has the whole body in its usual form).

    "resume": {"seed": 7, "generated_token_ids": [[5, 6], [9]], "generated_finish_reasons": ["stop", null]}

`resume` has the fields to add to the request, which is otherwise sent unchanged. They cover all choices, also those that
ended earlier in the stream. The new response begins where the text of the first one ended.
"""

from typing import Any

from onward.api.lifecycle.choice_output import ChoiceOutput
from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.request_output import RequestOutput
from onward.api.requests.schemas import GenerationRequest
from onward.proto.finish_reasons import INCOMPLETE_REASONS
from onward.web.error_format import error_fields


def choice_resume_fields(update: ChoiceUpdate) -> dict[str, Any]:
    """Returns the additional fields of a choice of an incomplete response."""
    fields: dict[str, Any] = {}
    if update.completion_token_ids is not None:
        fields["completion_token_ids"] = update.completion_token_ids
    if update.num_text_tokens is not None:
        fields["num_text_tokens"] = update.num_text_tokens
    if update.error is not None:
        fields["error"] = error_fields(update.error)
    return fields


def partial_choices(output: RequestOutput) -> dict[str, Any]:
    """Returns the choices of a stream that has failed, without their text."""
    updates = [output.partial_update(choice.index) for choice in output.choices]
    choices = [
        {"index": update.choice_index, "finish_reason": update.finish_reason} | choice_resume_fields(update)
        for update in updates
    ]
    return {"choices": choices}


def resume_fields(request: GenerationRequest, seed: int, output: RequestOutput) -> dict[str, Any]:
    """Returns the seed and the fields to add to the request. A request with `best_of` cannot be resumed from tokens,
    nor can one whose response is its prompt alone."""
    if request.selects_best or request.only_echoes:
        return {}
    token_ids = [choice.token_ids for choice in output.choices]
    resume: dict[str, Any] = {
        "seed": seed,
        "generated_token_ids": token_ids[0] if request.num_choices == 1 else token_ids,
        "generated_finish_reasons": [_final_finish_reason(choice) for choice in output.choices],
    }
    # Also if the client did not ask for it: an attempt from a router's tokens may be given up before it has rescored them.
    if request.rescore_from is not None or any(choice.pending_rescore is not None for choice in output.choices):
        resume["rescore_from"] = [_unscored_from(choice) for choice in output.choices]
    return {"seed": seed, "resume": resume}


def _final_finish_reason(choice: ChoiceOutput) -> str | None:
    return None if choice.finish_reason in INCOMPLETE_REASONS else choice.finish_reason


def _unscored_from(choice: ChoiceOutput) -> int:
    """Returns the position from which logprobs are still missing. Logprobs that have arrived are not requested again."""
    return choice.position - (0 if choice.pending_rescore is None else len(choice.pending_rescore.text_offsets))
