"""Which faults are in force on which wires at the moment, and how often each kind has struck."""

from collections import Counter
from dataclasses import dataclass

from onward.sim.chance import Chance


@dataclass(eq=False, slots=True)
class Spell:
    """One kind of trouble on some wires, for a while."""

    kind: str
    target: str
    rate: float


class Weather:
    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._spells: list[Spell] = []
        self.fired: Counter[str] = Counter()
        self.num_killed_for_silence = 0
        """Processes that a supervisor has killed since they did not answer: for a fault on their wire, or for none."""

    def begin(self, kind: str, target: str, rate: float) -> Spell:
        spell = Spell(kind, target, rate)
        self._spells.append(spell)
        return spell

    def end(self, spell: Spell) -> None:
        self._spells.remove(spell)

    @property
    def is_calm(self) -> bool:
        return not self._spells

    def strikes(self, kind: str, wire: str) -> bool:
        """Whether this message on this wire is hit."""
        for spell in self._spells:
            if spell.kind == kind and spell.target in wire and self._chance.happens(spell.rate):
                self.fired[kind] += 1
                return True
        return False
