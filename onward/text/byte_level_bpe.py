"""Byte-level BPE tokenizers: a vocabulary of byte strings, and the pattern that cuts text into words before they merge.

The pattern decides token ids and is in none of the files (GGUF, `vocab.json` with `merges.txt`, tiktoken) but by a name, so
an unknown name is an error and never a guess. Files are read elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from onward.errors import StartupError
from onward.text.token_table import CHARACTER_OF_BYTE, MAX_TOKENS
from onward.text.vocabulary_limits import check_tokens

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: tuple[str, ...] = (
    r"\s*[\r\n]+",  # blank lines
    r"\s+(?!\S)",  # spaces, leaving the last to the word behind them
    r"\s+",
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
"""Letters that may begin a capitalized word, and letters that may continue one in lower case."""


@dataclass(frozen=True, slots=True)
class WordSplit:
    """How text becomes words. A word's bytes are merged; merges never cross a word's end."""

    pattern: str | None
    """None: the `ByteLevel` pre-tokenizer's own pattern, which is GPT-2's."""
    splits_digits: bool = False
    """Every digit is a word, before the pattern is applied."""
    normalizes: bool = False
    """Text is brought into Unicode's form NFC first."""

    def configure(self, tokenizer: Tokenizer, *, add_prefix_space: bool = False) -> None:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=self.pattern is None)
        steps: list[Any] = []
        if self.splits_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level]) if steps else byte_level
        tokenizer.decoder = decoders.ByteLevel()
        if self.normalizes:
            tokenizer.normalizer = normalizers.NFC()


def _words(max_digits: int, spaces: tuple[str, ...] = _SPACES) -> str:
    """Returns the pattern of words that Llama 3, Qwen 2 and cl100k share. They differ in how many digits make a group,
    and in how spaces are cut."""
    alternatives = (
        _CONTRACTIONS,
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # letters, with one leading space or sign
        rf"\p{{N}}{{1,{max_digits}}}",  # a group of digits
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # signs, with the line ends after them
        *spaces,
    )
    return "|".join(alternatives)


def _words_by_case(max_digits: int, contractions: str) -> str:
    """Returns the pattern of words that o200k and Mistral's Tekken share, in which a word ends where a
    capital follows a small letter."""
    alternatives = (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{contractions}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{contractions}",
        rf"\p{{N}}{{1,{max_digits}}}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        *_SPACES,
    )
    return "|".join(alternatives)


GPT2 = WordSplit(None)
SMOLLM = WordSplit(None, splits_digits=True)
LLAMA3 = WordSplit(_words(max_digits=3))
CL100K = WordSplit(_words(max_digits=3, spaces=(r"\s+\z", *_SPACES)))
"""Spaces at the end of a text are one word, line ends among them."""
QWEN2 = WordSplit(_words(max_digits=1), normalizes=True)
O200K = WordSplit(_words_by_case(max_digits=3, contractions=_CONTRACTIONS + "?"))
TEKKEN = WordSplit(_words_by_case(max_digits=1, contractions=""))

CLASS_SPLITS = {"GPT2Tokenizer": GPT2, "CodeGenTokenizer": GPT2, "Qwen2Tokenizer": QWEN2}
"""By `tokenizer_class`, for `vocab.json` with `merges.txt`."""
TIKTOKEN_SPLITS = {
    "cl100k_base": CL100K,
    "o200k_base": O200K,
    "o200k_harmony": O200K,
    "p50k_base": GPT2,
    "qwen": QWEN2,
    "r50k_base": GPT2,
}
"""By the name of a tiktoken file. Others are cut as Llama 3's, which is what transformers does."""
END_OF_TEXT = "<|endoftext|>"


def byte_level_tokenizer(
    vocab: Mapping[str, int],
    merges: list[tuple[str, str]],
    split: WordSplit,
    source: str,
    *,
    whole_words_first: bool = False,
    add_prefix_space: bool = False,
) -> Tokenizer:
    """Returns a tokenizer with this vocabulary, written in the byte alphabet (`token_table`). `whole_words_first`: a
    word that is a token becomes that token, whether or not merges lead to it. Raises a `StartupError` that names
    `source` if the merges do not fit the vocabulary."""
    tokenizer = Tokenizer(bpe_model(vocab, merges, source, ignore_merges=whole_words_first))
    split.configure(tokenizer, add_prefix_space=add_prefix_space)
    return tokenizer


def tokenizer_from_ranks(
    ranks: Mapping[bytes, int], split: WordSplit, source: str, special_tokens: Sequence[str] = ()
) -> Tokenizer:
    """Converts tiktoken's ranks to merges. tiktoken joins the neighbours whose joint bytes rank lowest, so every way to
    cut a token in two is a merge. `special_tokens` get the first ids; ranks follow."""
    merges: list[tuple[int, int, bytes, bytes]] = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, cut, left, right))
    merges.sort()
    vocab = {token: token_id for token_id, token in enumerate(special_tokens)}
    vocab |= {byte_level_text(token): len(special_tokens) + rank for token, rank in ranks.items()}
    pairs = [(byte_level_text(left), byte_level_text(right)) for *_, left, right in merges]
    return byte_level_tokenizer(vocab, pairs, split, source, whole_words_first=True)


def byte_level_text(token: bytes) -> str:
    """Returns the token's bytes written in the byte alphabet (`token_table`)."""
    return "".join(CHARACTER_OF_BYTE[byte] for byte in token)


def bpe_model(vocab: Mapping[str, int], merges: list[tuple[str, str]], source: str, **options: Any) -> models.BPE:
    return build_model(lambda: models.BPE(vocab=dict(vocab), merges=merges, **options), source)


def build_model(build: Callable[[], Any], source: str) -> Any:
    """Returns the library's model that `build` creates. Raises a `StartupError` that names `source` if that fails."""
    try:
        return build()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare exceptions for a merge of tokens that do not exist; panics are no Exception
        raise StartupError(f"{source}: {str(error)[:200]}") from error


def check_vocab(vocab: Mapping[str, Any], source: str) -> None:
    if not all(isinstance(value, int) and 0 <= value < MAX_TOKENS for value in vocab.values()):
        raise StartupError(f"{source} has a token whose id is not a number below {MAX_TOKENS}")
    check_tokens(list(vocab), source)
    if len(set(vocab.values())) != len(vocab):
        raise StartupError(f"{source} has an id twice, so ids and tokens cannot be matched")


def split_merge(merge: str, source: str) -> tuple[str, str]:
    # The left half is never empty, so the separator is looked for behind the first character.
    separator_at = merge.find(" ", 1)
    if separator_at < 0 or separator_at + 1 == len(merge):
        raise StartupError(f"{source} has {merge[:80]!r}, which is not a pair of tokens")
    return merge[:separator_at], merge[separator_at + 1 :]


def split_merges(merges: Sequence[str], source: str) -> list[tuple[str, str]]:
    return [split_merge(merge, source) for merge in merges]
