"""Tenants of a simulation: their keys, and how each pries into the streams of another.

A stranger has got hold of all that a client knows of its stream, but for the key. It comes back for it and aborts it, by id
and by label, as often as it likes, and must be told each time that there is no such stream.
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
"""The invariant."""


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
    def __init__(self, web: SimHttpNetwork, process: SimProcess, name: str, path: str, doors: list[str]) -> None:
        self._path, self._doors = path, doors
        self._headers = auth_header(name) | {"content-type": "application/json"}
        self._session = SimHttpSession(web, process)
        self._chance = web.ground.random.substream(process.name)

    async def try_access_stream(self, cursor: str, label: str, body: dict[str, Any]) -> None:
        """In one way or the other. Raises `InvariantError` if anything is learnt or done by it."""
        door, request_id = self._chance.choice(self._doors), parse_cursor(cursor).request_id
        url, back = door + self._path, self._headers | {"Last-Event-ID": cursor}
        try:
            async with asyncio.timeout(PATIENCE_S):
                match self._chance.below(3):
                    case 0:
                        self._check(*await self._answered(self._session.get(url, headers=back)))
                    case 1:
                        asked = self._session.post(url, data=msgspec.json.encode(body), headers=back)
                        self._check(*await self._answered(asked))
                    case _:
                        await self._abort(door, [request_id, label])
        except (aiohttp.ClientError, OSError):
            return  # as others, it may meet a server that dies, or hangs

    async def try_access_response(self, response_id: str) -> None:
        method, more = self._chance.choice((("GET", ""), ("GET", "?stream=true"), ("DELETE", ""), ("POST", "/cancel")))
        url = f"{self._chance.choice(self._doors)}{self._path}/{response_id}{more}"
        try:
            async with asyncio.timeout(PATIENCE_S):
                status, told = await self._answered(self._session.request(method, url, headers=self._headers))
        except (aiohttp.ClientError, OSError):
            return
        code = told.get("error", {}).get("code")
        if status not in NOT_NOW and (status, code) != (404, "response_not_found"):
            raise InvariantError(
                ISOLATION_INVARIANT, f"a stranger's {method} of a response is answered with {status} {code}"
            )

    async def _abort(self, door: str, names: list[str]) -> None:
        asked = self._session.post(door + "/v1/abort", data=msgspec.json.encode({"ids": names}), headers=self._headers)
        status, told = await self._answered(asked)
        if status not in NOT_NOW and (status != 200 or told["aborted"]):
            raise InvariantError(ISOLATION_INVARIANT, f"a stranger's abort is answered with {status} {told}")

    async def _answered(self, asked: Any) -> tuple[int, Any]:
        async with asked as response:
            if response.status == 200 and not response.headers.get("content-type", "").startswith("application/json"):
                response.close()
                return 200, {}
            return response.status, msgspec.json.decode(await response.read())

    def _check(self, status: int, told: Any) -> None:
        code = told.get("error", {}).get("code")
        if status not in NOT_NOW and (status, code) != (404, "stream_unknown"):
            raise InvariantError(ISOLATION_INVARIANT, f"a stranger who comes back is answered with {status} {code}")
