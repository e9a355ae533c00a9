import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from onward.api.requests.message_parser_factory import build_reasoning_params
from onward.api.requests.validation import MAX_THINKING_BUDGET
from onward.errors import InvalidRequest
from onward.text.reasoning.reasoning_formats import REASONING_FORMATS
from onward.text.tokenizer import Tokenizer as OurTokenizer

QWEN = REASONING_FORMATS["qwen3"]


def tokenizer_with(*tags: str) -> OurTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return OurTokenizer(json.dumps(json.loads(plain.to_str())))


def refused(*args: Any, **kwargs: Any) -> str | None:
    with pytest.raises(InvalidRequest) as fault:
        build_reasoning_params(*args, **kwargs)
    return fault.value.param


def test_thinking_is_followed_for_a_budget_or_a_grammar_and_else_not() -> None:
    tokenizer = tokenizer_with("<think>", "</think>")
    prompt = tokenizer.encode("question<think>\n")
    assert build_reasoning_params(QWEN, tokenizer, prompt, None, has_grammar=False) is None
    for_grammar = build_reasoning_params(QWEN, tokenizer, prompt, None, has_grammar=True)
    assert for_grammar is not None
    assert (for_grammar.starts_in_reasoning, for_grammar.budget) == (True, None)
    for_budget = build_reasoning_params(
        QWEN, tokenizer, tokenizer.encode("question"), MAX_THINKING_BUDGET, has_grammar=False
    )
    assert for_budget is not None
    assert (for_budget.starts_in_reasoning, for_budget.budget) == (False, MAX_THINKING_BUDGET)


def test_a_budget_that_cannot_be_kept_is_refused() -> None:
    tokenizer = tokenizer_with()
    assert refused(None, tokenizer, [], 5, has_grammar=False) == "thinking_budget"
    assert refused(QWEN, None, [], 5, has_grammar=False) == "thinking_budget"
    assert refused(QWEN, tokenizer, [1], 5, has_grammar=False) == "thinking_budget"
    assert build_reasoning_params(QWEN, tokenizer, [1], None, has_grammar=True) is None
