"""HTTP client of commands for a running server: one request, one JSON answer, and errors in one line.

It does not know what requests mean. It authenticates with a cluster key and an API key, if they were given.
"""

import argparse
import http.client
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from onward.bench.openai_chunks import error_message
from onward.cli.api_keys import add_api_key_file, api_key_from_args
from onward.cli.server_url import checked_url, describe_error
from onward.errors import NotFound, OnwardError, ServerError, Unavailable
from onward.proto.router import SIGNATURE_HEADER
from onward.supervisor.cluster_key import read_key
from onward.transport.cluster_signature import sign_request

TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 16 << 20


@dataclass(slots=True, frozen=True)
class AdminClient:
    url: str
    api_key: str | None = None
    cluster_key: str = ""
    timeout_s: float = TIMEOUT_S
    """Limit of each wait for the server."""

    def get(self, path: str) -> Any:
        return self._call("GET", path)

    def post(self, path: str) -> Any:
        return self._call("POST", path)

    def _call(self, method: str, path: str) -> Any:
        """Returns the JSON of the answer. Raises `Unavailable` if no server answers, `NotFound` if there is no such
        route, else `ServerError`."""
        parts = urlsplit(self.url)
        with closing(_connect(parts, self.timeout_s)) as connection:
            try:
                # The connection is closed after the answer, because some servers are about to stop.
                connection.request(
                    method, parts.path + path, headers=self._headers(method, path) | {"Connection": "close"}
                )
                response = connection.getresponse()
                body = response.read(MAX_ANSWER_BYTES)
            except (OSError, http.client.HTTPException) as fault:
                raise Unavailable(f"no server answers at {self.url}: {self._why(fault)}") from None
        if response.status >= 300:
            raise self._error(response.status, path, body)
        try:
            return msgspec.json.decode(body) if body else None
        except msgspec.DecodeError:
            raise ServerError(
                f"{self.url}{path} answers with something other than JSON; is it an Onward server?"
            ) from None

    def events(self, path: str) -> Iterator[Any]:
        """Yields the JSON of each server-sent event, until the server ends the stream. Raises as `get` does."""
        parts = urlsplit(self.url)
        with closing(_connect(parts, self.timeout_s)) as connection:
            try:
                connection.request("GET", parts.path + path, headers=self._headers("GET", path))
                response = connection.getresponse()
                if response.status != 200:
                    raise self._error(response.status, path, response.read(MAX_ANSWER_BYTES))
                while line := response.readline(MAX_ANSWER_BYTES):
                    if line.startswith(b"data:"):
                        yield msgspec.json.decode(line[5:])
            except (OSError, http.client.HTTPException, msgspec.DecodeError) as fault:
                raise Unavailable(f"{self.url} does not send events any more: {self._why(fault)}") from None

    def _error(self, status: int, path: str, body: bytes) -> OnwardError:
        error_class = NotFound if status == 404 else ServerError
        hint = "; show one with --cluster-key-file or --api-key" if status in (401, 403) else ""
        return error_class(f"{self.url}{path} answers {status}: {error_message(body)}{hint}")

    def _why(self, fault: Exception) -> str:
        if isinstance(fault, TimeoutError):
            return f"no answer within {self.timeout_s:g} s"
        return describe_error(fault)

    def _headers(self, method: str, path: str) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        if self.cluster_key:
            headers[SIGNATURE_HEADER] = sign_request(self.cluster_key, method, path, b"", time.time())
        return headers


def add_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("url", metavar="URL", help=f"{what}, for example http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="API key of the server")
    add_api_key_file(parser)
    parser.add_argument("--cluster-key-file", metavar="FILE", help="file with the cluster's secret, if there is one")


def admin_client_from_args(args: argparse.Namespace) -> AdminClient:
    url = args.url if "://" in args.url else f"http://{args.url}"
    return AdminClient(checked_url(url, "URL:"), api_key_from_args(args), read_key(args.cluster_key_file))


def _connect(parts: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    assert parts.hostname is not None, "checked before"
    return connection_class(parts.hostname, parts.port, timeout=timeout_s)
