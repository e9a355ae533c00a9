"""Receives a `multipart/form-data` upload, and writes its file to disk as it arrives."""

import asyncio
import os
from pathlib import Path
from typing import Any, BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Receive

from onward.errors import ClientError, InvalidRequest, OnwardError, TooLarge
from onward.web import asgi
from onward.web.json_body import field_error, short_repr

FILE = "file"
FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})
MAX_FIELD_BYTES = 256
MAX_OVERHEAD_BYTES = 16 << 10
"""Bytes of an upload beside its file."""
MAX_HEADER_BYTES = 4 << 10
MAX_FILENAME_CHARS = 255
PART_TIMEOUT_S = 60.0
UPLOAD_TIMEOUT_S = 3600.0


class UploadReader:
    """Parses an upload part by part. Takes bytes, and writes those of the file to `content`."""

    def __init__(self, content_type: str, content: BinaryIO, max_bytes: int) -> None:
        """`max_bytes` is the limit on the file's size."""
        _, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if not 1 <= len(boundary) <= 70:
            raise InvalidRequest("Content-Type: multipart/form-data must have a boundary", param="Content-Type")
        self._content, self._max_bytes = content, max_bytes
        self._header_name = self._header_value = self._disposition = b""
        self._part = ""
        self._num_received = 0
        self._is_complete = False
        self.fields: dict[str, bytes] = {}
        self.filename: str | None = None
        self.num_bytes = 0
        callbacks: Any = {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_part_data": self._on_part_data,
            "on_headers_finished": self._on_headers_finished,
            "on_end": self._on_end,
        }
        self._parser = MultipartParser(boundary, callbacks)

    def feed(self, data: bytes) -> None:
        self._num_received += len(data)
        if self._num_received - self.num_bytes > MAX_OVERHEAD_BYTES + len(data):
            raise InvalidRequest(f"the body has more than {MAX_OVERHEAD_BYTES} bytes beside the file")
        try:
            self._parser.write(data)
        except FormParserError as fault:
            raise InvalidRequest(f"the body is not valid multipart/form-data: {str(fault)[:200]}") from None

    def finish(self) -> None:
        """Checks that everything has arrived."""
        if not self._is_complete:
            raise InvalidRequest("the body ends before the last boundary of multipart/form-data")
        if self.filename is None:
            raise field_error(FILE, "is required: a part with a filename")

    def field(self, name: str) -> str | None:
        value = self.fields.get(name)
        return None if value is None else value.decode(errors="replace")

    def _on_part_begin(self) -> None:
        self._part = ""
        self._header_name = self._header_value = self._disposition = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]
        self._check_header()

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._header_name) + len(self._header_value) > MAX_HEADER_BYTES:
            raise InvalidRequest(f"a header of a part is longer than {MAX_HEADER_BYTES} bytes")

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if name == FILE:
            if self.filename is not None:
                raise field_error(FILE, "there may be one file only")
            if b"filename" not in options:
                raise field_error(FILE, "must be a file: the part has no filename")
            self.filename = options[b"filename"].decode(errors="replace")[:MAX_FILENAME_CHARS] or "upload.jsonl"
        elif name not in FIELDS:
            raise field_error(
                name[:80] or "name", f"there is no such field; there are {FILE}, {', '.join(sorted(FIELDS))}"
            )
        elif name in self.fields:
            raise field_error(name, "is there twice")
        else:
            self.fields[name] = b""
        self._part = name

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part != FILE:
            self.fields[self._part] += data[start:end]
            if len(self.fields[self._part]) > MAX_FIELD_BYTES:
                raise field_error(self._part, f"is longer than {MAX_FIELD_BYTES} bytes")
            return
        self.num_bytes += end - start
        if self.num_bytes > self._max_bytes:
            raise TooLarge(f"file: is larger than {self._max_bytes} bytes, as much as you may add", param=FILE)
        self._content.write(data[start:end])

    def _on_end(self) -> None:
        self._is_complete = True


async def receive_upload(receive: Receive, content_type: str, path: Path, max_bytes: int) -> UploadReader:
    """Writes the file to `path`, and returns the other fields. The caller removes the file if this raises."""
    try:
        async with asyncio.timeout(UPLOAD_TIMEOUT_S):
            return await _receive(receive, content_type, path, max_bytes)
    except TimeoutError:
        raise ClientError("the body did not arrive in time", code="body_timeout") from None


async def _receive(receive: Receive, content_type: str, path: Path, max_bytes: int) -> UploadReader:
    more_body = True
    try:
        with path.open("wb") as content:
            reader = UploadReader(content_type, content, max_bytes)
            while more_body:
                message = await asyncio.wait_for(receive(), PART_TIMEOUT_S)
                if message["type"] == "http.disconnect":
                    more_body = False
                    raise InvalidRequest("the client has disconnected")
                more_body = message.get("more_body", False)
                if body := message.get("body", b""):
                    await asyncio.to_thread(reader.feed, body)
            reader.finish()
            await asyncio.to_thread(_sync, content)
        return reader
    except OnwardError:
        if more_body:
            await _discard_rest(receive)
        raise


def _sync(content: BinaryIO) -> None:
    content.flush()
    os.fsync(content.fileno())


async def _discard_rest(receive: Receive) -> None:
    """Reads the rest of a refused body for a while, because a client that is still sending does not read the answer."""
    num_bytes, more_body = 0, True
    while more_body and num_bytes <= asgi.MAX_DISCARDED_BYTES:
        message = await asyncio.wait_for(receive(), PART_TIMEOUT_S)
        num_bytes += len(message.get("body", b""))
        more_body = message.get("more_body", False)


def expiry_fields(reader: UploadReader) -> tuple[str | None, int | None]:
    """Returns anchor and seconds of `expires_after`, as the client sent them."""
    anchor, seconds = reader.field("expires_after[anchor]"), reader.field("expires_after[seconds]")
    if seconds is None:
        return anchor, None
    if not seconds.isascii() or not seconds.isdigit() or len(seconds) > 9:
        raise field_error("expires_after[seconds]", f"must be a number of seconds, got {short_repr(seconds)}")
    return anchor, int(seconds)
