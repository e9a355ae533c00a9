"""What became of an answer's drafts, for clients that ask for it: a figure of the run, like the tokens that were cached.
Who carries an answer on elsewhere tells of what it has seen itself."""

from dataclasses import dataclass, field

DraftCounts = tuple[tuple[int, int], ...]
"""Of each step that had drafts: how many, and how many of them were accepted."""


@dataclass(slots=True)
class DraftStats:
    num_verifications: int = 0
    drafted: list[int] = field(default_factory=list)
    """By place behind the newest token."""
    accepted: list[int] = field(default_factory=list)

    def record(self, drafts: DraftCounts) -> None:
        for num_drafted, num_accepted in drafts:
            self.num_verifications += 1
            _count(self.drafted, num_drafted)
            _count(self.accepted, num_accepted)

    def add(self, other: "DraftStats") -> None:
        self.num_verifications += other.num_verifications
        for mine, theirs in ((self.drafted, other.drafted), (self.accepted, other.accepted)):
            mine += [0] * (len(theirs) - len(mine))
            for place, count in enumerate(theirs):
                mine[place] += count

    def as_json(self) -> dict[str, object]:
        drafted, accepted = sum(self.drafted), sum(self.accepted)
        each = self.accepted + [0] * (len(self.drafted) - len(self.accepted))
        return {
            "num_draft_tokens": drafted,
            "num_accepted_tokens": accepted,
            "acceptance_rate": _share(accepted, drafted),
            "num_verifications": self.num_verifications,
            "mean_accepted_length": 1 + accepted / self.num_verifications if self.num_verifications else None,
            "acceptance_rate_per_position": [_share(a, d) for a, d in zip(each, self.drafted, strict=True)],
        }


def _count(places: list[int], number: int) -> None:
    places += [0] * (number - len(places))
    for place in range(number):
        places[place] += 1


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
