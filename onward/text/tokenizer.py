"""Text to tokens and back, over a `tokenizer.json`.

Knows nothing of chats: a rendered template comes in as text, with the special tokens written out.
"""

import json
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from onward.errors import InvalidRequest, StartupError
from onward.text.length_check import check_text_length, kept_text
from onward.text.token_table import TokenTable, table_from_spec
from onward.text.truncation import Truncation

MAX_SHRINKAGE = 4
"""A normalizer of Unicode makes no text shorter than a quarter of its bytes (U+1D400 becomes "A")."""
TEXT_PREFIX = "text_prefix"
"""A field of our own in the description: what is put before a text that begins with no added token (`text`), and the added
tokens that it is put before all the same (`also_before`). The library can only put it before every stretch of text between
added tokens."""


class Tokenizer:
    """Immutable once built, so threads may share it."""

    def __init__(self, spec_json: str) -> None:
        try:
            spec = json.loads(spec_json)
            self.table: TokenTable = table_from_spec(spec)
            longest = max(map(len, self.table.token_bytes_list), default=0)
            self.max_bytes_per_token: int = max(1, longest) * (MAX_SHRINKAGE if spec.get("normalizer") else 1)
            """UTF-8 bytes of input text that one token may stand for."""
            prefix = spec.pop(TEXT_PREFIX, None)
            self._prefix: str = prefix["text"] if prefix else ""
            others = [t for t in spec.get("added_tokens") or () if prefix and t["content"] not in prefix["also_before"]]
            self._added_token_start = _AddedTokenStart(others)
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec) if prefix else spec_json)
            # Some files ask for padding or cutting to a length, which is for training.
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            self._bos_id = self._find_bos()
        except (StartupError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises bare exceptions, and its panics are no Exception at all
            raise StartupError(f"the tokenizer cannot be read: {_describe_error(error)}") from error

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """Reads a `tokenizer.json`. Raises `StartupError` if that fails. The size of the file is not checked, because
        it was bounded when the model was prepared."""
        try:
            spec_json = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"the tokenizer cannot be read: {path}: {error}") from error
        return cls(spec_json)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id. The model's own figure may be larger, for padding."""
        return len(self.table)

    @property
    def special_ids(self) -> frozenset[int]:
        return self.table.special_ids

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        truncation: Truncation | None = None,
    ) -> list[int]:
        """Returns the token ids of the text. Special tokens written in the text become their ids. With
        `add_special_tokens`, those with which the model begins and ends a text are added; a bos that the text already
        begins with is not doubled.

        `max_tokens`: a text that is far longer is refused with `InvalidRequest`, at a cost that does not depend on its
        length. `truncation`: the caller cuts the tokens like this, so the part of a long text that is cut off may be
        left out."""
        if truncation is not None and (max_tokens is None or truncation.max_tokens <= max_tokens):
            text = kept_text(text, truncation, self._count)
        elif max_tokens is not None:
            check_text_length(text, max_tokens, self.max_bytes_per_token, self._count)
        token_ids = self._encode(text, add_special_tokens)
        if add_special_tokens and self._bos_id is not None and token_ids[:2] == [self._bos_id] * 2:
            return token_ids[1:]
        return token_ids

    def encode_chat(
        self,
        rendered: str,
        max_tokens: int | None = None,
        *,
        add_special_tokens: bool = False,
        truncation: Truncation | None = None,
    ) -> list[int]:
        """Returns the token ids of a rendered chat template. The template has written every special token that it
        wants, so none is added unless `add_special_tokens` is set. The other parameters are as in `encode`."""
        return self.encode(
            rendered, add_special_tokens=add_special_tokens, max_tokens=max_tokens, truncation=truncation
        )

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return self.table.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.table.token_bytes(token_id)

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token written as in the vocabulary, such as `<|im_end|>`, or None if there is no such
        token."""
        return self._tokenizer.token_to_id(token)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._encoding(text, add_special_tokens).ids

    def _count(self, text: str) -> int:
        return len(self._encoding(text, False))

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        if self._prefix and text and not self._added_token_start.matches(text):
            text = self._prefix + text
        # Of the library's ways only this one lets other threads run meanwhile: a long prompt takes a while.
        try:
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("the text holds half a surrogate pair, which is not Unicode text") from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # what the file does not provide for is found out only now, by bare exceptions
            raise InvalidRequest(f"the text cannot be tokenized: {_describe_error(error)}") from error

    def _find_bos(self) -> int | None:
        """Returns the id of the special token that the tokenizer puts first when it encodes a text, or None if it puts
        none there."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        with_special = self._tokenizer.encode("a", add_special_tokens=True).ids
        if len(with_special) > len(plain) and with_special[0] in self.special_ids and with_special[0] not in plain:
            return with_special[0]
        return None


class _AddedTokenStart:
    """Finds out whether a text begins with an added token, as the library looks for them."""

    def __init__(self, added_tokens: Iterable[dict[str, Any]]) -> None:
        tokens = [token for token in added_tokens if token["content"]]
        self._anywhere = _any_of(token for token in tokens if not token["single_word"])
        self._as_word = _any_of(token for token in tokens if token["single_word"])

    def matches(self, text: str) -> bool:
        if self._anywhere.match(text):
            return True
        found = self._as_word.match(text)
        return found is not None and not _is_word_character(text[found.end() : found.end() + 1])


def _any_of(tokens: Iterable[dict[str, Any]]) -> re.Pattern[str]:
    parts = [(r"\s*" if token["lstrip"] else "") + re.escape(token["content"]) for token in tokens]
    return re.compile("|".join(parts) if parts else r"(?!)")


def _is_word_character(character: str) -> bool:
    """Returns whether the library's regular expressions count the character as part of a word. Python's
    regular expressions count other characters."""
    if not character:
        return False
    category = unicodedata.category(character)
    return category[0] in "LM" or category in ("Nd", "Nl", "Pc") or character in "\u200c\u200d"


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
