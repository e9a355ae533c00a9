"""The official JSON Schema test suite. `make schema-suite` writes its table into the docs."""

import pytest

from onward.sim import vocabulary
from onward.text.tokenizer import Tokenizer
from tests.grammar.schema_suite import run_all


@pytest.mark.full
def test_nothing_is_allowed_that_the_suite_calls_invalid_and_who_is_refused_is_told_why() -> None:
    results = run_all(vocabulary.grammars(), Tokenizer(vocabulary.model_text().tokenizer or ""))
    assert sum(result.num_schemas for result in results) > 300
    assert [(result.name, what) for result in results for what in result.wrongly_allowed] == []
    assert [(result.name, what) for result in results for what in result.unnamed] == []
    assert sum(result.num_schemas - len(result.refused) for result in results) >= 160
    assert sum(result.num_valid_allowed for result in results) >= 0.9 * sum(result.num_valid for result in results)
