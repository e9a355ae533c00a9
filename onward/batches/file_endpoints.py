"""The routes of `/v1/files`: upload, list, show, download and delete a caller's files."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from onward.batches.batch_policy import (
    MAX_FILE_BYTES,
    MAX_UPLOADS,
    BatchLimits,
    check_expiry,
    check_file_quota,
)
from onward.batches.batch_store import FILE_PREFIX, BatchStore
from onward.batches.caller_turns import CallerTurns
from onward.batches.listing import page_of, page_query
from onward.batches.records import BATCH, BATCH_OUTPUT, DeletedFile, FileList, FileRecord, file_object
from onward.batches.upload import UploadReader, expiry_fields, receive_upload
from onward.clock import Clock
from onward.errors import RETRY_SOON_S, InvalidRequest, NotFound, RateLimited
from onward.web.auth.api_key_table import Caller
from onward.web.auth.authenticator import get_caller
from onward.web.http_responses import json_response
from onward.web.json_body import field_error, short_repr

MAX_PAGE = 10_000
READ_BYTES = 1 << 18
PURPOSES = (BATCH, BATCH_OUTPUT)


class FileEndpoints:
    def __init__(self, store: BatchStore, limits: BatchLimits, clock: Clock, turns: CallerTurns) -> None:
        self._store, self._limits, self._clock, self._turns = store, limits, clock, turns
        self._uploads: Counter[str] = Counter()

    async def files(self, request: Request) -> Response:
        return await (self._upload(request) if request.method == "POST" else self._list(request))

    async def file(self, request: Request) -> Response:
        caller, file_id = get_caller(request.scope), request.path_params["file_id"]
        record = await asyncio.to_thread(self._store.find_file, caller, file_id, self._clock.wall_s())
        if request.method != "DELETE":
            return json_response(file_object(record))
        await self._turns.run(record.caller, self._delete, record)
        return json_response(DeletedFile(record.id))

    async def content(self, request: Request) -> Response:
        caller, file_id = get_caller(request.scope), request.path_params["file_id"]
        record = await asyncio.to_thread(self._store.find_file, caller, file_id, self._clock.wall_s())
        try:
            # An open file can be read to its end even if it is deleted meanwhile.
            content = await asyncio.to_thread(self._store.content_path(record.caller, record.id).open, "rb")
        except FileNotFoundError:
            raise NotFound("file_id: the file was deleted just now", code="file_not_found", param="file_id") from None
        headers = {
            "content-length": str(record.num_bytes),
            # A browser must never show a caller's bytes as a page of this server.
            "content-disposition": f"attachment; filename*=UTF-8''{quote(record.filename, safe='')}",
            "x-content-type-options": "nosniff",
        }
        chunks = _chunks(content, record.num_bytes)
        return StreamingResponse(chunks, headers=headers, media_type="application/octet-stream")

    async def _list(self, request: Request) -> Response:
        caller, query = get_caller(request.scope), request.query_params
        purpose = query.get("purpose")
        if purpose is not None and purpose not in PURPOSES:
            raise field_error("purpose", f"must be one of {', '.join(PURPOSES)}, got {short_repr(purpose)}")
        page = page_query(query, MAX_PAGE, MAX_PAGE)
        records = await asyncio.to_thread(self._visible_files, caller)
        chosen, has_more = page_of([one for one in records if purpose in (None, one.purpose)], page)
        objects = [file_object(record) for record in chosen]
        ids = [one.id for one in objects] or [None]
        return json_response(FileList(objects, has_more, ids[0], ids[-1]))

    def _visible_files(self, caller: Caller) -> list[FileRecord]:
        now_s = self._clock.wall_s()
        names = self._store.callers() if caller.is_admin else [caller.name]
        return [record for name in names for record in self._store.files(name) if record.expires_s > now_s]

    async def _upload(self, request: Request) -> Response:
        caller = get_caller(request.scope).name
        content_type = request.headers.get("content-type", "")
        if self._uploads[caller] >= MAX_UPLOADS:
            raise RateLimited(f"you have {MAX_UPLOADS} uploads under way, as many as may", retry_after_s=RETRY_SOON_S)
        self._uploads[caller] += 1
        path: Path | None = None
        try:
            path = await asyncio.to_thread(self._store.new_upload, caller)
            max_bytes = await asyncio.to_thread(self._max_file_bytes, caller)
            reader = await receive_upload(request.receive, content_type, path, max_bytes)
            record = self._record(caller, reader)
            await self._turns.run(caller, self._add, record, path)
            return json_response(file_object(record))
        finally:
            self._uploads[caller] -= 1
            if not self._uploads[caller]:
                del self._uploads[caller]
            if path is not None:
                await asyncio.to_thread(path.unlink, missing_ok=True)

    def _max_file_bytes(self, caller: str) -> int:
        return min(MAX_FILE_BYTES, max(0, self._limits.max_bytes - self._store.stored_bytes(caller)))

    def _record(self, caller: str, reader: UploadReader) -> FileRecord:
        purpose = reader.field("purpose")
        if purpose != BATCH:
            problem = "is required" if purpose is None else f"got {short_repr(purpose)}"
            raise field_error("purpose", f"must be {BATCH}, the only purpose of uploads here; {problem}")
        anchor, seconds = expiry_fields(reader)
        if (anchor is None) != (seconds is None) or anchor not in (None, "created_at"):
            raise field_error("expires_after", "must have the anchor created_at, and seconds")
        if seconds is not None:
            check_expiry(seconds, "expires_after[seconds]")
        now_s = self._clock.wall_s()
        assert reader.filename is not None
        return FileRecord(
            self._store.new_id(FILE_PREFIX, caller),
            caller,
            now_s,
            reader.filename,
            reader.num_bytes,
            BATCH,
            now_s + (self._limits.ttl_s if seconds is None else seconds),
        )

    def _add(self, record: FileRecord, path: Path) -> None:
        with self._store.locked(record.caller):
            num_files, stored = len(self._store.files(record.caller)), self._store.stored_bytes(record.caller)
            check_file_quota(num_files, stored, record.num_bytes, self._limits)
            self._store.add_file(record, path)

    def _delete(self, record: FileRecord) -> None:
        with self._store.locked(record.caller):
            for batch in self._store.batches(record.caller):
                if batch.input_file_id == record.id and not batch.has_ended:
                    problem = f"file_id: it is the input of {batch.id}, which has not ended; cancel that first"
                    raise InvalidRequest(problem, param="file_id", code="file_in_use")
            self._store.delete_file(record)


async def _chunks(content: BinaryIO, num_bytes: int) -> AsyncIterator[bytes]:
    """Yields the first `num_bytes` bytes, and closes the file."""
    with content:
        while num_bytes and (chunk := await asyncio.to_thread(content.read, min(READ_BYTES, num_bytes))):
            num_bytes -= len(chunk)
            yield chunk
