"""Statistics of a request's drafts, for clients that ask for them. They describe the run and not the output, like the
number of cached tokens: an attempt that continues a response elsewhere reports only its own drafts."""

from dataclasses import dataclass, field

DraftCounts = tuple[tuple[int, int], ...]
"""For each step with drafts: the number of drafts, and how many of them were accepted."""


@dataclass(slots=True)
class DraftStats:
    num_verifications: int = 0
    drafted: list[int] = field(default_factory=list)
    """Number of drafts by position after the newest token; `accepted` likewise."""
    accepted: list[int] = field(default_factory=list)

    def record(self, drafts: DraftCounts) -> None:
        for num_drafted, num_accepted in drafts:
            self.num_verifications += 1
            _count(self.drafted, num_drafted)
            _count(self.accepted, num_accepted)

    def add(self, other: "DraftStats") -> None:
        self.num_verifications += other.num_verifications
        for own, theirs in ((self.drafted, other.drafted), (self.accepted, other.accepted)):
            own += [0] * (len(theirs) - len(own))
            for position, count in enumerate(theirs):
                own[position] += count

    def as_json(self) -> dict[str, object]:
        drafted, accepted = sum(self.drafted), sum(self.accepted)
        accepted_per_position = self.accepted + [0] * (len(self.drafted) - len(self.accepted))
        return {
            "num_draft_tokens": drafted,
            "num_accepted_tokens": accepted,
            "acceptance_rate": _share(accepted, drafted),
            "num_verifications": self.num_verifications,
            "mean_accepted_length": 1 + accepted / self.num_verifications if self.num_verifications else None,
            "acceptance_rate_per_position": [
                _share(a, d) for a, d in zip(accepted_per_position, self.drafted, strict=True)
            ],
        }


def _count(counts: list[int], num_positions: int) -> None:
    counts += [0] * (num_positions - len(counts))
    for position in range(num_positions):
        counts[position] += 1


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
