"""A router and the instances behind it, as real processes that can be killed, stopped, drained and started again.

Knows what a router shows of its instances; not what clients ask.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, NamedTuple, Self

from tests.e2e.pd_instances import kill_all, wait_for, wait_until_at_rest
from tests.e2e.server import Server

Target = Literal["worker", "engine", "api", "instance"]
Action = Literal["kill", "stop", "drain", "leave"]
SMALL = ("--threads", "1", "--max-num-seqs", "24", "--num-kv-blocks", "384", "--log-interval-s", "0")
CALM = ("--lease-s", "2")


class Fault(NamedTuple):
    action: Action
    target: Target

    def __str__(self) -> str:
        return f"{self.action} {self.target}"


class Port:
    """A port that is bound and not listening: other programs do not get it, and servers, which reuse addresses, do."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.flags = ("--port", str(self._socket.getsockname()[1]))
        self.url = f"http://127.0.0.1:{self.flags[1]}"

    def close(self) -> None:
        self._socket.close()


class RouterServer(Server):
    """`onward router`."""

    def _start(self, flags: tuple[str, ...], log: BinaryIO) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "onward.cli.main", "router", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | {"TMPDIR": self._tmp.name, "COLUMNS": "200"},
            text=True,
        )


class Router:
    """One address, whatever happens to the process behind it."""

    def __init__(self, *flags: str) -> None:
        self._port = Port()
        self._flags = (*self._port.flags, *flags)
        self.url = self._port.url
        self.past_logs: list[str] = []
        self.server = RouterServer(*self._flags)

    def kill(self) -> None:
        self.server.stop(signal.SIGKILL)

    def start_again(self) -> None:
        self.past_logs.append(self.server.log())
        self.server.__exit__(None, None, None)
        self.server = RouterServer(*self._flags)

    def log(self) -> str:
        return "\n--- another life\n".join([*self.past_logs, self.server.log()])

    def close(self) -> None:
        self.server.__exit__(None, None, None)
        self._port.close()

    def status(self) -> dict[str, Any]:
        return self.server.get("/internal/status")

    def seen(self, url: str) -> dict[str, Any]:
        """What it knows of the newest instance at an address. LookupError: nothing."""
        return [one for one in self.status()["instances"] if one["url"] == url][-1]

    def resumes(self, cause: str) -> float:
        """How often it has carried a stream on, exactly."""
        key = f'onward_router_resumes_total{{cause="{cause}",outcome="exact"}}'
        return self.server.metrics().get(key, 0.0)

    def streams_at(self, url: str) -> int:
        return self.seen(url)["streams"]


class Instance:
    """One address and one set of flags, through all its lives."""

    def __init__(self, name: str, role: str, *flags: str) -> None:
        self._port = Port()
        self._flags = (*self._port.flags, "--role", role, *flags)
        self.name, self.role, self.url = name, role, self._port.url
        self.past_logs: list[str] = []
        self._stopped: list[int] = []
        self.server = Server(*self._flags)

    def pids(self, target: Target) -> list[int]:
        """As it tells while it is well."""
        pids = self.server.get("/info")["pids"]
        return [pid for some in pids.values() for pid in some] if target == "instance" else list(pids[target])

    def kill(self, target: Target) -> list[int]:
        pids = self.pids(target)
        kill_all(pids)
        if target == "instance":
            self.server.stop(signal.SIGKILL)
        return pids

    def stop(self, target: Target) -> None:
        self._stopped = self.pids(target)
        for pid in self._stopped:
            os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        pids, self._stopped = self._stopped, []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def drain(self) -> None:
        status, answer = self.server.post("/drain", {})
        assert status == 200, answer

    def leave(self) -> None:
        """Asked politely."""
        status = self.server.stop()
        assert status == 0, f"{self.name} left with status {status}:\n{self.server.log()}"

    def start_again(self) -> None:
        self.past_logs.append(self.server.log())
        self.server.__exit__(None, None, None)
        self.server = Server(*self._flags)

    def log(self) -> str:
        return "\n--- another life\n".join([*self.past_logs, self.server.log()])

    def close(self) -> None:
        self.go_on()
        self.server.__exit__(None, None, None)
        self._port.close()


class Cluster:
    def __init__(
        self,
        *,
        router: Sequence[str] = (),
        every: Sequence[str] = (*SMALL, *CALM),
        prefill: Sequence[Sequence[str]] = ((),),
        decode: Sequence[Sequence[str]] = ((), ()),
        mixed: Sequence[Sequence[str]] = (),
    ) -> None:
        """One sequence of flags for each instance."""
        self._owned = ExitStack()
        try:
            self.router = Router(*router)
            self._owned.callback(self.router.close)
            wanted = {"prefill": prefill, "decode": decode, "mixed": mixed}
            self.instances = self._start(
                [
                    (f"{role}-{number}", role, *every, "--router", self.router.url, *flags)
                    for role, some in wanted.items()
                    for number, flags in enumerate(some)
                ]
            )
            self.wait_until_ready()
        except BaseException:
            self._owned.close()
            raise

    def _start(self, wanted: list[tuple[str, ...]]) -> list[Instance]:
        """All at the same time."""
        with ThreadPoolExecutor(len(wanted) or 1) as starting:
            started = [starting.submit(Instance, *flags) for flags in wanted]
        for one in started:
            if one.exception() is None:
                self._owned.callback(one.result().close)
        return [one.result() for one in started]

    @property
    def url(self) -> str:
        return self.router.url

    def of_role(self, role: str) -> list[Instance]:
        return [instance for instance in self.instances if instance.role == role]

    def with_stream(self, count: int = 1) -> Instance:
        """One that has so many streams of clients."""

        def find() -> Instance | None:
            for instance in self.instances:
                if instance.role != "prefill" and self.router.streams_at(instance.url) >= count:
                    return instance
            return None

        found = wait_for(find, f"an instance with {count} streams")
        assert found is not None
        return found

    def wait_until_ready(self, *instances: Instance, without: Sequence[int] = ()) -> None:
        """As the router sees it. `without`: processes that must have been replaced."""
        for instance in instances or self.instances:

            def is_ready(instance: Instance = instance) -> bool:
                seen = self.router.seen(instance.url)
                pids = {pid for some in seen["pids"].values() for pid in some}
                return seen["state"] == "ready" and bool(pids) and not pids & set(without)

            try:
                wait_for(is_ready, f"{instance.name} ready at the router")
            except AssertionError as fault:
                shown = [one for one in self.router.status()["instances"] if one["url"] == instance.url]
                raise AssertionError(f"{fault}; shown as {shown}\n{instance.log()[-4000:]}") from None

    def suffer(self, fault: Fault, instance: Instance, stop_s: float) -> None:
        """From the fault until the instance is ready again."""
        pids: list[int] = []
        match fault.action:
            case "kill":
                pids = instance.kill(fault.target)
            case "stop":
                instance.stop(fault.target)
                try:
                    time.sleep(stop_s)
                finally:
                    instance.go_on()
            case "drain":
                instance.drain()
                wait_for(lambda: self.router.streams_at(instance.url) == 0, f"{instance.name} without streams")
                instance.leave()
            case "leave":
                instance.leave()
        if fault.target == "instance" and fault.action != "stop":
            instance.start_again()
        self.wait_until_ready(instance, without=pids)

    def heal(self) -> None:
        """After a test that failed half way: the next one finds all of them alive."""
        if not self.router.server.is_running:
            self.router.start_again()
        for instance in self.instances:
            instance.go_on()
            if not instance.server.is_running:
                instance.start_again()
        self.wait_until_ready()

    def wait_until_at_rest(self) -> None:
        """Waits until no process holds anything for a client or another process."""
        wait_for(lambda: sum(count_streams(self.router).values()) == 0, "a router without streams")
        for instance in self.instances:
            wait_until_at_rest(instance.server)

    def logs(self) -> dict[str, str]:
        """Returns the log of each process, over all its restarts."""
        return {"router": self.router.log()} | {instance.name: instance.log() for instance in self.instances}

    def write_logs(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, log in self.logs().items():
            (folder / f"{name}.log").write_text(log)

    def close(self) -> None:
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def count_streams(router: Router) -> dict[str, float]:
    return {key: value for key, value in router.server.metrics().items() if key.startswith("onward_router_streams{")}
