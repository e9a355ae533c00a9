"""Docstrings, comments and pages follow the rules of prose: `make lint` runs the same check."""

import pytest

from scripts import check_prose
from scripts.check_prose import Passage
from scripts.check_prose_commit import syntax_of


def findings(text: str, *, is_docstring: bool = False) -> list[str]:
    return list(check_prose.findings_in(Passage(1, text, is_docstring)))


def test_code_and_pages_follow_the_rules() -> None:
    assert check_prose.main() == 0


def test_a_pronoun_without_a_subject_is_found() -> None:
    assert findings("Whoever comes first draws the item.") == ['"Whoever": name the subject']
    assert findings("The first thread draws the item.") == []


def test_a_fragment_at_the_beginning_of_a_docstring_is_found_and_in_a_comment_is_not() -> None:
    assert len(findings("Of the KV memory.", is_docstring=True)) == 1
    assert findings("Of the two, the cheaper one.") == []
    assert findings("Offset of the KV memory.", is_docstring=True) == []


@pytest.mark.parametrize(
    "text",
    [
        "word " * 35 + "word.",
        "One. " + "word " * 36 + ". Two.",
        "* item\n* " + "word " * 36,
        "word " * 20 + "\n" + "word " * 16,
    ],
)
def test_a_long_sentence_is_found(text: str) -> None:
    assert len(findings(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "word " * 34 + "word.",
        "word " * 20 + ". " + "word " * 20,
        "* " + "word " * 20 + "\n* " + "word " * 20,
        "| " + "word " * 40 + " |",
        "Example:\n\n    " + "word " * 40,
        "```\n" + "word " * 40 + "\n```",
        "`" + "word " * 40 + "` is one word.",
    ],
)
def test_short_sentences_code_and_tables_are_not(text: str) -> None:
    assert findings(text) == []


def test_docstrings_descriptions_of_fields_and_comments_are_passages() -> None:
    source = (
        '"""Module."""\nclass A:\n    """Class."""\n    x: int\n    """Field."""\n'
        "    # One\n    # two\n    y = 1  # noqa: E501\n"
    )
    passages = [(passage.text, passage.is_docstring) for passage in check_prose.passages_of_module(source)]
    assert sorted(passages) == [("Class.", True), ("Field.", True), ("Module.", True), ("One\ntwo", False)]


def test_messages_are_passages_and_docstrings_and_data_are_not() -> None:
    source = (
        'DATA = "a b"\ndef f(x):\n    """Doc."""\n    raise ValueError(f"{x} is not in " "range")\n    log("it ends")\n'
    )
    messages = [passage.text for passage in check_prose.messages_of_module(source)]
    assert sorted(messages) == ["it ends", "x is not in range"]


def test_a_change_of_prose_keeps_the_syntax_tree_and_a_change_of_code_does_not() -> None:
    before = 'class A:\n    """One."""\n    x: int = 1\n    """Two."""\n'
    assert syntax_of(before) == syntax_of('class A:\n    """Other."""\n\n    x: int = 1  # comment\n')
    assert syntax_of(before) != syntax_of(before.replace("= 1", "= 2"))
    assert syntax_of('x = "One."') != syntax_of('x = "Two."')
