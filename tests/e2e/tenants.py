"""One instance with two api processes and two routers in front of it, all closed by the same keys; and its tenants.

A test can choose the api process that is reached, and hold the worker still while it looks at streams that run.
"""

import contextlib
import json
import os
import re
import signal
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from onward.web.auth.api_key_table import hash_key
from tests.e2e.answers import Hearing, Question
from tests.e2e.cluster import SMALL, Instance, Router
from tests.e2e.pd_instances import wait_for

KEYS = {
    "ann": "max_in_flight = 2",
    "bob": "",
    "cyd": "tokens_per_minute = 30",
    "boss": 'role = "admin"',
}
PATIENT = ("--stall-timeout-s", "30")
Hear = Callable[[int | None], Awaitable[None]]


def header(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer secret of {name}"}


def client_of(url: str, name: str) -> httpx.AsyncClient:
    """With a connection of its own."""
    return httpx.AsyncClient(base_url=url, headers=header(name), timeout=60)


class Estate:
    def __init__(self, folder: Path) -> None:
        self._owned = contextlib.ExitStack()
        self.keys, cluster_key = folder / "keys.toml", folder / "cluster.key"
        self.write_keys(*KEYS)
        cluster_key.write_text("ab" * 32 + "\n")
        cluster_key.chmod(0o600)
        closed = ("--api-keys", str(self.keys), "--cluster-key-file", str(cluster_key), "--open-metrics")
        try:
            self.routers = [self._owned.enter_context(contextlib.closing(Router(*closed))) for _ in range(2)]
            flags = ("--api-processes", "2", "--router", ",".join(one.url for one in self.routers))
            instance = Instance("one", "mixed", *SMALL, *PATIENT, *closed, *flags)
            self.instance = self._owned.enter_context(contextlib.closing(instance))
            for router in self.routers:
                wait_for(lambda url=router.url: status_of(url, "boss") == 200, "a router that can serve")
            self._worker = self.pids("worker")
        except BaseException:
            self._owned.close()
            raise

    def write_keys(self, *names: str) -> None:
        self.keys.write_text(
            "\n".join(
                f'[[key]]\nname = "{one}"\nhash = "{hash_key(f"secret of {one}")}"\n{KEYS[one]}\n' for one in names
            )
        )
        self.keys.chmod(0o600)

    def hang_up(self, expected: str) -> None:
        """SIGHUP to all three; each says in its log what came of it."""
        for server in (self.instance.server, *(router.server for router in self.routers)):
            before = len(re.findall(expected, server.log()))
            server._process.send_signal(signal.SIGHUP)
            wait_for(lambda s=server, n=before: len(re.findall(expected, s.log())) > n, f"a log that says {expected}")

    @property
    def urls(self) -> list[str]:
        return [self.instance.url, *(router.url for router in self.routers)]

    def pids(self, role: str) -> list[int]:
        request = urllib.request.Request(self.instance.url + "/info", headers=header("boss"))
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)["pids"][role]

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """No token is made meanwhile, so what runs goes on running."""
        with stopped(*self._worker):
            yield

    def wait_for_record(self) -> None:
        """Waits for the record of the only stream, whether it was cut off or has ended meanwhile. Stored responses
        of earlier tests are not counted: an abort leaves those that have ended."""

        def count() -> float:
            metrics = self.instance.server.metrics()
            kinds = [f'onward_stream_store_records{{kind="{kind}"}}' for kind in ("detached", "ended")]
            return sum(metrics.get(kind, 0.0) for kind in kinds)

        wait_for(lambda: count() == 1, "a record")

    def clear(self) -> None:
        """Nothing runs and nothing is kept."""
        for url in self.urls:
            answer = httpx.post(url + "/v1/abort", headers=header("boss"), json={"all": True}, timeout=30)
            assert answer.status_code == 200, answer.text

    def close(self) -> None:
        self._owned.close()


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def status_of(url: str, name: str, path: str = "/v1/models") -> int:
    return httpx.get(url + path, headers=header(name), timeout=30).status_code


@contextlib.asynccontextmanager
async def listening(
    url: str, name: str, question: Question, hearing: Hearing, label: str = "", method: str = "POST"
) -> AsyncIterator[Hear]:
    """A stream, read as far as the test says; None: to its end. Leaving it closes the connection."""
    headers = {"X-Request-Id": label} if label else {}
    headers |= {"Last-Event-ID": hearing.place} if hearing.place else {}
    content: dict[str, Any] = {"json": question.body} if method == "POST" else {}
    async with (
        client_of(url, name) as client,
        client.stream(method, question.path, headers=headers, **content) as response,
    ):
        assert response.status_code == 200, await response.aread()
        lines = response.aiter_lines()

        async def hear(num_tokens: int | None) -> None:
            event: list[str] = []
            while num_tokens is None or sum(len(one.token_ids) for one in hearing.choices.values()) < num_tokens:
                line = await anext(lines, None)
                if line is None:
                    return
                event.append(line)
                if not line:
                    hearing.hear(event[:-1])
                    event = []

        yield hear


async def refusals(url: str, name: str, question: Question, place: str) -> list[tuple[int, Any]]:
    """Returns the refusals of a client that resumes a stream, by GET and by POST, without the id."""
    headers, request_id = {"Last-Event-ID": place}, place.split(";")[1]
    async with client_of(url, name) as client:
        answers = [
            await client.get(question.path, headers=headers),
            await client.post(question.path, headers=headers, json=question.body),
        ]
    return [(one.status_code, json.loads(one.text.replace(request_id, "ID"))) for one in answers]


async def abort(url: str, name: str, *names: str) -> dict[str, list[str]]:
    async with client_of(url, name) as client:
        answer = await client.post("/v1/abort", json={"ids": list(names)})
    assert answer.status_code == 200, answer.text
    return answer.json()
