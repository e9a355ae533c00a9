"""How a request's drafts have fared: all of them, for figures; the latest ones, to guess how the next will."""

from dataclasses import dataclass

DECAY = 0.85
"""Each verification counts this much less with every later one: text changes."""
PRIOR_DRAFTED, PRIOR_ACCEPTED = 2.0, 1.3
"""What a request that has not drafted yet is taken for: worth a try while there is room, and not in a crowd."""


@dataclass(slots=True)
class DraftAcceptance:
    num_drafted: int = 0
    num_accepted: int = 0
    num_verifications: int = 0
    """Steps that had drafts."""
    tokens_since_draft: int = 0
    """Tokens since the last of them."""
    _drafted: float = PRIOR_DRAFTED
    _accepted: float = PRIOR_ACCEPTED

    @property
    def acceptance_rate(self) -> float:
        """That a draft is right, if those before it were."""
        return self._accepted / self._drafted

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """A step gave `num_accepted` tokens and one more."""
        if not num_drafted:
            self.tokens_since_draft += 1
            return
        self.tokens_since_draft = 0
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_verifications += 1
        # Behind the first wrong one nothing is known of the others.
        tries = min(num_drafted, num_accepted + 1)
        self._drafted = DECAY**tries * self._drafted + tries
        self._accepted = DECAY**tries * self._accepted + num_accepted
