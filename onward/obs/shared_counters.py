"""Counters that more than one kind of process keeps a share of: one name, one meaning."""

from onward.obs.metrics import Counter, Registry


def stale_events_counter(registry: Registry) -> Counter:
    return registry.counter(
        "onward_stale_events_total", "Messages about an epoch, request or position that is over, dropped.", ["kind"]
    )


def resubmissions_counter(registry: Registry) -> Counter:
    return registry.counter(
        "onward_resubmissions_total", "Requests that were started again from their tokens so far, by cause.", ["cause"]
    )
