"""Reads a SentencePiece model file (`tokenizer.model`): a protobuf message with pieces, scores and settings.

Only the fields that decide token ids are read, by their numbers in `sentencepiece_model.proto`. The file is data from
strangers: lengths are held against what is there, and a message that is not valid is an error that names the field.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from onward.errors import StartupError
from onward.text.token_table import MAX_TOKENS


class PieceType(IntEnum):
    """Values of `SentencePiece.type`. GGUF has the same ones in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelType(IntEnum):
    """Values of `TrainerSpec.model_type`."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(slots=True)
class SentencePieceModel:
    """Defaults are those of the message."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    model_type: int = ModelType.UNIGRAM
    byte_fallback: bool = False
    whitespace_is_suffix: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    charsmap: bytes = b""
    """Rules of Unicode normalization, compiled by SentencePiece. Empty: the text stays as it is."""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True

    @property
    def user_defined_pieces(self) -> list[str]:
        return [p for p, kind in zip(self.pieces, self.types, strict=True) if kind == PieceType.USER_DEFINED]


def parse_model(data: bytes) -> SentencePieceModel:
    """Raises `StartupError` for what is not such a message."""
    model = SentencePieceModel()
    for number, value in _fields(data):
        match number, value:
            case 1, bytes():
                _add_piece(model, value)
            case 2, bytes():
                _read_trainer_spec(model, value)
            case 3, bytes():
                _read_normalizer_spec(model, value)
    if not model.pieces:
        raise StartupError("the SentencePiece model has no pieces")
    return model


def _add_piece(model: SentencePieceModel, data: bytes) -> None:
    piece, score, piece_type = "", 0.0, int(PieceType.NORMAL)
    for number, value in _fields(data):
        match number, value:
            case 1, bytes():
                piece = _text(value)
            case 2, float():
                score = value
            case 3, int():
                piece_type = value
    if len(model.pieces) >= MAX_TOKENS:
        raise StartupError(f"the SentencePiece model has more than {MAX_TOKENS} pieces")
    model.pieces.append(piece)
    model.scores.append(score)
    model.types.append(piece_type)


def _read_trainer_spec(model: SentencePieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        match number, value:
            case 3, int():
                model.model_type = value
            case 24, int():
                model.whitespace_is_suffix = bool(value)
            case 35, int():
                model.byte_fallback = bool(value)
            case 40, int():
                model.unk_id = value
            case 41, int():
                model.bos_id = value
            case 42, int():
                model.eos_id = value


def _read_normalizer_spec(model: SentencePieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        match number, value:
            case 2, bytes():
                model.charsmap = value
            case 3, int():
                model.add_dummy_prefix = bool(value)
            case 4, int():
                model.remove_extra_whitespaces = bool(value)
            case 5, int():
                model.escape_whitespaces = bool(value)


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yields the fields of a message: a number, and a value whose type depends on the wire type."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire_type = key & 7
        if wire_type == 0:
            value, position = _varint(data, position)
            # Negative numbers are written as 64 bits.
            yield key >> 3, value - (1 << 64) if value >= 1 << 63 else value
        elif wire_type == 2:
            length, position = _varint(data, position)
            yield key >> 3, _slice(data, position, length)
            position += length
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
            (number,) = struct.unpack("<d" if wire_type == 1 else "<f", _slice(data, position, length))
            yield key >> 3, number
            position += length
        else:
            raise StartupError(f"the SentencePiece model is not valid: wire type {wire_type} at byte {position}")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise StartupError("the SentencePiece model is not valid: it ends within a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, position
    raise StartupError(f"the SentencePiece model is not valid: a number at byte {position} is too long")


def _slice(data: bytes, position: int, length: int) -> bytes:
    if length > len(data) - position:
        raise StartupError(f"the SentencePiece model is not valid: a field at byte {position} is longer than the file")
    return data[position : position + length]


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise StartupError(f"the SentencePiece model has the piece {data[:80]!r}, which is not UTF-8") from None
