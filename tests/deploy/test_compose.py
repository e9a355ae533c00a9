"""compose.yaml is valid, its files exist, and its containers are as restricted as those of the manifests."""

import yaml
from compose_spec import PyCompose

from tests.deploy.manifests import COMPOSE, DEPLOY, ROOT

FILE = yaml.safe_load(COMPOSE.read_text())
OURS = {name: service for name, service in FILE["services"].items() if service["image"].startswith("onward:")}


def test_the_file_is_valid() -> None:
    """By the compose specification, after YAML's own merge keys."""
    parsed = PyCompose.from_yaml(yaml.safe_dump(FILE))
    assert set(parsed.service_names()) == {"router", "instance", "prometheus", "grafana"}


def test_every_file_that_is_mounted_exists() -> None:
    mounts = [volume.split(":")[0] for service in FILE["services"].values() for volume in service.get("volumes", [])]
    files = [mount for mount in mounts if mount.startswith(".")]
    assert len(files) >= 5
    assert not [file for file in files if not (COMPOSE.parent / file).resolve().is_file()]
    assert {mount for mount in mounts if not mount.startswith(".")} <= set(FILE["volumes"])
    dockerfile = FILE["x-onward"]["build"]
    assert (COMPOSE.parent / dockerfile["context"]).resolve() == ROOT
    assert (ROOT / dockerfile["dockerfile"]).is_file()


def test_containers_are_restricted_and_have_the_time_to_drain() -> None:
    assert set(OURS) == {"router", "instance"}
    for service in OURS.values():
        assert service["user"] == "10001:10001" and service["read_only"] is True and service["cap_drop"] == ["ALL"]
        [drain_s] = [float(word.partition("=")[2]) for word in service["command"] if word.startswith("--drain-s=")]
        assert float(service["stop_grace_period"].removesuffix("s")) > drain_s + 5


def test_prometheus_scrapes_the_services_as_on_a_machine() -> None:
    """The same jobs as deploy/prometheus has, since dashboard and alerts know them by name."""
    here = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())
    there = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert [job["job_name"] for job in here["scrape_configs"]] == [job["job_name"] for job in there["scrape_configs"]]
    assert here["rule_files"] == there["rule_files"]
    for job in here["scrape_configs"]:
        [dns] = job["dns_sd_configs"]
        [service] = dns["names"]
        assert f"--port={dns['port']}" in FILE["services"][service]["command"]
