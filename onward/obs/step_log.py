"""The engine's last steps: when each was planned, whether another one was in flight then, and when its result came."""

import logging
from collections import deque
from pathlib import Path

import msgspec

from onward import log
from onward.errors import StartupError
from onward.proto.step import StepPlan

logger = logging.getLogger(__name__)

MAX_STEP_RECORDS = 4096


class StepRecord(msgspec.Struct):
    step: int
    planned_s: float
    overlapped: bool
    """The plan was sent before the result of the step before it had come."""
    num_run: int
    num_tokens: int
    num_assigned: int
    num_preempted: int
    result_s: float | None = None


class StepLog:
    def __init__(self) -> None:
        self.records: deque[StepRecord] = deque(maxlen=MAX_STEP_RECORDS)
        self._open: dict[int, StepRecord] = {}
        self._finished: deque[StepRecord] = deque(maxlen=MAX_STEP_RECORDS)

    def record_plan(self, plan: StepPlan, now_s: float, *, overlapped: bool) -> StepRecord:
        num_tokens = sum(run.num_tokens for run in plan.run)
        record = StepRecord(
            plan.step, now_s, overlapped, len(plan.run), num_tokens, len(plan.assign), len(plan.preempt)
        )
        self.records.append(record)
        self._open[plan.step] = record
        return record

    def record_result(self, step: int, now_s: float) -> None:
        record = self._open.pop(step, None)
        if record is not None:
            record.result_s = now_s
            self._finished.append(record)

    def discard_in_flight(self) -> None:
        """Discards the steps in flight, which have no result because the worker is dead."""
        self._open.clear()

    def take_finished(self) -> list[StepRecord]:
        """Returns the steps that ended since the last call."""
        finished = list(self._finished)
        self._finished.clear()
        return finished


class StepLogFile:
    """Writes one JSON line for each step. If the file cannot be written the log ends, and steps continue."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._encoder = msgspec.json.Encoder()
        self._ended = False

    def write(self, records: list[StepRecord]) -> None:
        if not records or self._ended:
            return
        try:
            with self._path.open("ab") as file:
                file.write(self._encoder.encode_lines(records))
        except OSError as fault:
            self._ended = True
            logger.warning(log.event("step log ended", file=self._path, cause=fault.strerror))


def check_step_log(path: str) -> None:
    """Checks that the file can be written, before anything is loaded."""
    try:
        Path(path).open("ab").close()
    except OSError as fault:
        raise StartupError(f"cannot write --step-log {path}: {fault.strerror}") from None
