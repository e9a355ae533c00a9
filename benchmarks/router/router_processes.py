"""What `make bench-router` starts: a stand-in for instances, routers, and nginx as a plain reverse proxy."""

import http.client
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from benchmarks import ROOT
from benchmarks.harness.processes import SERVE, BenchProcess, free_port

START_TIMEOUT_S = 60.0
DOWNLOAD_TIMEOUT_S = 120.0
POLL_S = 0.05

# Events pass as they come, over connections that are kept; nothing else is switched on.
NGINX_CONF = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream instance {{ server 127.0.0.1:{upstream_port}; keepalive 64; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://instance;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
}}
"""


class ListeningProcess(BenchProcess):
    """A process on a port of its own that is ready when it answers there."""

    def __init__(self, command: list[str], port: int, log: Path, folder: Path | None = None) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("w") as file:
            super().__init__(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=folder)
        self.wait_until("/live")

    def wait_until(self, path: str, num_instances: int = 0) -> None:
        """It answers, and where asked for says that so many instances are ready."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._is_so(path, num_instances):
            if self.process.poll() is not None:
                raise SystemExit(f"{self.process.args} ended with {self.process.returncode}; see {self._log}")
            if time.monotonic() > deadline_s:
                self.stop()
                raise SystemExit(f"{self.url}{path} is not there after {START_TIMEOUT_S:.0f} s; see {self._log}")
            time.sleep(POLL_S)

    def _is_so(self, path: str, num_instances: int) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1.0)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        if response.status != 200 or not num_instances:
            return response.status == 200
        return sum(instance["state"] == "ready" for instance in json.loads(body)["instances"]) >= num_instances


class StubInstanceProcess(ListeningProcess):
    def __init__(self, folder: Path, text: Path) -> None:
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.router.stand_in_instance", "--port", str(port)]
        command += ["--text", str(text.resolve())]
        super().__init__(command, port, folder / "stand-in.log", ROOT)


class RouterProcessUnderTest(ListeningProcess):
    def __init__(self, policy: str, folder: Path, instances: str = "") -> None:
        port = free_port()
        command = [sys.executable, "-c", SERVE, "router", "--port", str(port), "--policy", policy]
        if instances:
            command += ["--instances", instances]
        super().__init__(command, port, folder / f"router-{policy}.log")

    def wait_for_instances(self, num_instances: int) -> None:
        self.wait_until("/info", num_instances)

    def tokenizing_s(self) -> float:
        """Processor time that it has spent on making token ids, as it says itself."""
        return sum(value for name, value in self._metrics() if name == "onward_router_tokenize_seconds_sum")

    def num_untokenized(self) -> float:
        return sum(value for name, value in self._metrics() if name.startswith("onward_router_untokenized_total"))

    def _metrics(self) -> list[tuple[str, float]]:
        with urllib.request.urlopen(self.url + "/metrics", timeout=START_TIMEOUT_S) as response:
            lines = response.read().decode().splitlines()
        values = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return [(name, float(value)) for name, _, value in values]


class NginxProcess(ListeningProcess):
    def __init__(self, binary: Path, upstream_port: int, folder: Path) -> None:
        port = free_port()
        home = folder / "nginx"
        home.mkdir(parents=True, exist_ok=True)
        conf = home / "nginx.conf"
        conf.write_text(NGINX_CONF.format(folder=home.resolve(), port=port, upstream_port=upstream_port))
        command = [str(binary), "-e", str(home / "error.log"), "-p", str(home), "-c", str(conf.resolve())]
        super().__init__(command, port, home / "start.log")


def nginx_binary(named: Path | None, folder: Path) -> Path | None:
    """The one that was named, the system's, or Debian's package unpacked into the folder. None: it cannot be had."""
    if named is not None:
        if not (named.exists() and _starts(named)):
            raise SystemExit(f"--nginx {named}: is not there, or does not start")
        return named
    if found := shutil.which("nginx"):
        return Path(found)
    unpacked = folder / "usr" / "sbin" / "nginx"
    if not unpacked.exists() and shutil.which("apt-get"):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _run(["apt-get", "download", "nginx"], folder)
            package = next(folder.glob("nginx_*.deb"))
            _run(["dpkg-deb", "-x", package.name, "."], folder)
        except (OSError, subprocess.SubprocessError, StopIteration):
            return None
    return unpacked if unpacked.exists() and _starts(unpacked) else None


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=DOWNLOAD_TIMEOUT_S)


def _starts(binary: Path) -> bool:
    """It finds its libraries."""
    return subprocess.run([binary, "-v"], capture_output=True).returncode == 0


def nginx_version(binary: Path) -> str:
    return subprocess.run([binary, "-v"], capture_output=True, text=True).stderr.strip()
