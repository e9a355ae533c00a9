"""Prompts for the measurement of drafts: repeatable, each another one, and with something to copy."""

import pytest

from benchmarks.speculation.speculation_prompts import code_to_echo, copying_prompt, free_prompt, list_to_repeat


@pytest.mark.parametrize("make", [list_to_repeat, code_to_echo, copying_prompt, free_prompt])
def test_equal_seeds_give_equal_prompts_and_others_do_not(make) -> None:
    assert make("a") == make("a")
    assert len({make(f"seed {i}") for i in range(50)}) == 50


def test_what_is_to_be_copied_stands_in_the_prompt() -> None:
    assert "1. " in list_to_repeat("a") and list_to_repeat("a").endswith("1.")
    assert "renamed" in code_to_echo("a") and code_to_echo("a").endswith("def")


def test_both_kinds_of_text_to_copy_are_asked_for() -> None:
    kinds = {copying_prompt(f"seed {i}").endswith("def") for i in range(20)}
    assert kinds == {True, False}
