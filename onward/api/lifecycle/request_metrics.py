"""Latency metrics of whole requests, as the api process that serves them measures them.

An engine restart is part of a request's latency, which is not measured anew. Each value is observed once per request.
"""

from onward.obs.metrics import REQUEST_BOUNDS_S, Registry


class RequestLatencyMetrics:
    def __init__(self, registry: Registry) -> None:
        self._time_to_first_token = registry.histogram(
            "onward_time_to_first_token_seconds",
            "From a request's arrival, at a router or here, to its first token: queues, prompt and restarts included.",
            REQUEST_BOUNDS_S,
        )
        self._latency = registry.labelled_histogram(
            "onward_e2e_request_latency_seconds",
            "From a request's arrival, at a router or here, to its end, by how it ended.",
            ["finish_reason"],
            REQUEST_BOUNDS_S,
        )

    def record_first_token(self, arrived_at_s: float, now_s: float) -> None:
        self._time_to_first_token.observe(max(0.0, now_s - arrived_at_s))

    def record_end(self, finish_reason: str, arrived_at_s: float, now_s: float) -> None:
        self._latency.observe(max(0.0, now_s - arrived_at_s), finish_reason)
