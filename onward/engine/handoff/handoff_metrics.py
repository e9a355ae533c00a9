"""Metrics and log lines of handoffs between instances, for both sides. Gauges are read from the state."""

import logging
from collections.abc import Callable

from onward.log import event as log_event
from onward.log import request_fields
from onward.obs.metrics import LabelValues, Registry
from onward.proto.engine import ErrorInfo

log = logging.getLogger(__name__)

Tally = Callable[[], dict[str, int]]


class HandoffMetrics:
    def __init__(self, registry: Registry, *, decode_states: Tally, prefill_states: Tally, leases: Tally) -> None:
        def handoff_states() -> dict[LabelValues, float]:
            decode = {("decode", state): float(n) for state, n in decode_states().items()}
            return decode | {("prefill", state): float(n) for state, n in prefill_states().items()}

        registry.gauge(
            "onward_pd_handoffs",
            "Handoffs in progress, by this instance's side and state.",
            ["side", "state"],
            handoff_states,
        )
        registry.gauge(
            "onward_pd_leases",
            "Leases on this instance's blocks, by state.",
            ["state"],
            lambda: {(s,): n for s, n in leases().items()},
        )
        counter = registry.counter
        self.offers = counter(
            "onward_pd_offers_total", "Offers to compute a prompt, by this instance's side.", ["side"]
        )
        self.grants = counter("onward_pd_grants_total", "Leases granted to peers.")
        self.refusals = counter(
            "onward_pd_refusals_total", "Handoffs that were refused, by side and reason.", ["side", "reason"]
        )
        self.ended = counter(
            "onward_pd_handoffs_total", "Handoffs that have ended, by side and outcome.", ["side", "outcome"]
        )
        self.fallbacks = counter(
            "onward_pd_prefill_fallbacks_total",
            "Prompts whose handoff failed, by where they were computed instead.",
            ["to"],
        )
        self.bytes = counter(
            "onward_pd_transfer_bytes_total",
            "KV bytes of completed transfers, by backend and direction.",
            ["backend", "direction"],
        )
        self.seconds = counter(
            "onward_pd_transfer_seconds_total",
            "Duration of completed KV transfers, by backend and direction.",
            ["backend", "direction"],
        )
        self.unexpected_reports = counter(
            "onward_pd_stray_reports_total", "Reports of KV transfers that have already ended on this side."
        )
        self.latency = registry.histogram(
            "onward_pd_handoff_seconds", "From asking a peer to having the KV and the first token."
        )


def log_failed_handoff(side: str, request_id: str, peer: str | None, error: ErrorInfo, label: str = "") -> None:
    """Logs a failed handoff. `label` is the client's label of the request, or empty if this instance does not know
    it."""
    fields = {"peer": peer, "code": error.code, "stage": error.stage or "-", "error": error.message}
    log.info(log_event("handoff failed", side=side, **request_fields(request_id, label), **fields))
