"""What `--speculative` says, and what is wrong with it."""

import pytest

from onward.errors import StartupError
from onward.proto.speculative_config import SpeculativeConfig, num_draft_tokens_of, parse_speculative


@pytest.mark.parametrize(
    "text,meant",
    [
        ("ngram:4", SpeculativeConfig("ngram", 4)),
        ("draft:/models/small.gguf:3", SpeculativeConfig("draft", 3, "/models/small.gguf")),
        ("draft:c:/models/small:3", SpeculativeConfig("draft", 3, "c:/models/small")),
        ("eagle:./head:1", SpeculativeConfig("eagle", 1, "./head")),
    ],
)
def test_a_proposer_its_path_and_a_number(text: str, meant: SpeculativeConfig) -> None:
    assert parse_speculative(text) == meant
    assert num_draft_tokens_of(text) == meant.num_draft_tokens


@pytest.mark.parametrize(
    "text,why",
    [
        ("", "not a proposer"),
        ("4", "not a proposer"),
        ("medusa:4", "medusa is not a proposer"),
        ("ngram", "must be 1 to 16"),
        ("ngram:", "must be 1 to 16"),
        ("ngram:0", "must be 1 to 16"),
        ("ngram:17", "must be 1 to 16"),
        ("ngram:-1", "must be 1 to 16"),
        ("ngram:²", "must be 1 to 16"),
        ("ngram:x:4", "takes no path"),
        ("draft:4", "needs the path"),
        ("eagle::1", "needs the path"),
    ],
)
def test_what_is_wrong_is_said_with_what_would_be_right(text: str, why: str) -> None:
    with pytest.raises(StartupError, match=why) as caught:
        parse_speculative(text)
    assert "ngram:N, draft:PATH:N or eagle:PATH:N" in caught.value.message


def test_without_the_flag_nobody_drafts() -> None:
    assert num_draft_tokens_of(None) == 0
