"""Thread pools for the work that an api process does before it submits a request: texts, grammars, clients' templates.

Each kind of work has threads of its own, so that slow work delays only its own kind. Each pool is fair between callers.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, TypeVar

from onward.clock import Clock
from onward.web.fair_executor import FairExecutor
from onward.web.fair_scheduler import FairSchedulerLimits

T = TypeVar("T")

TEXT_LIMITS = FairSchedulerLimits(
    running=3, running_per_caller=2, waiting=2048, waiting_per_caller=1024, bytes_per_caller=64 << 20
)
GRAMMAR_LIMITS = FairSchedulerLimits(
    running=2, running_per_caller=1, waiting=256, waiting_per_caller=64, refused_work_s=10.0
)
TEMPLATE_LIMITS = FairSchedulerLimits(
    running=2, running_per_caller=1, waiting=128, waiting_per_caller=32, refused_work_s=10.0
)

ExecutorFactory = Callable[[int, str], Executor]
"""Makes an executor with this number of threads and this name."""


@dataclass(frozen=True, slots=True)
class DeferredRender(Generic[T]):
    """The rest of the text work of a request with a client's template. It runs in the pool for templates."""

    call: Callable[[], T]


@dataclass(frozen=True, slots=True)
class PreprocessingExecutors:
    text: FairExecutor
    grammars: FairExecutor
    templates: FairExecutor

    async def run_preprocessing(self, caller: str, call: Callable[[], T | DeferredRender[T]], num_bytes: int = 0) -> T:
        """Runs `call`, which decodes, renders and tokenizes a request of this many bytes, and returns its result."""
        result = await self.text.run(caller, call, num_bytes)
        return await self.templates.run(caller, result.call) if isinstance(result, DeferredRender) else result


def make_executors(new_threads: ExecutorFactory, clock: Clock) -> PreprocessingExecutors:
    return PreprocessingExecutors(
        text=FairExecutor(new_threads(TEXT_LIMITS.running, "text"), TEXT_LIMITS, clock, "texts"),
        grammars=FairExecutor(
            new_threads(GRAMMAR_LIMITS.running, "grammars"), GRAMMAR_LIMITS, clock, "grammars", "grammars_busy"
        ),
        templates=FairExecutor(new_threads(TEMPLATE_LIMITS.running, "templates"), TEMPLATE_LIMITS, clock, "templates"),
    )
