"""Prompts of about a given length without common prefixes, so that no prefix cache can help."""

import random

_COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education"
)


def random_words(count: int, seed: str) -> str:
    """Returns `count` common words, each about a token. Equal seeds give equal words; different seeds differ from the
    first words on."""
    return " ".join(random.Random(seed).choices(_COMMON.split(), k=max(1, count)))


def words_for_tokens(num_tokens: int, probes: tuple[tuple[int, int], tuple[int, int]]) -> int:
    """Returns how many words make a prompt of `num_tokens`, by a line through two probes of (words, tokens)."""
    (words_a, tokens_a), (words_b, tokens_b) = probes
    tokens_per_word = (tokens_b - tokens_a) / (words_b - words_a)
    if tokens_per_word <= 0:
        return max(1, num_tokens)
    return max(1, round(words_a + (num_tokens - tokens_a) / tokens_per_word))
