"""The router's metrics."""

from collections.abc import Callable

from onward.obs.metrics import REQUEST_BOUNDS_S, LabelValues, Registry

PAUSE_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class RouterMetrics:
    def __init__(
        self,
        registry: Registry,
        streams: Callable[[], dict[LabelValues, float]],
        instances: Callable[[], dict[LabelValues, float]],
        records: Callable[[], dict[LabelValues, float]],
    ) -> None:
        self.requests = registry.counter(
            "onward_router_requests_total", "HTTP responses that have begun", ["path", "status"]
        )
        self.attempts = registry.counter("onward_router_attempts_total", "Attempts, by their end", ["end"])
        self.resumes = registry.counter(
            "onward_router_resumes_total", "Resumed streams, by cause and outcome", ["cause", "outcome"]
        )
        self.pause = registry.histogram(
            "onward_router_resume_pause_seconds",
            "From the last event before a resume to the first event after it",
            PAUSE_BOUNDS_S,
        )
        self.queue_wait = registry.histogram(
            "onward_router_queue_wait_seconds", "From a request's arrival until an instance has begun to answer it"
        )
        self.time_to_first_token = registry.histogram(
            "onward_router_time_to_first_token_seconds",
            "From a request's arrival to its first token, over all attempts. Not of streams that a client continues.",
            REQUEST_BOUNDS_S,
        )
        self.budget_refusals = registry.counter(
            "onward_router_budget_refusals_total", "Attempts without progress that the retry budget refused"
        )
        self.overloads = registry.counter(
            "onward_router_overloads_total", "New requests refused because too many were waiting for an instance"
        )
        self.stale_events = registry.counter(
            "onward_router_stale_events_total", "Dropped events: of an older attempt, or repeated"
        )
        self.model_requests = registry.counter(
            "onward_router_model_requests_total",
            "Requests, by the model that generated their first token and the name in the request",
            ["model_name", "requested"],
        )
        registry.gauge(
            "onward_router_streams", "Clients' streams, by whether an attempt is running", ["state"], streams
        )
        registry.gauge("onward_router_instances", "Instances", ["role", "state", "model_name"], instances)
        registry.gauge("onward_router_records", "Streams kept for clients that have disconnected", [], records)
