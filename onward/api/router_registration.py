"""Sends registrations of this instance to each of its routers, once a second, and deregisters it when it stops.

Each router has a task of its own, so a router that hangs or is unreachable delays no other one. It is retried for ever. A
registration carries the changes of the engine's prefix cache as `kv_events` if the router's last reply asked for them.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import aiohttp
import msgspec

from onward import log
from onward.api.endpoints.attempts import MSGPACK
from onward.api.instance_description import InstanceDescription
from onward.clock import Clock
from onward.config import ApiConfig
from onward.errors import Unavailable
from onward.proto.router import REGISTER_PATH, SIGNATURE_HEADER, Registration, RegistrationReply
from onward.transport.cluster_signature import sign_request

POST_TIMEOUT_S = 2.0
REPLACED_TIMEOUT_S = 1.0
"""How long the last registration of an instance may take if a new server replaces it. The new server serves after this
process has ended, and registers by itself."""
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
MIN_AGAIN_S, MAX_AGAIN_S = 0.1, 10.0
RESTARTING = "restarting"
RETRYABLE_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, Unavailable, msgspec.MsgspecError)
"""Errors of a registration that is tried again."""
PATIENCE_S = 15.0
"""How long a router that has answered before may be silent before a warning is logged. It is longer than a router takes by
default to stop (`drain_s` and its last messages), and than a restart. An operator who stops a cluster stops the router
first."""

_logger = logging.getLogger(__name__)


class RegistrationLog:
    """Logs when one router stops accepting the registration of this instance, and when it accepts it again."""

    def __init__(self, router_url: str, clock: Clock) -> None:
        self._url = router_url
        self._clock = clock
        self._answered_at_s: float | None = None
        self._has_warned = False

    def accepted(self) -> None:
        self._answered_at_s = self._clock.now_s()
        if self._has_warned:
            self._has_warned = False
            _logger.info(log.event("registered", url=self._url))

    def refused(self, cause: str) -> None:
        """Records that the router has answered with a refusal."""
        self._answered_at_s = self._clock.now_s()
        self._warn(cause)

    def unreachable(self, cause: str) -> None:
        """Records that the router has not answered. Warns at once if it never has, since its address may be wrong."""
        if self._answered_at_s is None or self._clock.now_s() - self._answered_at_s > PATIENCE_S:
            self._warn(cause)

    def _warn(self, cause: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(log.event("router does not take us", url=self._url, cause=cause))


class RouterRegistrar:
    """Runs one task for each router, which sends registrations for as long as the process runs."""

    def __init__(
        self,
        config: ApiConfig,
        description: InstanceDescription,
        clock: Clock,
        new_session: Callable[[], aiohttp.ClientSession],
    ) -> None:
        self._config = config
        self._description = description
        self._clock = clock
        self._new_session = new_session
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._register_loop(url)) for url in self._config.routers]

    def register_now(self) -> None:
        """Sends a registration to all routers at once, after a change that they act on."""
        self._changed.set()
        self._changed = asyncio.Event()

    def deregister(self, *, is_replaced: bool = False) -> None:
        """Sends one last registration with the state `leaving`. A router that does not receive it notices the silence.
        An instance that is replaced sends `restarting` instead, since the new one registers at the same URL."""
        if self._tasks and self._leaving is None:
            self._leaving = asyncio.create_task(self._deregister(is_replaced=is_replaced))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        tasks = self._tasks + ([self._leaving] if self._leaving else [])
        if tasks:
            await asyncio.wait(tasks, timeout=2 * POST_TIMEOUT_S)

    async def _deregister(self, *, is_replaced: bool) -> None:
        for task in self._tasks:
            task.cancel()
        timeout_s = REPLACED_TIMEOUT_S if is_replaced else 2 * POST_TIMEOUT_S
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(timeout_s), self._new_session() as session:
                message = await asyncio.wait_for(self._description.registration(is_leaving=True), POST_TIMEOUT_S)
                if is_replaced:
                    message = msgspec.structs.replace(message, state=RESTARTING)
                posts = [self._post(session, url, message) for url in self._config.routers]
                await asyncio.gather(*posts, return_exceptions=True)

    async def _register_loop(self, router_url: str) -> None:
        pause_s, registration_log = FIRST_PAUSE_S, RegistrationLog(router_url, self._clock)
        reply: RegistrationReply | None = None
        async with self._new_session() as session:
            while True:
                changed = self._changed
                try:
                    reply = await self._post(session, router_url, await self._description.registration(reply))
                    wait_s, pause_s = min(max(reply.interval_s, MIN_AGAIN_S), MAX_AGAIN_S), FIRST_PAUSE_S
                    _log_reply(registration_log, reply)
                    self._description.others.record(reply.router, reply.num_other_instances)
                except RETRYABLE_ERRORS as fault:
                    wait_s, pause_s = pause_s, min(2 * pause_s, MAX_PAUSE_S)
                    _log_fault(registration_log, fault)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), wait_s)

    async def _post(self, session: aiohttp.ClientSession, router_url: str, message: Registration) -> RegistrationReply:
        body = msgspec.msgpack.encode(message)
        headers = {"content-type": MSGPACK}
        if key := self._config.cluster_key:
            headers[SIGNATURE_HEADER] = sign_request(key, "POST", REGISTER_PATH, body, self._clock.wall_s())
        timeout = aiohttp.ClientTimeout(total=POST_TIMEOUT_S)
        url = router_url.rstrip("/") + REGISTER_PATH
        async with session.post(url, data=body, headers=headers, timeout=timeout) as response:
            response.raise_for_status()
            return msgspec.msgpack.decode(await response.read(), type=RegistrationReply)


def _log_reply(registration_log: RegistrationLog, reply: RegistrationReply) -> None:
    if reply.error:
        registration_log.refused(reply.error)
    else:
        registration_log.accepted()


def _log_fault(registration_log: RegistrationLog, fault: Exception) -> None:
    cause = str(fault) or type(fault).__name__
    if isinstance(fault, aiohttp.ClientResponseError) and fault.status < 500:
        registration_log.refused(cause)
    else:
        registration_log.unreachable(cause)
