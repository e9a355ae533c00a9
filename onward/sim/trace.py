"""What happened in a run, line by line, and a digest of it: two runs with equal digests were the same run."""

import hashlib

from onward.sim.loop import START_S, VirtualLoop


class Trace:
    def __init__(self, loop: VirtualLoop, keeps_lines: bool = False, keeps_messages: bool = False) -> None:
        self._loop = loop
        self._keeps_lines = keeps_lines
        self._keeps_messages = keeps_messages
        self._hash = hashlib.blake2b(digest_size=16)
        self.lines: list[str] = []
        self._is_closed = False

    @property
    def at_s(self) -> float:
        """Since the start."""
        return self._loop.now_s - START_S

    def note(self, what: str) -> None:
        """Something that a person who reads the run wants to know."""
        if self._is_closed:
            return
        line = f"{self.at_s:9.4f}  {what}"
        self._hash.update(line.encode())
        if self._keeps_lines:
            self.lines.append(line)

    def message(self, wire: str, kind: str, fate: str = "") -> None:
        if self._is_closed:
            return
        self._hash.update(f"{self._loop.now_s:.6f}{wire}{kind}{fate}".encode())
        if self._keeps_messages and self._keeps_lines:
            self.lines.append(f"{self.at_s:9.4f}  {wire}  {kind}{'  ' + fate if fate else ''}")

    def close(self) -> None:
        """The run is over. What follows is tidying up."""
        self._is_closed = True

    def digest(self) -> str:
        return self._hash.hexdigest()
