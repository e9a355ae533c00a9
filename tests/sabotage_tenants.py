"""Deliberate bugs in what one tenant may cost another. See `tests/sabotage.py`, whose table these rows belong to."""

from onward.router.tokenizing import Tokenizing as RouterTokenizing
from onward.text import length_check, tokenizer
from tests.sabotage_kinds import Patches, Sabotage

LENGTHS = "tests/text/test_length_check.py::"


# Texts.


def _texts_are_tokenized_whatever_their_length(patch: Patches) -> None:
    patch.put(tokenizer, "check_length", lambda *_: None)


def _long_texts_are_tokenized_to_their_end(patch: Patches) -> None:
    patch.put(length_check, "PIECE_CHARS", 1 << 40)


def _normalizers_are_forgotten(patch: Patches) -> None:
    patch.put(tokenizer, "MAX_SHRINKAGE", 1)


def _a_router_tokenizes_whatever_comes(patch: Patches) -> None:
    patch.put(RouterTokenizing, "_max_tokens", lambda _: None)


TABLE = [
    Sabotage(
        "texts-of-any-length",
        "a text that cannot fit into the context is tokenized before it is refused",
        _texts_are_tokenized_whatever_their_length,
        [LENGTHS + "test_a_chats_prompt_is_refused_while_it_is_rendered"],
    ),
    Sabotage(
        "long-texts-to-their-end",
        "a text of too many tokens is tokenized to its end",
        _long_texts_are_tokenized_to_their_end,
        [LENGTHS + "test_a_long_text_is_tokenized_only_until_it_is_certain_that_it_does_not_fit"],
    ),
    Sabotage(
        "normalizers-forgotten",
        "a text that a normalizer makes shorter is refused although it fits",
        _normalizers_are_forgotten,
        [LENGTHS + "test_a_text_that_a_normalizer_makes_shorter_is_not_refused"],
    ),
    Sabotage(
        "router-tokenizes-all",
        "a router with a prefix policy tokenizes texts that no instance can hold",
        _a_router_tokenizes_whatever_comes,
        ["tests/router/test_tokenizing.py::test_a_text_that_no_instance_can_hold_is_passed_on_as_it_came"],
    ),
]
