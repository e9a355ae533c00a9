"""Names in `onward/` follow the glossary: `make lint` runs the same check."""

import ast
from pathlib import Path

from scripts import check_names


def tree(text: str) -> ast.Module:
    return ast.parse(text)


def test_the_package_has_no_duplicate_and_no_vague_name() -> None:
    assert check_names.main() == 0


def test_a_class_name_that_occurs_twice_is_found_unless_the_glossary_lists_it() -> None:
    trees = {check_names.ROOT / "a.py": tree("class Job: ..."), check_names.ROOT / "b.py": tree("class Job: ...")}
    assert check_names.duplicates(trees, set()) == ["Job is defined in a.py, b.py"]
    assert check_names.duplicates(trees, {"Job"}) == []


def test_the_glossary_lists_one_role_on_two_sides_in_a_section_of_its_own() -> None:
    glossary = (
        f"## A\n\n| `Job` | one |\n\n{check_names.TWO_SIDES}\n\n| `Hello` | two |\n\n## B\n\n| `Lease` | three |\n"
    )
    assert check_names.two_sides_of(glossary) == {"Hello"}


def test_every_kind_of_name_is_looked_at() -> None:
    text = "class Teller:\n    shelf: int\n    def say(self, told):\n        self._weather = 1\n"
    assert set(check_names.names_in(tree(text))) == {"Teller", "shelf", "say", "self", "told", "_weather"}
    assert check_names.words_of("HTTPTeller_toldUs") == ["http", "teller", "told", "us"]


def test_names_of_the_allowlist_are_sorted_and_occur_once() -> None:
    lines = Path(check_names.ALLOWLIST).read_text(encoding="utf-8").split()
    assert lines == sorted(set(lines))
