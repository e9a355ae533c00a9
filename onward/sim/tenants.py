"""The API keys of simulated callers, and a client that tries to access another caller's streams.

The intruder knows all that a client knows of its stream, except the key. It tries to resume the stream, and to abort it
by id and by label, again and again. Each reply must say that there is no such stream.
"""

import asyncio
from typing import Any

import aiohttp
import msgspec

from onward.proto.api_key_entry import ApiKeyEntry
from onward.proto.cursor import parse_cursor
from onward.sim.http import SimHttpNetwork, SimHttpSession
from onward.sim.process import SimProcess
from onward.sim.reply_check import InvariantError
from onward.web.auth.api_key_table import HASH_PREFIX, hash_key

CLUSTER_KEY = "5a" * 32
PRY_EVERY_S = 0.2
PATIENCE_S = 8.0
NOT_NOW = frozenset({429, 502, 503})
ISOLATION_INVARIANT = 8
"""Number of the invariant that callers are isolated from each other."""


def auth_header(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key of {name}"} if name else {}


def key_entries(names: list[str], max_in_flight: int | None) -> list[ApiKeyEntry]:
    return [
        ApiKeyEntry(
            name=name,
            digest=hash_key(f"key of {name}").removeprefix(HASH_PREFIX),
            role="user",
            max_in_flight=max_in_flight,
        )
        for name in names
    ]


class IntruderClient:
    def __init__(self, network: SimHttpNetwork, process: SimProcess, name: str, path: str, urls: list[str]) -> None:
        self._path, self._urls = path, urls
        self._headers = auth_header(name) | {"content-type": "application/json"}
        self._session = SimHttpSession(network, process)
        self._random = network.context.random.substream(process.name)

    async def try_access_stream(self, cursor: str, label: str, body: dict[str, Any]) -> None:
        """Tries to resume or abort a stream, chosen at random. Raises `InvariantError` if the reply reveals anything or
        the abort has an effect."""
        base_url, request_id = self._random.choice(self._urls), parse_cursor(cursor).request_id
        url, resume_headers = base_url + self._path, self._headers | {"Last-Event-ID": cursor}
        try:
            async with asyncio.timeout(PATIENCE_S):
                match self._random.below(3):
                    case 0:
                        self._check(*await self._read_reply(self._session.get(url, headers=resume_headers)))
                    case 1:
                        request = self._session.post(url, data=msgspec.json.encode(body), headers=resume_headers)
                        self._check(*await self._read_reply(request))
                    case _:
                        await self._abort(base_url, [request_id, label])
        except (aiohttp.ClientError, OSError):
            return  # the server may die or hang, as for any client

    async def try_access_response(self, response_id: str) -> None:
        method, suffix = self._random.choice(
            (("GET", ""), ("GET", "?stream=true"), ("DELETE", ""), ("POST", "/cancel"))
        )
        url = f"{self._random.choice(self._urls)}{self._path}/{response_id}{suffix}"
        try:
            async with asyncio.timeout(PATIENCE_S):
                status, reply = await self._read_reply(self._session.request(method, url, headers=self._headers))
        except (aiohttp.ClientError, OSError):
            return
        code = reply.get("error", {}).get("code")
        if status not in NOT_NOW and (status, code) != (404, "response_not_found"):
            raise InvariantError(
                ISOLATION_INVARIANT, f"a stranger's {method} of a response is answered with {status} {code}"
            )

    async def _abort(self, base_url: str, names: list[str]) -> None:
        request = self._session.post(
            base_url + "/v1/abort", data=msgspec.json.encode({"ids": names}), headers=self._headers
        )
        status, reply = await self._read_reply(request)
        if status not in NOT_NOW and (status != 200 or reply["aborted"]):
            raise InvariantError(ISOLATION_INVARIANT, f"a stranger's abort is answered with {status} {reply}")

    async def _read_reply(self, request: Any) -> tuple[int, Any]:
        async with request as response:
            if response.status == 200 and not response.headers.get("content-type", "").startswith("application/json"):
                response.close()
                return 200, {}
            return response.status, msgspec.json.decode(await response.read())

    def _check(self, status: int, reply: Any) -> None:
        code = reply.get("error", {}).get("code")
        if status not in NOT_NOW and (status, code) != (404, "stream_unknown"):
            raise InvariantError(ISOLATION_INVARIANT, f"a stranger who comes back is answered with {status} {code}")
