"""An api process whose event loop is watched by the standard library's profiler: `onward.api.main` with `--profile FILE`.

SIGUSR1 begins, the next one ends and writes the file: the thread's processor time in all, and what of it each function
took. The profiler makes every call dearer, so this says where time goes, and not how much there is. It reads the wall
clock, since the thread's own would cost ten times as much: only on a machine with nothing else to do is that the same.
"""

import argparse
import cProfile
import signal
import sys
import time
from pathlib import Path
from types import CodeType

import msgspec

from onward.api.main import main as api_main
from onward.bench.api_stages import FunctionTime, Profile


class Watch:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._profile: cProfile.Profile | None = None
        self._began_s = 0.0

    def toggle(self, *_: object) -> None:
        if self._profile is None:
            self._began_s = time.thread_time()
            self._profile = cProfile.Profile()
            self._profile.enable()
        else:
            self._profile.disable()
            found = Profile(time.thread_time() - self._began_s, function_times(self._profile))
            self._profile = None
            self._file.write_bytes(msgspec.json.encode(found))


def function_times(profile: cProfile.Profile) -> list[FunctionTime]:
    """Of each function of Python its own time, with that of the C functions it calls."""
    found: list[FunctionTime] = []
    for entry in profile.getstats():
        if not isinstance(entry.code, CodeType):
            continue
        own_s = entry.inlinetime
        for callee in entry.calls or ():
            if not isinstance(callee.code, CodeType):
                own_s += callee.inlinetime
        found.append(FunctionTime(entry.code.co_filename, entry.code.co_qualname, entry.callcount, own_s))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="onward.bench.profiled_api")
    parser.add_argument("--profile", type=Path, required=True)
    args, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    signal.signal(signal.SIGUSR1, Watch(args.profile).toggle)
    api_main()


if __name__ == "__main__":
    main()
