"""The queues for what an api process does before the engine hears of a request: texts, grammars, clients' templates.

Each has threads of its own, so that slow work of one kind delays only that kind; within each, callers have fair shares.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, TypeVar

from onward.clock import Clock
from onward.web.fair_order import QueueBounds
from onward.web.fair_queue import FairQueue

T = TypeVar("T")

TEXTS = QueueBounds(running=3, running_per_caller=2, waiting=2048, waiting_per_caller=1024, bytes_per_caller=64 << 20)
GRAMMARS = QueueBounds(running=2, running_per_caller=1, waiting=256, waiting_per_caller=64, refused_s=10.0)
TEMPLATES = QueueBounds(running=2, running_per_caller=1, waiting=128, waiting_per_caller=32, refused_s=10.0)

NewThreads = Callable[[int, str], Executor]
"""So many, by this name."""


@dataclass(frozen=True, slots=True)
class ByTemplate(Generic[T]):
    """Text work that has come to a client's template, which is rendered apart from texts."""

    call: Callable[[], T]


@dataclass(frozen=True, slots=True)
class WorkQueues:
    texts: FairQueue
    grammars: FairQueue
    templates: FairQueue

    async def run_text(self, caller: str, call: Callable[[], T | ByTemplate[T]], num_bytes: int = 0) -> T:
        """Decoding, rendering and tokenizing a request of so many bytes."""
        made = await self.texts.run(caller, call, num_bytes)
        return await self.templates.run(caller, made.call) if isinstance(made, ByTemplate) else made


def work_queues(new_threads: NewThreads, clock: Clock) -> WorkQueues:
    return WorkQueues(
        texts=FairQueue(new_threads(TEXTS.running, "text"), TEXTS, clock, "texts"),
        grammars=FairQueue(new_threads(GRAMMARS.running, "grammars"), GRAMMARS, clock, "grammars", "grammars_busy"),
        templates=FairQueue(new_threads(TEMPLATES.running, "templates"), TEMPLATES, clock, "templates"),
    )
