"""Words that an output must not contain."""

import pytest

from onward.errors import InvalidRequest
from onward.proto.sampling_params import MAX_BAD_WORD_TOKENS
from onward.text.bad_words import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS, bad_word_token_ids, check_bad_words
from onward.text.tokenizer import Tokenizer


def test_words_that_come_to_too_many_tokens_are_refused_by_the_field_s_name(byte_level_tokenizer: Tokenizer) -> None:
    """A character may be several tokens, and all of them travel with every assignment of the request."""
    words = [chr(0x1F600 + index) * MAX_BAD_WORD_LENGTH for index in range(MAX_BAD_WORDS)]
    check_bad_words(words)
    with pytest.raises(InvalidRequest, match=f"bad_words: at most {MAX_BAD_WORD_TOKENS} tokens in all") as caught:
        bad_word_token_ids(words, byte_level_tokenizer)
    assert caught.value.param == "bad_words"
    assert bad_word_token_ids(words[:2], byte_level_tokenizer)
