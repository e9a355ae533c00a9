"""The engine's two log lines: how the scheduler is doing, every few seconds, and how each request went, at its end.

Both are made from what was counted and from the time, so they say the same on every wire. Nothing here reads a clock or
writes anywhere.
"""

from dataclasses import dataclass

from onward.engine.request import FinishReason, Request
from onward.log import event as log_event
from onward.log import request_fields


@dataclass(slots=True, frozen=True)
class SchedulerStats:
    """Current counts, and totals since the engine started."""

    running: int
    waiting: int
    preempting: int
    used_blocks: int
    """Neither free nor merely cached."""
    num_blocks: int
    prompt_tokens: float
    cached_tokens: float
    """The part of the prompts that came from the prefix cache."""
    generated_tokens: float
    preemptions: float
    waiting_tokens: int = 0
    """Prompt tokens of waiting requests."""
    drafted_tokens: float = 0
    accepted_tokens: float = 0
    verifications: float = 0
    """Steps of a request that had drafts."""

    @property
    def busy(self) -> bool:
        return self.running + self.waiting + self.preempting > 0


class SchedulerStatLogger:
    """Makes the scheduler's periodic log line, and decides when it is due. Skips a line that would only say that the
    engine is still idle."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        """0 or less: never."""
        self._last_s: float | None = None
        self._last: SchedulerStats | None = None

    def is_due(self, now_s: float) -> bool:
        if self._interval_s <= 0:
            return False
        return self._last_s is None or now_s - self._last_s >= self._interval_s

    def line(self, counts: SchedulerStats, now_s: float) -> str | None:
        """Returns the log line about the time since the last call. Returns None on the first call, which has nothing to
        compare with, and if the engine is idle and nothing has changed. Must be called only when `is_due`."""
        last, last_s = self._last, self._last_s
        self._last, self._last_s = counts, now_s
        if last is None or last_s is None or (counts == last and not counts.busy):
            return None
        return format_scheduler_line(last, counts, now_s - last_s)


def format_scheduler_line(before: SchedulerStats, now: SchedulerStats, seconds: float) -> str:
    prompt_tokens = now.prompt_tokens - before.prompt_tokens
    cached_tokens = now.cached_tokens - before.cached_tokens
    fields: dict[str, object] = {}
    if now.verifications:  # Without verifications no request drafts.
        fields = format_draft_fields(
            int(now.drafted_tokens - before.drafted_tokens),
            int(now.accepted_tokens - before.accepted_tokens),
            int(now.verifications - before.verifications),
        )
    return log_event(
        "scheduler",
        running=now.running,
        waiting=now.waiting,
        waiting_tokens=now.waiting_tokens,
        preempting=now.preempting,
        kv_blocks=f"{now.used_blocks}/{now.num_blocks}",
        kv_use=f"{now.used_blocks / now.num_blocks:.1%}",
        prompt_tokens_per_s=f"{prompt_tokens / seconds:.1f}",
        output_tokens_per_s=f"{(now.generated_tokens - before.generated_tokens) / seconds:.1f}",
        cache_hit=f"{cached_tokens / prompt_tokens:.1%}" if prompt_tokens else "-",
        preemptions=int(now.preemptions - before.preemptions),
        **fields,
    )


def format_draft_fields(drafted: int, accepted: int, verifications: int) -> dict[str, object]:
    """Returns the log fields about drafts. `mean_length` is the mean number of tokens from a step with drafts: the
    accepted drafts and one more token."""
    return {
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": f"{accepted / drafted:.1%}" if drafted else "-",
        "mean_length": f"{1 + accepted / verifications:.2f}" if verifications else "-",
    }


def format_request_line(
    request: Request, reason: FinishReason, now_s: float, role: str, error_code: str | None = None
) -> str:
    first_s, scheduled_s = request.first_token_s, request.scheduled_s
    fields: dict[str, object] = {
        **request_fields(request.request_id, request.spec.client_request_id),
        "role": role,
        "reason": reason.value,
        "prompt": request.num_prompt,
        "output": request.num_generated,
        "cached": request.num_cached_tokens or 0,
        # From its scheduling, and from its arrival. A request that came with tokens had its first one elsewhere.
        "prefill": "-" if first_s is None or scheduled_s is None else first_s - scheduled_s,
        "ttft": "-" if first_s is None else first_s - request.submitted_s,
        "seconds": now_s - request.submitted_s,
        "preemptions": request.num_preemptions,
    }
    if (drafts := request.draft_acceptance).num_verifications:
        fields |= format_draft_fields(drafts.num_drafted, drafts.num_accepted, drafts.num_verifications)
    if error_code is not None:
        fields["error"] = error_code
    return log_event("request finished", **fields)
