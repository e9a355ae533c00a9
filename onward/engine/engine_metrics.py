"""The engine's metrics. Gauges are read from the state when they are scraped, so they cannot drift."""

from collections import Counter as Tally
from collections.abc import Callable, Iterable
from typing import NamedTuple

from onward.engine.caller_limiter import AdmissionLimit
from onward.engine.request import FinishReason, RecomputeCause, Request, RequestStatus
from onward.obs.metrics import REQUEST_BOUNDS_S, TOKEN_BOUNDS, LabelValues, Registry
from onward.obs.shared_counters import resubmissions_counter, stale_events_counter


class CacheConfigLabels(NamedTuple):
    block_size: str
    num_kv_blocks: str
    prefix_caching: str


class EngineMetrics:
    def __init__(
        self,
        registry: Registry,
        live: Callable[[], Iterable[Request]],
        kv_blocks: Callable[[], dict[str, int]],
        waiting_tokens: Callable[[], int],
        cache_config: CacheConfigLabels,
    ) -> None:
        def requests_by_state() -> dict[LabelValues, float]:
            tally = Tally(request.status for request in live())
            return {(s.value,): tally[s] for s in RequestStatus if s is not RequestStatus.FINISHED}

        registry.gauge("onward_requests", "Requests by state.", ["state"], requests_by_state)
        registry.gauge(
            "onward_kv_blocks", "KV blocks by state.", ["state"], lambda: {(s,): n for s, n in kv_blocks().items()}
        )
        registry.gauge(
            "onward_waiting_tokens", "Prompt tokens of waiting requests.", [], lambda: {(): waiting_tokens()}
        )
        registry.gauge(
            "onward_kv_cache_usage_ratio",
            "Share of the KV blocks that are neither free nor cached.",
            [],
            lambda: {(): kv_usage_ratio(kv_blocks())},
        )
        registry.gauge(
            "onward_cache_config_info",
            "Always 1; its labels describe the KV cache.",
            CacheConfigLabels._fields,
            lambda: {cache_config: 1},
        )
        counter, histogram = registry.counter, registry.histogram
        self.finished = counter("onward_requests_finished_total", "Requests that have ended, by reason.", ["reason"])
        self.refusals = counter(
            "onward_refusals_total",
            "New requests refused by the engine with a 429, by the limit that was reached.",
            ["reason"],
        )
        self.preemptions = counter(
            "onward_preemptions_total", "Preempted requests: their slots and blocks went to other requests."
        )
        self.resubmissions = resubmissions_counter(registry)
        self.resubmissions.inc("worker_restart", by=0)  # a rate needs a first sample before the first event
        self.stale = stale_events_counter(registry)
        self.tokens = counter("onward_tokens_total", "Tokens: prompt, of which cached; generated.", ["kind"])
        self.steps = counter(
            "onward_steps_total", "Steps, by whether the plan was sent while another step ran.", ["overlapped"]
        )
        self.isolated_errors = counter("onward_isolated_faults_total", "Internal errors that ended only one request.")
        self.worker_losses = counter("onward_worker_losses_total", "Workers that died under this engine.")
        self.drafts = SpecDecodeMetrics(registry)
        self.recomputed = counter(
            "onward_recomputed_tokens_total", "Tokens computed again because their KV was lost, by cause.", ["cause"]
        )
        # A rate needs a first sample before the first event.
        for cause in RecomputeCause:
            self.recomputed.inc(cause.value, by=0)
        for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR):
            self.finished.inc(reason.value, by=0)
        for limit in AdmissionLimit:
            self.refusals.inc(limit.value, by=0)
        self.prefill_time = histogram(
            "onward_request_prefill_time_seconds", "From the first scheduling to the first token.", REQUEST_BOUNDS_S
        )
        self.time_to_first_token = histogram(
            "onward_engine_time_to_first_token_seconds",
            "The engine's share: from arrival in the engine to the first token, its queue included.",
        )
        self.inter_token = histogram("onward_inter_token_latency_seconds", "Between tokens of one request.")
        self.queue_time = histogram(
            "onward_request_queue_time_seconds", "From arrival in the engine to the first scheduling.", REQUEST_BOUNDS_S
        )
        self.step_time = histogram("onward_step_seconds", "The worker's time for a step.")
        self.step_tokens = histogram("onward_step_tokens", "Tokens computed by a step.", TOKEN_BOUNDS)
        self.ended = EndedRequestMetrics(registry)

    def record_recomputed(self, tokens: Iterable[tuple[RecomputeCause, int]]) -> None:
        for cause, num_tokens in tokens:
            self.recomputed.inc(cause.value, by=num_tokens)


def kv_usage_ratio(blocks: dict[str, int]) -> float:
    num_blocks = sum(blocks.values())
    return 1 - (blocks.get("free", 0) + blocks.get("cached", 0)) / num_blocks if num_blocks else 0.0


class EndedRequestMetrics:
    """Histograms of ended requests. Each is observed once per request, never per token."""

    def __init__(self, registry: Registry) -> None:
        histogram = registry.histogram
        self._prompt_tokens = histogram("onward_request_prompt_tokens", "Prompt length.", TOKEN_BOUNDS)
        self._output_tokens = histogram("onward_request_generation_tokens", "Output length.", TOKEN_BOUNDS)
        self._max_tokens = histogram("onward_request_max_tokens", "Maximum output length of a request.", TOKEN_BOUNDS)
        self._decode_time = histogram(
            "onward_request_decode_time_seconds", "From the first token to the last.", REQUEST_BOUNDS_S
        )
        self._inference_time = histogram(
            "onward_request_inference_time_seconds", "From the first scheduling to the last token.", REQUEST_BOUNDS_S
        )
        self._time_per_token = histogram(
            "onward_request_time_per_output_token_seconds", "Mean time between the tokens of a request."
        )

    def record(self, request: Request) -> None:
        """Times are those of requests that began here: of one that came with tokens, the beginning is not known."""
        self._prompt_tokens.observe(request.num_prompt)
        self._output_tokens.observe(request.num_generated)
        self._max_tokens.observe(request.max_output_tokens)
        first_s, last_s, scheduled_s = request.first_token_s, request.last_token_s, request.scheduled_s
        if first_s is None or last_s is None:
            return
        self._decode_time.observe(last_s - first_s)
        if scheduled_s is not None:
            self._inference_time.observe(last_s - scheduled_s)
        if request.num_generated > 1:
            self._time_per_token.observe((last_s - first_s) / (request.num_generated - 1))


class SpecDecodeMetrics:
    """Counts drafts, by their place behind the newest token. Those of a step are added up first, and counted once."""

    def __init__(self, registry: Registry) -> None:
        counter = registry.counter
        self._drafted = counter(
            "onward_spec_drafted_tokens_total",
            "Draft tokens, by their position after the newest token (1 is the first).",
            ["place"],
        )
        self._accepted = counter(
            "onward_spec_accepted_tokens_total",
            "Draft tokens that were accepted, by their position after the newest token (1 is the first).",
            ["place"],
        )
        self._verifications = counter(
            "onward_spec_verifications_total",
            "Steps of a request that had draft tokens. Each yields the accepted tokens and one more.",
        )
        self._of_step: list[tuple[int, int]] = []

    def record(self, num_drafted: int, num_accepted: int) -> None:
        self._of_step.append((num_drafted, num_accepted))

    def flush_step(self) -> None:
        if not self._of_step:
            return
        for position in range(1, 1 + max(drafted for drafted, _ in self._of_step)):
            self._drafted.inc(str(position), by=sum(drafted >= position for drafted, _ in self._of_step))
            if accepted := sum(accepted >= position for _, accepted in self._of_step):
                self._accepted.inc(str(position), by=accepted)
        self._verifications.inc(by=len(self._of_step))
        self._of_step.clear()

    @property
    def totals(self) -> tuple[float, float, float]:
        """Drafted, accepted, verifications."""
        return self._drafted.total(), self._accepted.total(), self._verifications.value()
