"""What an answer tells of its drafts: sums, shares, and each place behind the newest token."""

from onward.api.lifecycle.draft_stats import DraftStats


def test_each_place_has_a_rate_of_its_own() -> None:
    stats = DraftStats()
    stats.record(((4, 4), (4, 1), (2, 0)))
    assert stats.as_json() == {
        "num_draft_tokens": 10,
        "num_accepted_tokens": 5,
        "acceptance_rate": 0.5,
        "num_verifications": 3,
        "mean_accepted_length": 1 + 5 / 3,
        "acceptance_rate_per_position": [2 / 3, 1 / 3, 1 / 2, 1 / 2],
    }


def test_without_drafts_there_are_no_rates() -> None:
    told = DraftStats().as_json()
    assert (told["num_draft_tokens"], told["acceptance_rate"], told["mean_accepted_length"]) == (0, None, None)
    assert told["acceptance_rate_per_position"] == []


def test_choices_are_added_up() -> None:
    one, other, both = DraftStats(), DraftStats(), DraftStats()
    one.record(((1, 1),))
    other.record(((3, 2),))
    both.record(((1, 1), (3, 2)))
    one.add(other)
    assert one == both
