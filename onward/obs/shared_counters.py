"""Counters that more than one kind of process has, with the same name and meaning."""

from onward.obs.metrics import Counter, Registry


def stale_events_counter(registry: Registry) -> Counter:
    return registry.counter(
        "onward_stale_events_total",
        "Dropped messages about an epoch, request or position that has ended, by kind.",
        ["kind"],
    )


def resubmissions_counter(registry: Registry) -> Counter:
    return registry.counter(
        "onward_resubmissions_total", "Requests that were started again with their tokens so far, by cause.", ["cause"]
    )
