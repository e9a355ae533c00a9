"""Builds the sampling parameters of one choice from the request's fields and the model's defaults."""

from collections.abc import Sequence
from typing import TypeVar

from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.schemas import GenerationRequest
from onward.proto.model import SamplingDefaults
from onward.proto.sampling_params import SamplingParams, clamp_temperature

NumberT = TypeVar("NumberT", int, float)


def build_sampling_params(
    prepared: PreparedRequest,
    choice_index: int,
    max_tokens: int,
    eos_token_ids: Sequence[int],
    defaults: SamplingDefaults,
) -> SamplingParams:
    request = prepared.request
    return SamplingParams(
        seed=prepared.attempt.seed,
        choice_index=choice_index,
        temperature=clamp_temperature(_first_given(request.temperature, defaults.temperature, 1.0)),
        top_k=max(0, _first_given(request.top_k, defaults.top_k, 0)),
        top_p=_first_given(request.top_p, defaults.top_p, 1.0),
        min_p=_first_given(request.min_p, defaults.min_p, 0.0),
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        end_token_ids=tuple(sorted(end_token_ids(request, eos_token_ids))),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_first_given(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=tuple(sorted((int(token_id), bias) for token_id, bias in (request.logit_bias or {}).items())),
        bad_words=prepared.bad_word_token_ids,
        allowed_token_ids=tuple(sorted({*(request.allowed_token_ids or ())})),
        logprobs=request.engine_logprobs,
        # Only the first choice of a prompt computes its logprobs, unless each choice returns them with its own (`echo`).
        prompt_logprobs=request.engine_prompt_logprobs
        if request.echoes_prompt_logprobs or choice_index % request.num_candidates == 0
        else None,
        grammar=None if prepared.grammar is None else prepared.grammar.grammar,
        reasoning=prepared.reasoning,
    )


def end_token_ids(request: GenerationRequest, eos_token_ids: Sequence[int]) -> set[int]:
    model_end_ids = [] if request.ignore_eos else eos_token_ids
    return {*model_end_ids, *(request.stop_token_ids or [])}


def _first_given(requested: NumberT | None, model_default: NumberT | None, default: NumberT) -> NumberT:
    if requested is not None:
        return requested
    return default if model_default is None else model_default
