"""A real Prometheus: the one on PATH, or Debian's package unpacked into the cache folder, for which no root is needed."""

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import yaml

from onward.config import cache_dir

START_TIMEOUT_S = 60.0


def find_binary(name: str) -> Path:
    """`prometheus` or `promtool`."""
    if on_path := shutil.which(name):
        return Path(on_path)
    folder = cache_dir() / "test-tools" / "prometheus"
    if not (folder / "usr" / "bin" / name).exists():
        _unpack_package(folder)
    return folder / "usr" / "bin" / name


def _unpack_package(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as download:
        subprocess.run(["apt-get", "download", "prometheus"], cwd=download, check=True, capture_output=True)
        [package] = Path(download).glob("prometheus_*.deb")
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)


class PrometheusServer:
    """Scrapes every second. `config`: as in the repository; `targets`: the addresses of each job."""

    def __init__(self, config: Path, targets: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="onward-test-")
        folder = Path(self._folder.name)
        settings = yaml.safe_load(config.read_text())
        settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        settings["rule_files"] = [str(config.parent / name) for name in settings["rule_files"]]
        for job in settings["scrape_configs"]:
            job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.url = f"http://{address}"
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                find_binary("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=self._log,
            stderr=self._log,
        )
        self._num_targets = len(targets)

    def wait_scraping(self) -> None:
        """Until every target was read once."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                if [value for _, value in self.query("sum(up)")] == [self._num_targets]:
                    return
            except httpx.HTTPError:
                pass
            assert self._process.poll() is None, (Path(self._folder.name) / "log").read_text()
            assert time.monotonic() < deadline_s, "the targets are not scraped"
            time.sleep(0.1)

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        return [(one["metric"], float(one["value"][1])) for one in self.api("query", query=expression)["result"]]

    def api(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30)
        body = answer.raise_for_status().json() if answer.status_code != 400 else answer.json()
        assert body["status"] == "success", body
        return body["data"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()
        self._folder.cleanup()
