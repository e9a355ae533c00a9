"""Admission: checks every request before it takes a place in the queue."""

from dataclasses import dataclass

from onward.config import EngineConfig
from onward.engine.caller_limiter import AdmissionLimit, AdmissionRefusal
from onward.engine.request import FinishReason, Request
from onward.engine.scheduling import scheduling_policy
from onward.engine.service_rates import ServiceRates
from onward.engine.step_result_processor import stop_reason
from onward.errors import InvalidRequest, NotFound, Overloaded, PdError
from onward.output_limits import check_fits, output_limit
from onward.pd.handoff_events import HandoffKey
from onward.proto.engine import Submit
from onward.proto.handoff import PrefillRequest
from onward.proto.step import WorkerHello


@dataclass(slots=True, frozen=True)
class EngineLimits:
    worker: WorkerHello
    """The worker that the engine has started with; a restarted one has the same pool."""
    num_drafts: int
    """Draft tokens of one request in one step, at most."""


def create_request(submit: Submit, api_id: str, limits: EngineLimits, now_s: float) -> Request:
    """Returns the request for the engine. Raises an error with the number of excess tokens if it is too long."""
    sampling = submit.sampling_params
    num_prompt = len(submit.prompt_token_ids)
    if num_prompt == 0:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if sampling.pooling is not None:
        # An embedding request samples no token: the output of its last row is the vector.
        check_fits(num_prompt, limits.worker, "prompt")
        max_output_tokens = 1
    elif sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {sampling.max_tokens}; it must be at least 1", param="max_tokens")
    else:
        # `min_tokens` is the caller's to check: here it only delays a stop, and max_tokens ends the output anyway.
        max_output_tokens = output_limit(num_prompt, sampling.max_tokens, 0, limits.worker, prompt_param="prompt")
    return _new_request(submit, api_id, max_output_tokens, limits, now_s, score_from=_score_from_index(submit))


def _new_request(
    spec: Submit,
    api_id: str,
    max_output_tokens: int,
    limits: EngineLimits,
    now_s: float,
    *,
    score_from: int | None,
    handoff: HandoffKey | None = None,
) -> Request:
    wanted_drafts = limits.num_drafts if spec.max_draft_tokens is None else spec.max_draft_tokens
    return Request(
        spec=spec,
        api_id=api_id,
        token_ids=spec.prompt_token_ids + spec.generated_token_ids,
        max_output_tokens=max_output_tokens,
        arrival_s=scheduling_policy.credited_arrival_s(now_s, spec.waited_s),
        submitted_s=now_s,
        deadline_at_s=None if spec.deadline_in_s is None else now_s + spec.deadline_in_s,
        worker_crashes=spec.worker_crashes,
        engine_crashes=spec.engine_crashes,
        crash_charge_position=len(spec.generated_token_ids),
        num_cached_tokens=spec.num_cached_tokens,
        score_from=score_from,
        handoff=handoff,
        max_drafts=max(0, min(wanted_drafts, limits.num_drafts)),
    )


def _score_from_index(submit: Submit) -> int | None:
    """Returns `rescore_from` as an index into prompt and output tokens together, or None if nothing is rescored. The
    lowest index is 1, because the first token of the prompt follows nothing and has no score."""
    if submit.rescore_from is None:
        return None
    return 1 if submit.rescore_from < 0 else len(submit.prompt_token_ids) + submit.rescore_from


def create_peer_prefill_request(
    prefill: PrefillRequest, key: HandoffKey, limits: EngineLimits, now_s: float
) -> Request:
    """Returns a request for a peer's prompt, which ends with its first token. Raises `PdError` if it is invalid or does not
    fit."""
    length = len(prefill.token_ids)
    if not 0 < prefill.num_prompt <= length:
        raise PdError(
            "pd_prefill_failed", f"{prefill.num_prompt} of {length} tokens cannot be the prompt", stage="prefill"
        )
    max_tokens = limits.worker.max_request_tokens
    if length > max_tokens:
        message = f"{length} tokens are more than the {max_tokens} that fit into this prefill instance"
        raise PdError("pd_prefill_failed", message, stage="prefill")
    spec = Submit(
        seq=0,
        request_id=f"{prefill.request_id}@{key.decode_incarnation}.{key.handoff_id}",
        epoch=0,
        prompt_token_ids=prefill.token_ids[: prefill.num_prompt],
        sampling_params=prefill.sampling_params,
        generated_token_ids=prefill.token_ids[prefill.num_prompt :],
        waited_s=prefill.waited_s,
        deadline_in_s=prefill.deadline_in_s,
        priority=prefill.priority,
        cache_salt=prefill.cache_salt,
        worker_crashes=prefill.worker_crashes,
        max_draft_tokens=prefill.max_draft_tokens,
        client_request_id=prefill.client_request_id,
    )
    num_output = length - prefill.num_prompt + 1
    return _new_request(spec, "", num_output, limits, now_s, score_from=prefill.rescore_from, handoff=key)


@dataclass(slots=True, frozen=True)
class QueueBacklog:
    """Requests that wait for a slot, without those that get a free slot in the next plan."""

    num_requests: int
    num_tokens: int
    """Prompt tokens of these requests."""


def counts_as_new(submit: Submit) -> bool:
    """Returns whether the request is subject to the limits of the queue and of its API key. An attempt that a server
    repeats after a failure is not. A stream that its client resumes is, like a new request: `api.lifecycle.resume`
    says so with `admit_as_new`. Tokens or a cursor in the request are no proof, because any client can send them."""
    return submit.epoch == 1 or submit.admit_as_new


def check_same_caller(known: Request, request: Request) -> None:
    """Raises `NotFound` if the live request with the same id belongs to another caller. Any client can write any
    request id into a cursor, so the id does not prove that the request is its own."""
    if known.caller != request.caller:
        raise NotFound("no such stream", code="stream_unknown", param="Last-Event-ID")


def check_queue(
    backlog: QueueBacklog, num_tokens: int, config: EngineConfig, rates: ServiceRates, now_s: float
) -> AdmissionRefusal | None:
    """Returns a refusal if a prompt of `num_tokens` finds the queue full. An empty queue accepts a prompt of any
    length."""
    if backlog.num_requests <= 0:
        return None
    if (excess := backlog.num_requests + 1 - config.max_queue) > 0:
        retry_after_s = scheduling_policy.retry_after_s(excess, rates.freed_slots.per_s(now_s))
        message = f"{backlog.num_requests} requests are waiting already, of {config.max_queue} at most (max_queue)"
        return AdmissionRefusal(AdmissionLimit.QUEUE_REQUESTS, Overloaded(message, retry_after_s=retry_after_s))
    if (excess := backlog.num_tokens + num_tokens - config.max_queue_tokens) > 0:
        retry_after_s = scheduling_policy.retry_after_s(excess, rates.prompt_tokens.per_s(now_s))
        message = (
            f"prompts of {backlog.num_tokens} tokens are waiting already, and {num_tokens} more would be over the "
            f"{config.max_queue_tokens} that may (max_queue_tokens)"
        )
        return AdmissionRefusal(AdmissionLimit.QUEUE_TOKENS, Overloaded(message, retry_after_s=retry_after_s))
    return None


def finish_reason_of_given_tokens(request: Request) -> FinishReason | None:
    """Returns why the output ends within the tokens that came with the request, or None if it goes on."""
    reasons = (stop_reason(request, position) for position in range(request.num_generated))
    return next((reason for reason in reasons if reason), None)
