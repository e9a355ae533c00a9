"""Words that an output must not contain, as the token sequences that it must never complete.

A word is written in two ways: at the beginning of a text, and behind a space. Both are kept from the output. Another
spelling, or a word that is only a part of a longer token, is another word.
"""

from collections.abc import Sequence

from onward.errors import InvalidRequest
from onward.proto.sampling_params import MAX_BAD_WORD_TOKENS
from onward.text.tokenizer import Tokenizer

MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 128


def check_bad_words(words: Sequence[object]) -> None:
    """Raises `InvalidRequest` for too many words, or for the first one that is empty, too long or not a string."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words: at most {MAX_BAD_WORDS} words, got {len(words)}", param="bad_words")
    for index, word in enumerate(words):
        if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_WORD_LENGTH:
            raise InvalidRequest(
                f"bad_words[{index}]: must be a word of at most {MAX_BAD_WORD_LENGTH} characters, got {word!r:.80}",
                param=f"bad_words[{index}]",
            )


def bad_word_token_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    if not words:
        return ()
    if tokenizer is None:
        raise InvalidRequest("bad_words: this model has no tokenizer; use logit_bias", param="bad_words")
    texts = (space + word.lstrip() for word in words for space in ("", " "))
    sequences = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    token_sequences = tuple(dict.fromkeys(sequence for sequence in sequences if sequence))
    if (num_tokens := sum(map(len, token_sequences))) > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(
            f"bad_words: at most {MAX_BAD_WORD_TOKENS} tokens in all, each word with and without a space before it, "
            f"got {num_tokens}",
            param="bad_words",
        )
    return token_sequences
