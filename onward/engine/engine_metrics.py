"""What the engine counts. Gauges are read from the state itself when somebody asks, so they cannot drift."""

from collections import Counter as Tally
from collections.abc import Callable, Iterable

from onward.engine.request import Request, RequestStatus
from onward.obs.metrics import LabelValues, Registry
from onward.obs.shared_counters import resubmissions_counter, stale_events_counter


class EngineMetrics:
    def __init__(
        self,
        registry: Registry,
        live: Callable[[], Iterable[Request]],
        kv_blocks: Callable[[], dict[str, int]],
        waiting_tokens: Callable[[], int],
    ) -> None:
        def requests_by_state() -> dict[LabelValues, float]:
            tally = Tally(request.status for request in live())
            return {(s.value,): tally[s] for s in RequestStatus if s is not RequestStatus.FINISHED}

        registry.gauge("onward_requests", "Requests by state.", ["state"], requests_by_state)
        registry.gauge(
            "onward_kv_blocks", "KV blocks by state.", ["state"], lambda: {(s,): n for s, n in kv_blocks().items()}
        )
        registry.gauge(
            "onward_waiting_tokens", "Prompt tokens of requests that wait.", [], lambda: {(): waiting_tokens()}
        )
        counter, histogram = registry.counter, registry.histogram
        self.finished = counter("onward_requests_finished_total", "Requests that have ended, by reason.", ["reason"])
        self.refusals = counter(
            "onward_refusals_total", "New requests turned away, by the bound that was hit.", ["reason"]
        )
        self.preemptions = counter("onward_preemptions_total", "Requests whose slot and blocks were taken away.")
        self.resubmissions = resubmissions_counter(registry)
        self.stale = stale_events_counter(registry)
        self.tokens = counter("onward_tokens_total", "Tokens: prompt, of which cached; generated.", ["kind"])
        self.steps = counter(
            "onward_steps_total", "Steps, by whether the plan was sent while another step ran.", ["overlapped"]
        )
        self.isolated_errors = counter("onward_isolated_faults_total", "Faults that ended one request and no other.")
        self.worker_losses = counter("onward_worker_losses_total", "Workers that died under this engine.")
        self.drafts = SpecDecodeMetrics(registry)
        self.prefill_time = histogram("onward_ttft_seconds", "From the first scheduling to the first token.")
        self.time_to_first_token = histogram(
            "onward_ttft_s_seconds", "From arrival to the first token, queue included."
        )
        self.inter_token = histogram("onward_inter_token_seconds", "Between tokens of one request.")
        self.queue_time = histogram("onward_queue_seconds", "From arrival to the first scheduling.")
        self.step_time = histogram("onward_step_seconds", "Time a worker spends on a step.")


class SpecDecodeMetrics:
    """Counts drafts, by their place behind the newest token. Those of a step are added up first, and counted once."""

    def __init__(self, registry: Registry) -> None:
        counter = registry.counter
        self._drafted = counter(
            "onward_spec_drafted_tokens_total",
            "Tokens that were guessed, by their place behind the newest one (1 is the first).",
            ["place"],
        )
        self._accepted = counter(
            "onward_spec_accepted_tokens_total", "Guessed tokens that were right, by their place.", ["place"]
        )
        self._verifications = counter(
            "onward_spec_verifications_total",
            "Steps of a request that had guesses. Each gives the accepted tokens and one more.",
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
