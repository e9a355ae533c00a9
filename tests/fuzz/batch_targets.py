"""What a client can send for a batch: a form with a file, the lines of the file, and the batch itself."""

import io
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from onward.batches.batch_endpoints import decode_create
from onward.batches.batch_files import check_input, read_requests
from onward.batches.batch_policy import find_problem, with_seed
from onward.batches.upload import UploadReader, expiry_fields
from onward.errors import ClientError
from tests.fuzz.case import Target
from tests.fuzz.mutation import byte_cases, cases

CHAT = "/v1/chat/completions"
MAX_BYTES = 64
BATCH = {
    "input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h", "metadata": {"a": "b"},
    "output_expires_after": {"anchor": "created_at", "seconds": 3600},
}  # fmt: skip
LINES = [
    {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "m", "messages": [], "seed": 5}},
    {"custom_id": "b", "method": "POST", "url": CHAT, "body": {"model": "m", "stream": False, "background": None}},
]
FORM = b"".join(
    b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % part
    for part in (
        (b"purpose", b"", b"batch"),
        (b"file", b'; filename="in.jsonl"\r\nContent-Type: application/octet-stream', b"content\r\nof it"),
        (b"expires_after[anchor]", b"", b"created_at"),
        (b"expires_after[seconds]", b"", b"3600"),
    )
)
FORMS = [FORM + b"--b--\r\n", FORM, b"--b--\r\n", b"\r\n" + FORM + b"--b--\r\nafter"]


def _create(body: bytes) -> None:
    request = decode_create(body)
    assert request.completion_window == "24h" and request.endpoint.startswith("/v1/")


def _lines(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.jsonl"
        path.write_bytes(content)
        ids = check_input(path, lambda request: find_problem(request, CHAT))
        requests = [with_seed(request, 7) for request in read_requests(path)]
    assert [request.custom_id for request in requests] == ids and len(set(ids)) == len(ids)
    assert all(bytes(request.body["seed"]) != b"null" for request in requests)


def _form(case: bytes) -> None:
    """In parts of different lengths, as a network cuts them."""
    content = io.BytesIO()
    reader = UploadReader("multipart/form-data; boundary=b", content, MAX_BYTES)
    size = 1 + len(case) % 7
    for start in range(0, len(case), size):
        reader.feed(case[start : start + size])
    reader.finish()
    expiry_fields(reader)
    assert reader.num_bytes == len(content.getvalue()) <= MAX_BYTES
    assert reader.filename is not None and set(reader.fields) <= {
        "purpose",
        "expires_after[anchor]",
        "expires_after[seconds]",
    }


def _content_type(case: bytes) -> None:
    reader = UploadReader(case.decode("latin-1"), io.BytesIO(), MAX_BYTES)
    reader.feed(FORM)


def _write_lines(tree: Any) -> bytes:
    lines = tree if isinstance(tree, list) else [tree]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _content_type_cases() -> st.SearchStrategy[bytes]:
    return byte_cases([b"multipart/form-data; boundary=b", b'multipart/form-data; boundary="b"; x=y', b"a/b"])


TARGETS = [
    Target("batch", cases([BATCH], lambda tree: json.dumps(tree).encode()), _create, (ClientError,)),
    Target("batch_lines", cases([LINES], _write_lines), _lines, (ClientError,)),
    Target("upload", byte_cases(FORMS), _form, (ClientError,)),
    Target("upload_type", _content_type_cases(), _content_type, (ClientError,)),
]
