"""How a request's drafts have fared: all of them, for figures; the latest ones, to guess how the next will."""

from dataclasses import dataclass

DECAY = 0.85
"""Each verification counts this much less with every later one: text changes."""
PRIOR_TRIES, PRIOR_HITS = 2.0, 1.3
"""What a request that has not drafted yet is taken for: worth a try while there is room, and not in a crowd."""


@dataclass(slots=True)
class DraftRecord:
    num_drafted: int = 0
    num_accepted: int = 0
    num_verifications: int = 0
    """Steps that had drafts."""
    rest: int = 0
    """Tokens since the last of them."""
    _tries: float = PRIOR_TRIES
    _hits: float = PRIOR_HITS

    @property
    def chance(self) -> float:
        """That a draft is right, if those before it were."""
        return self._hits / self._tries

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """A step gave `num_accepted` tokens and one more."""
        if not num_drafted:
            self.rest += 1
            return
        self.rest = 0
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_verifications += 1
        # Behind the first wrong one nothing is known of the others.
        tries = min(num_drafted, num_accepted + 1)
        self._tries = DECAY**tries * self._tries + tries
        self._hits = DECAY**tries * self._hits + num_accepted
