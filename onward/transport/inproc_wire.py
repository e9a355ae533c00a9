"""Worker wires within one process, without sockets, for `onward.LLM` and for tests."""

from collections import deque
from typing import Protocol

from onward.proto.step import StepPlan, StepResult


class StepRunner(Protocol):
    """Executes step plans in the call: a model runner, or the hash model."""

    def step(self, plan: StepPlan) -> StepResult: ...


class AsyncStepRunner(Protocol):
    """Executes step plans on a device: `begin` starts a step, and `finish` waits for the result of the oldest one."""

    def begin(self, plan: StepPlan) -> None: ...

    def finish(self) -> StepResult | None: ...


class InprocWorkerWire:
    """Executes a plan when its result is received, not when the plan is sent. This keeps the order and the overlap of
    the other wires."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._plans: deque[StepPlan] = deque()

    def send(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def receive(self) -> StepResult | None:
        return self._runner.step(self._plans.popleft()) if self._plans else None


class AsyncWorkerWire:
    """A wire to a runner whose steps continue between calls. Steps of an earlier user are finished first."""

    def __init__(self, runner: AsyncStepRunner) -> None:
        self._runner = runner
        while runner.finish() is not None:
            pass

    def send(self, plan: StepPlan) -> None:
        self._runner.begin(plan)

    def receive(self) -> StepResult | None:
        return self._runner.finish()
