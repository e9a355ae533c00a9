"""An api process that says where its time goes: `onward.api.main` with `--profile FILE`.

SIGUSR1 begins, the next one ends and writes the file. In between, the kernel interrupts the process as it uses processor
time (`ITIMER_PROF`), and each time it is noted which function was at work. That costs next to nothing, and whatever else
the machine does is not in it.
"""

import argparse
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import msgspec

from benchmarks.api.api_stages import OTHER, FunctionSamples, stage_of
from onward.api.main import main as api_main

INTERVAL_S = 0.001
"""As often as that, or as the kernel's clock ticks."""


class SamplingProfiler:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._samples: Counter[tuple[str, str]] | None = None
        signal.signal(signal.SIGPROF, self._note)
        signal.signal(signal.SIGUSR1, self._toggle)

    def _toggle(self, *_: object) -> None:
        if self._samples is None:
            self._samples = Counter()
            signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        found = [FunctionSamples(file, name, count) for (file, name), count in self._samples.most_common()]
        self._samples = None
        self._file.write_bytes(msgspec.json.encode(found))

    def _note(self, _: int, frame: FrameType | None) -> None:
        if self._samples is not None and frame is not None:
            code = _of_a_stage(frame).f_code
            self._samples[code.co_filename, code.co_qualname] += 1


def _of_a_stage(frame: FrameType) -> FrameType:
    """The innermost function that belongs to a stage: what it calls of the standard library is its affair."""
    at: FrameType | None = frame
    while at is not None and stage_of(at.f_code.co_filename) == OTHER:
        at = at.f_back
    return frame if at is None else at


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.api.profiled_api")
    parser.add_argument("--profile", type=Path, required=True)
    args, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    SamplingProfiler(args.profile)
    api_main()


if __name__ == "__main__":
    main()
