"""The wire that is none: a function call. For `onward.LLM`, for tests, and for the simulator."""

from collections import deque
from typing import Protocol

from onward.proto.step import StepPlan, StepResult


class StepRunner(Protocol):
    """Whatever turns a plan into a result: the real runner, or the hash model."""

    def step(self, plan: StepPlan) -> StepResult: ...


class AsyncStepRunner(Protocol):
    """Computes elsewhere: begins a step at once, and has its result later."""

    def begin(self, plan: StepPlan) -> None: ...

    def finish(self) -> StepResult | None: ...


class InprocWorkerWire:
    """Keeps the order and the overlap of the other wires: a plan sent is executed when its result is asked for."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._plans: deque[StepPlan] = deque()

    def send(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def receive(self) -> StepResult | None:
        return self._runner.step(self._plans.popleft()) if self._plans else None


class AsyncWorkerWire:
    """To a runner whose steps go on while nobody looks. What it was at for somebody before is finished first."""

    def __init__(self, runner: AsyncStepRunner) -> None:
        self._runner = runner
        while runner.finish() is not None:
            pass

    def send(self, plan: StepPlan) -> None:
        self._runner.begin(plan)

    def receive(self) -> StepResult | None:
        return self._runner.finish()
