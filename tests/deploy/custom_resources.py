"""Schemas of the custom resources in deploy/kubernetes, as strict as the field tables of their documentation.

kubernetes-validate has those of Kubernetes itself only. Written by hand for the fields that we use, after:

* `ScaledObject`: https://keda.sh/docs/2.17/reference/scaledobject-spec/ (keda.sh/v1alpha1, the definition is
  config/crd/bases/keda.sh_scaledobjects.yaml of github.com/kedacore/keda)
* `InferencePool`: https://gateway-api-inference-extension.sigs.k8s.io/reference/spec/ (inference.networking.k8s.io/v1, the
  definition is config/crd/bases/inference.networking.k8s.io_inferencepools.yaml of
  github.com/kubernetes-sigs/gateway-api-inference-extension, release 1.0)
"""

from typing import Any


def _strict(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def _resource(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = _strict(("name",), name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS)
    names = {"apiVersion": {"const": api_version}, "kind": {"const": kind}}
    return _strict(("apiVersion", "kind", "metadata", "spec"), **names, metadata=metadata, spec=spec)


_SCALING_RULES = _strict(
    (),
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy={"enum": ["Max", "Min", "Disabled"]},
    policies={
        "type": "array",
        "items": _strict(
            ("type", "value", "periodSeconds"),
            type={"enum": ["Pods", "Percent"]},
            value={"type": "integer", "minimum": 1},
            periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
        ),
    },
)

SCHEMAS = {
    "ScaledObject": _resource(
        "keda.sh/v1alpha1",
        "ScaledObject",
        _strict(
            ("scaleTargetRef", "triggers"),
            scaleTargetRef=_strict(("name",), name=TEXT, apiVersion=TEXT, kind=TEXT, envSourceContainerName=TEXT),
            pollingInterval=COUNT,
            cooldownPeriod=COUNT,
            initialCooldownPeriod=COUNT,
            idleReplicaCount=COUNT,
            minReplicaCount=COUNT,
            maxReplicaCount=COUNT,
            advanced=_strict(
                (),
                restoreToOriginalReplicaCount={"type": "boolean"},
                horizontalPodAutoscalerConfig=_strict(
                    (), name=TEXT, behavior=_strict((), scaleUp=_SCALING_RULES, scaleDown=_SCALING_RULES)
                ),
            ),
            triggers={
                "type": "array",
                "minItems": 1,
                "items": _strict(
                    ("type", "metadata"),
                    type=TEXT,
                    name=TEXT,
                    metricType={"enum": ["AverageValue", "Value", "Utilization"]},
                    useCachedMetrics={"type": "boolean"},
                    metadata=TEXTS,
                    authenticationRef=_strict(("name",), name=TEXT, kind=TEXT),
                ),
            },
        ),
    ),
    "InferencePool": _resource(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        _strict(
            ("selector", "targetPorts", "endpointPickerRef"),
            selector=_strict(("matchLabels",), matchLabels=TEXTS),
            targetPorts={"type": "array", "minItems": 1, "maxItems": 8, "items": _strict(("number",), number=PORT)},
            endpointPickerRef=_strict(
                ("name",),
                group={"type": "string"},
                kind=TEXT,
                name=TEXT,
                port=_strict(("number",), number=PORT),
                failureMode={"enum": ["FailOpen", "FailClose"]},
            ),
        ),
    ),
}
