"""The manifests are valid, and pods are started, probed, drained and guarded as the how-to page says."""

from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.deploy.custom_resources import SCHEMAS
from tests.deploy.manifests import KUBERNETES, documents, stateful_sets
from tests.test_pages import ROOT

VERSIONS = ("1.30", "1.34")
"""The oldest release that has everything in the manifests, and a newer one."""
POD = dict(stateful_sets())
INSTANCES = [name for name in POD if name != "onward-router"]


def validate(document: dict[str, Any], version: str) -> None:
    """Raises for a field that the API does not have."""
    if document["kind"] in SCHEMAS:
        jsonschema.validate(document, SCHEMAS[document["kind"]])
    else:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", KUBERNETES, ids=lambda file: file.name)
def test_every_manifest_is_valid_in_strict_mode(file: Path, version: str) -> None:
    found = documents(file)
    assert found
    for document in found:
        validate(document, version)


@pytest.mark.parametrize("kind", ["StatefulSet", "HorizontalPodAutoscaler", "ScaledObject", "InferencePool"])
def test_a_misspelled_field_is_found(kind: str) -> None:
    [document, *_] = [one for file in KUBERNETES for one in documents(file) if one["kind"] == kind]
    document["spec"]["replica"] = 3
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(document, VERSIONS[0])


def test_pods_are_as_restricted_as_kubernetes_can_ask_for() -> None:
    """The profile `restricted` of the pod security standards, and a read-only root file system."""
    for pod in POD.values():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True and security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            mounts = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
            assert "/tmp" in mounts


@pytest.mark.parametrize("name", INSTANCES)
def test_an_instance_is_drained_before_it_is_stopped_and_has_the_time_for_it(name: str) -> None:
    pod = POD[name]
    [container] = pod["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:3] == ["onward", "drain", "http://127.0.0.1:8000"]
    [timeout_s] = [float(word.partition("=")[2]) for word in command if word.startswith("--timeout=")]
    [drain_s] = [float(word.partition("=")[2]) for word in container["args"] if word.startswith("--drain-s=")]
    assert pod["terminationGracePeriodSeconds"] >= timeout_s + drain_s + 5
    key = [word for word in command if word.startswith("--cluster-key-file=")]
    assert key and key[0] in container["args"], "the command proves itself by the key that the instance has"


def test_a_pod_of_several_ranks_has_a_core_for_each_of_their_threads() -> None:
    [container] = POD["onward-tensor-parallel"]["containers"]
    flags = dict(word.removeprefix("--").split("=", 1) for word in container["args"] if "=" in word)
    num_threads = int(flags["tensor-parallel"]) * int(flags["threads"])
    assert int(flags["tensor-parallel"]) > 1
    assert int(container["resources"]["requests"]["cpu"]) >= num_threads
    assert "cpu" not in container["resources"]["limits"], "a quota would stop ranks in the middle of a step"


def test_a_router_outlives_its_streams() -> None:
    pod = POD["onward-router"]
    [container] = pod["containers"]
    sleep_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    [drain_s] = [float(word.partition("=")[2]) for word in container["args"] if word.startswith("--drain-s=")]
    assert pod["terminationGracePeriodSeconds"] >= sleep_s + drain_s + 5


def test_probes_need_no_key_and_readiness_follows_drain() -> None:
    """`/health` is 503 while an instance is drained, and `/live` is not."""
    for pod in POD.values():
        for container in pod["containers"]:
            ports = {port["name"] for port in container["ports"]}
            probes = {name: container[name]["httpGet"] for name in container if name.endswith("Probe")}
            assert probes["readinessProbe"] == {"path": "/health", "port": "http"}
            assert probes["livenessProbe"] == {"path": "/live", "port": "http"}
            assert {probe["port"] for probe in probes.values()} <= ports


def test_every_port_of_the_cluster_key_is_open_to_named_pods_only() -> None:
    policies = {one["metadata"]["name"]: one for one in documents(ROOT / "deploy/kubernetes/network-policy.yaml")}
    for name, pod in POD.items():
        policy = policies[name]["spec"]
        labels = {"app.kubernetes.io/name": "onward", "app.kubernetes.io/component": name.removeprefix("onward-")}
        assert policy["podSelector"]["matchLabels"] == labels
        rules = {port["port"]: rule.get("from") for rule in policy["ingress"] for port in rule["ports"]}
        assert set(rules) == {port["name"] for container in pod["containers"] for port in container["ports"]}
        is_open = [port for port, peers in rules.items() if peers is None]
        assert is_open == (["http"] if name == "onward-router" else []), "clients come to routers"


def test_services_budgets_and_autoscalers_name_what_exists() -> None:
    selectors: list[dict[str, str]] = []
    for document in (one for file in KUBERNETES for one in documents(file)):
        spec = document["spec"]
        match document["kind"]:
            case "Service":
                selectors.append(spec["selector"])
            case "PodDisruptionBudget" | "NetworkPolicy" | "InferencePool":
                selectors.append(spec.get("selector", spec.get("podSelector"))["matchLabels"])
            case "HorizontalPodAutoscaler" | "ScaledObject":
                assert spec["scaleTargetRef"]["name"] in POD
    labels = [
        {"app.kubernetes.io/name": "onward", "app.kubernetes.io/component": name[len("onward-") :]} for name in POD
    ]
    assert len(selectors) > 10 and not [selector for selector in selectors if selector not in labels]


def test_autoscalers_read_metrics_that_are_exported() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    [scaled] = documents(ROOT / "deploy/kubernetes/autoscaling-keda.yaml")
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    names = {
        word for query in queries for word in query.replace("(", " ").replace("{", " ").split() if "onward_" in word
    }
    assert names == {"onward_requests", "onward_kv_cache_usage_ratio"}
    assert not [name for name in names if f"`{name}`" not in page]


def test_instances_export_what_an_endpoint_picker_of_a_gateway_reads() -> None:
    """The names that the picker looks for by default."""
    exported = (ROOT / "docs/metrics.md").read_text()
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        assert f"`{name}`" in exported
    for name in INSTANCES:
        assert {"--metrics-names=vllm", "--open-metrics"} <= set(POD[name]["containers"][0]["args"])
