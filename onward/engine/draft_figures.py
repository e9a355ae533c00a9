"""Counts drafts, by their place behind the newest token: a step's are added up first, and counted once."""

from onward.obs.metrics import Registry


class SpecDecodeMetrics:
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
