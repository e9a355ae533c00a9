"""Builds a tokenizer from the pieces and scores of SentencePiece, as a model file or a GGUF file has them.

SentencePiece puts one space before a text (the "dummy prefix"). Where special tokens cut a text into stretches, there are
two customs: a space before every stretch (`legacy` in transformers, and GGUF's reference implementation), or only before a
text that begins with no special token. Settings that would change ids in a way that the tokenizers library does not
reproduce are errors that name the field.
"""

import json
from collections.abc import Sequence
from enum import Enum
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from onward.errors import StartupError
from onward.text.byte_level_bpe import bpe_model, build_model
from onward.text.sentencepiece_model import ModelType, PieceType, SentencePieceModel
from onward.text.token_table import WORD_MARK
from onward.text.tokenizer import TEXT_PREFIX
from onward.text.vocabulary_limits import check_tokens

_NEVER_SCORE = -1e5
"""Score of pieces that the algorithm must not find in a text: lower than the sum of a word's scores can be."""


class Prefix(Enum):
    """Where a space is put before the text."""

    NEVER = "never"
    TEXT = "text"
    """Once, unless the text begins with a special token. `Tokenizer` does it: the library has no normalizer for this."""
    STRETCH = "stretch"
    """Before every stretch between special tokens."""


def build_from_model(model: SentencePieceModel, prefix: Prefix) -> Tokenizer:
    """Returns a tokenizer without the settings that the library cannot express; `describe` adds them when it is
    written."""
    _refuse_unsupported(model)
    check_tokens(model.pieces, "the SentencePiece model")
    if not 0 <= model.unk_id < len(model.pieces):
        raise StartupError(f"the SentencePiece model's trainer_spec.unk_id is {model.unk_id}, which is no piece")
    is_unigram = model.model_type == ModelType.UNIGRAM
    build = _unigram if is_unigram else _bpe
    tokenizer = Tokenizer(build(model))
    configure_spaces(tokenizer, prefix, decodes_prefix=prefix is not Prefix.NEVER)
    tokenizer.add_tokens(_added_tokens(model, prefix, with_user_defined=not is_unigram))
    return tokenizer


def build_bpe_model(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    unknown: str | None,
    source: str,
    byte_fallback: bool,
) -> models.BPE:
    vocab = {piece: piece_id for piece_id, piece in enumerate(pieces)}
    merges = _merges_from_scores(pieces, scores, types)
    return bpe_model(vocab, merges, source, unk_token=unknown, byte_fallback=byte_fallback, fuse_unk=True)


def configure_spaces(tokenizer: Tokenizer, prefix: Prefix, *, decodes_prefix: bool) -> None:
    """Spaces are written as `WORD_MARK`. `decodes_prefix`: decoding takes the space before a text away again."""
    mark_spaces = normalizers.Replace(" ", WORD_MARK)
    if prefix is Prefix.STRETCH:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_MARK), mark_spaces])
    else:
        tokenizer.normalizer = mark_spaces
    to_text: list[Any] = [decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if decodes_prefix:
        to_text.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(to_text)


def _refuse_unsupported(model: SentencePieceModel) -> None:
    if model.model_type not in (ModelType.UNIGRAM, ModelType.BPE):
        kinds = {kind.value: kind.name for kind in ModelType}
        raise _unsupported(f"trainer_spec.model_type {kinds.get(model.model_type, model.model_type)}")
    if model.whitespace_is_suffix:
        raise _unsupported("trainer_spec.treat_whitespace_as_suffix")
    if model.charsmap:
        raise _unsupported("normalizer_spec.precompiled_charsmap (Unicode normalization)")
    if model.remove_extra_whitespaces:
        raise _unsupported("normalizer_spec.remove_extra_whitespaces")
    if not model.escape_whitespaces:
        raise _unsupported("normalizer_spec.escape_whitespaces false")
    if model.model_type == ModelType.BPE and PieceType.UNUSED in model.types:
        raise _unsupported("pieces of the type UNUSED in a BPE model")


def _unsupported(what: str) -> StartupError:
    return StartupError(
        f"the SentencePiece model uses {what}, which is not supported; a tokenizer.json beside it is used"
    )


def _bpe(model: SentencePieceModel) -> models.BPE:
    unknown = model.pieces[model.unk_id]
    return build_bpe_model(
        model.pieces, model.scores, model.types, unknown, "the SentencePiece model", model.byte_fallback
    )


def _unigram(model: SentencePieceModel) -> models.Unigram:
    normal = [score for score, kind in zip(model.scores, model.types, strict=True) if kind == PieceType.NORMAL]
    best = max(normal, default=0.0)
    vocab = [
        (piece, _unigram_score(piece, score, kind, best))
        for piece, score, kind in zip(model.pieces, model.scores, model.types, strict=True)
    ]
    return build_model(
        lambda: models.Unigram(vocab, unk_id=model.unk_id, byte_fallback=model.byte_fallback),
        "the SentencePiece model",
    )


def _unigram_score(piece: str, score: float, kind: int, best: float) -> float:
    """Returns the score that SentencePiece gives a piece of this kind when it segments a text."""
    if kind == PieceType.USER_DEFINED:
        return len(piece.encode()) * best - 0.1
    return score if kind == PieceType.NORMAL else _NEVER_SCORE


def _merges_from_scores(pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Converts scores to merges. SentencePiece joins the neighbours whose joint piece scores highest, so every way to
    cut a piece in two is a merge with the piece's score. Only normal pieces result from joining."""
    ids = {piece: piece_id for piece_id, piece in enumerate(pieces) if types[piece_id] == PieceType.NORMAL}
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, piece_id in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[piece_id], piece_id, cut, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _added_tokens(model: SentencePieceModel, prefix: Prefix, *, with_user_defined: bool) -> list[AddedToken]:
    """Returns the unknown and control pieces as special tokens, which have no text. With `with_user_defined`, the
    result has the user-defined pieces too, as text that is never cut; a unigram model finds these by itself. Unless
    every stretch gets a space, SentencePiece looks for them after spaces have become marks."""
    added: list[AddedToken] = []
    for piece, kind in zip(model.pieces, model.types, strict=True):
        if kind in (PieceType.UNKNOWN, PieceType.CONTROL) and piece:
            added.append(AddedToken(piece, normalized=False, special=True))
        elif kind == PieceType.USER_DEFINED and piece and with_user_defined:
            added.append(AddedToken(piece, normalized=prefix is not Prefix.STRETCH, special=False))
    return added


def describe(tokenizer: Tokenizer, prefix: Prefix, also_before: Sequence[str] = ()) -> str:
    """Returns the contents of a `tokenizer.json`, with the prefix if the library cannot express it. `also_before`:
    added tokens that are text to SentencePiece, so that a text which begins with one gets the prefix."""
    description = tokenizer.to_str()
    if prefix is not Prefix.TEXT:
        return description
    field = {"text": WORD_MARK, "also_before": list(also_before)}
    return json.dumps({**json.loads(description), TEXT_PREFIX: field}, ensure_ascii=False)
