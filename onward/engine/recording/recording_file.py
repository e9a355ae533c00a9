"""The file of a recording: chunks of records, each compressed and checked, so that a file cut short is read up to there.

    file    magic | chunk | chunk | ...
    chunk   length, checksum | zlib: record length, msgpack | record length, msgpack | ...

Records are encoded where they happen; compressing and writing is a thread's, behind a bounded queue, so that a slow disk
never holds the engine up. If the queue stays full the recording ends, and says so: one with a hole could not be replayed.
"""

import contextlib
import errno
import logging
import queue
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from onward import log
from onward.errors import InvalidRequest, StartupError

logger = logging.getLogger(__name__)

MAGIC = b"onward-recording-1\n"
CHUNK_BYTES = 256 << 10
MAX_CHUNK_BYTES = 256 << 20
MAX_QUEUED_CHUNKS = 64
MAX_WAIT_S = 0.1
"""How long the engine waits, once, for a disk that has fallen behind."""
FLUSH_INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 5.0
MAX_SIBLINGS = 1000

_CHUNK_HEADER = struct.Struct("<II")
_RECORD_HEADER = struct.Struct("<I")


def check_recording(path: str) -> None:
    """Checks, before anything is loaded, that a recording can be made at this path. Later, a fault of the path does not
    stop the server."""
    try:
        created, file = _create_file(Path(path))
    except OSError as fault:
        raise StartupError(f"cannot record to {path}: {fault.strerror}; choose another --record") from fault
    file.close()
    created.unlink(missing_ok=True)


def open_recording(path: str) -> "RecordingWriter | None":
    """Creates the recording file and returns its writer. Logs a warning and returns None if the file cannot be written:
    a restarted engine serves without a recording rather than not at all."""
    try:
        return RecordingWriter(path)
    except (OSError, RuntimeError) as fault:  # RuntimeError: no thread could be started
        logger.warning(log.event("no recording", file=path, cause=str(fault)))
        return None


class RecordingWriter:
    def __init__(self, path: str) -> None:
        self.path, self._file = _create_file(Path(path))
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._chunks: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED_CHUNKS)
        self._ended = False
        self._fault: OSError | None = None
        self._next_flush_s = 0.0
        self._thread = threading.Thread(target=self._write_chunks, name="recording", daemon=True)
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        return not self._ended and self._fault is None

    def write(self, record: object) -> None:
        if self._ended:
            return
        offset = len(self._buffer)
        self._buffer += bytes(_RECORD_HEADER.size)
        try:
            self._encoder.encode_into(record, self._buffer, -1)
        except Exception as fault:  # whatever it is: what cannot be recorded is served all the same
            del self._buffer[offset:]
            self._queue_chunk(MAX_WAIT_S)
            self._give_up(f"a {type(record).__name__} cannot be encoded: {fault!r}")
            return
        _RECORD_HEADER.pack_into(self._buffer, offset, len(self._buffer) - offset - _RECORD_HEADER.size)
        if len(self._buffer) >= CHUNK_BYTES:
            self._queue_chunk(MAX_WAIT_S)

    def flush_if_due(self, now_s: float) -> None:
        """Passes buffered records to the writing thread every FLUSH_INTERVAL_S, so that a crash loses about a second of
        the recording at most."""
        if now_s >= self._next_flush_s:
            self._next_flush_s = now_s + FLUSH_INTERVAL_S
            self._queue_chunk(MAX_WAIT_S)

    def close(self) -> None:
        """Writes what is left. Waits for the disk, but not for ever."""
        self._queue_chunk(CLOSE_TIMEOUT_S)
        self._end()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _queue_chunk(self, timeout_s: float) -> None:
        if self._ended or not self._buffer:
            return
        chunk, self._buffer = bytes(self._buffer), bytearray()
        try:
            self._chunks.put(chunk, timeout=timeout_s)
        except queue.Full:
            self._give_up("the disk is too slow")
        if self._fault is not None:
            self._give_up(str(self._fault))

    def _give_up(self, cause: str) -> None:
        logger.warning(log.event("recording ended", file=self.path, cause=cause))
        self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            try:
                self._chunks.put(None, timeout=MAX_WAIT_S)
            except queue.Full:
                logger.warning(log.event("recording left open", file=self.path))

    def _write_chunks(self) -> None:
        with self._file:
            while (chunk := self._chunks.get()) is not None:
                if self._fault is None:
                    try:
                        self._file.write(pack_chunk(chunk))
                        self._file.flush()
                    except OSError as fault:
                        self._fault = fault  # the engine's side ends the recording


def pack_chunk(records: bytes) -> bytes:
    packed = zlib.compress(records, 1)
    return _CHUNK_HEADER.pack(len(packed), zlib.crc32(packed)) + packed


def _create_file(path: Path) -> tuple[Path, BinaryIO]:
    """Creates a new file. An existing file may be evidence, or the recording of the previous engine, so the new file
    gets a numbered name beside it."""
    for number in range(MAX_SIBLINGS):
        candidate = path if number == 0 else path.with_name(f"{path.name}.{number}")
        try:
            file = candidate.open("xb")
        except FileExistsError:
            continue
        try:
            file.write(MAGIC)
            file.flush()
        except OSError:
            candidate.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                file.close()  # which tries to write once more
            raise
        return candidate, file
    raise FileExistsError(errno.EEXIST, f"{MAX_SIBLINGS} recordings of this name are there already", str(path))


class RecordingReader:
    """Yields the encoded records of all chunks that are whole. `fault` then says why it ended before the file did."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.truncated = False
        self.fault: str | None = None

    def __iter__(self) -> Iterator[memoryview]:
        try:
            with self._path.open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise InvalidRequest(f"{self._path} is not a recording of this version of Onward", param="file")
                while (chunk := self._next_chunk(file)) is not None:
                    yield from _split(memoryview(chunk))
        except OSError as fault:
            raise InvalidRequest(f"cannot read {self._path}: {fault.strerror}", param="file") from fault

    def _next_chunk(self, file: BinaryIO) -> bytes | None:
        offset = file.tell()
        header = file.read(_CHUNK_HEADER.size)
        if not header:
            return None
        length, checksum = _CHUNK_HEADER.unpack(header) if len(header) == _CHUNK_HEADER.size else (0, 0)
        packed = file.read(length) if length <= MAX_CHUNK_BYTES else b""
        if len(header) < _CHUNK_HEADER.size or (len(packed) < length <= MAX_CHUNK_BYTES):
            self.truncated = True
            self.fault = f"the file ends in the middle of the chunk at byte {offset}"
            return None
        if length > MAX_CHUNK_BYTES or zlib.crc32(packed) != checksum:
            self.fault = f"the chunk at byte {offset} is damaged"
            return None
        return zlib.decompress(packed)


def _split(chunk: memoryview) -> Iterator[memoryview]:
    offset = 0
    while offset < len(chunk):
        (length,) = _RECORD_HEADER.unpack_from(chunk, offset)
        offset += _RECORD_HEADER.size
        yield chunk[offset : offset + length]
        offset += length
