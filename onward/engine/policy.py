"""The engine's choices: facts in, decision out. No state, no side effects; read this to know who wins."""

from collections.abc import Callable, Iterable

from onward.engine.request import Request

QueueKey = tuple[int, float, str]

CHARGES_TO_RUN_ALONE = 2
CHARGES_TO_FAIL = 3


def queue_key(request: Request) -> QueueKey:
    """Smaller is served first: priority, then arrival (which survives resubmission); the id settles ties."""
    return request.priority, request.arrival_s, request.request_id


def chunk_size(num_to_plan: int, budget: int) -> int:
    return min(num_to_plan, budget)


def may_admit(blocks_needed: int, blocks_available: int, num_running: int) -> bool:
    """Room for the whole list, and a block for each running request to grow into: who is let in too early is
    preempted at once."""
    return blocks_needed + num_running <= blocks_available


def choose_victim(
    needer: Request, running: Iterable[Request], frees: Callable[[Request], int], *, same_priority: bool
) -> Request | None:
    """Whom to preempt so that `needer` can go on: lowest priority, then latest arrival, then least work lost.

    Never one that comes before the needer in the queue's order, so the oldest of the highest priority never loses its
    blocks; and never one whose preemption frees nothing. With `same_priority` False only lower priorities are taken.
    """
    candidates = [
        request
        for request in running
        if request is not needer
        and (queue_key(request) > queue_key(needer) if same_priority else request.priority > needer.priority)
        and frees(request) > 0
    ]
    return max(candidates, key=lambda r: (r.priority, r.arrival_s, -r.num_computed, r.request_id), default=None)


def must_run_alone(request: Request) -> bool:
    """Twice under a crash without progress: the third time nobody else shall be hurt."""
    return request.crash_charges >= CHARGES_TO_RUN_ALONE
