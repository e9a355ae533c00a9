"""Which faults are in force on which wires at the moment, and how often each kind has struck."""

from collections import Counter
from dataclasses import dataclass

from onward.sim.seeded_random import SeededRandom


@dataclass(eq=False, slots=True)
class ActiveFault:
    """One kind of trouble on some wires, for a while."""

    kind: str
    target: str
    rate: float


class ActiveFaults:
    def __init__(self, random: SeededRandom) -> None:
        self._random = random
        self._faults: list[ActiveFault] = []
        self.trigger_counts: Counter[str] = Counter()
        self.num_killed_for_silence = 0
        """Processes that a supervisor has killed since they did not answer: for a fault on their wire, or for none."""

    def begin(self, kind: str, target: str, rate: float) -> ActiveFault:
        fault = ActiveFault(kind, target, rate)
        self._faults.append(fault)
        return fault

    def end(self, fault: ActiveFault) -> None:
        self._faults.remove(fault)

    @property
    def is_empty(self) -> bool:
        return not self._faults

    def hits(self, kind: str, wire: str) -> bool:
        """Whether this message on this wire is hit."""
        for fault in self._faults:
            if fault.kind == kind and fault.target in wire and self._random.happens(fault.rate):
                self.trigger_counts[kind] += 1
                return True
        return False
