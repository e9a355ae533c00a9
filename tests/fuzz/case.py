"""One target of the fuzzer: where its cases come from, what is done with each, and which refusals are clean."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hypothesis import strategies as st

MAX_CASE_S = 3.0
"""Seconds of processor time, so that a busy machine is no finding."""
HANG_FACTOR = 10
"""As many times that by the clock, and a case hangs."""
CORPUS = Path(__file__).parent.parent / "fuzz_corpus"


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    cases: st.SearchStrategy[bytes]
    run: Callable[[bytes], None]
    refusals: tuple[type[BaseException], ...]
    """What its callers are ready for. Anything else that is raised is a finding."""

    def check(self, data: bytes) -> bool:
        """Whether it was taken. Raises what is no clean refusal, and `TooSlow`."""
        with ended_after(MAX_CASE_S):
            try:
                self.run(data)
            except self.refusals as refused:
                assert "Traceback" not in str(refused)
                return False
        return True

    def kept(self) -> list[Path]:
        return sorted((CORPUS / self.name).glob("*.bin"))


class TooSlow(BaseException):
    """No Exception, so that nothing on its way takes it for a fault of its own."""


@contextmanager
def ended_after(limit_s: float) -> Iterator[None]:
    def end(signum: int, frame: FrameType | None) -> None:
        raise TooSlow(f"the case has not ended within {HANG_FACTOR * limit_s} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, HANG_FACTOR * limit_s)
    began_s = time.process_time()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if time.process_time() - began_s > limit_s:
        raise TooSlow(f"the case has taken more than {limit_s} s of processor time")
