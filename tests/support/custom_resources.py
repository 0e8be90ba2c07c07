"""What custom resources of the manifests may hold: field names and types of their definitions.

Narrower than the definitions of KEDA and the Prometheus Operator: only fields that are used here,
and of triggers only those parameters that KEDA documents for their type.
"""

from __future__ import annotations

from typing import Any

import jsonschema

_TEXT = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 0}
_NUMBER_TEXT = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}
_FLAG_TEXT = {"enum": ["true", "false"]}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


def _resource(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    labels = {"type": "object", "additionalProperties": _TEXT}
    return _object(
        {
            "apiVersion": {"const": api_version},
            "kind": {"const": kind},
            "metadata": _object({"name": _TEXT}, {"labels": labels}),
            "spec": spec,
        }
    )


def _trigger(kind: str, required: dict[str, Any], optional: dict[str, Any]) -> dict[str, Any]:
    return _object(
        {
            "type": {"const": kind},
            "metadata": _object(required, optional),
            "metricType": {"enum": ["AverageValue", "Value"]},
        },
        {"name": _TEXT, "authenticationRef": _object({"name": _TEXT})},
    )


_STREAMS = _trigger(
    "redis-streams",
    {"address": {"type": "string", "pattern": r"^[\w.-]+:[0-9]+$"}, "stream": _TEXT},
    {
        "consumerGroup": _TEXT,
        "streamLength": _NUMBER_TEXT,
        "lagCount": _NUMBER_TEXT,
        "activationLagCount": _NUMBER_TEXT,
        "pendingEntriesCount": _NUMBER_TEXT,
        "databaseIndex": _NUMBER_TEXT,
        "enableTLS": _FLAG_TEXT,
    },
)
_PROMETHEUS = _trigger(
    "prometheus",
    {
        "serverAddress": {"type": "string", "pattern": r"^https?://"},
        "query": _TEXT,
        "threshold": _NUMBER_TEXT,
    },
    {"activationThreshold": _NUMBER_TEXT, "ignoreNullValues": _FLAG_TEXT},
)
_SCALING_RULES = _object(
    {
        "policies": _list(
            _object(
                {"type": {"enum": ["Pods", "Percent"]}, "value": _COUNT, "periodSeconds": _COUNT}
            )
        )
    },
    {"stabilizationWindowSeconds": _COUNT},
)
_BEHAVIORS = ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]

SCHEMAS = {
    "ScaledObject": _resource(
        "keda.sh/v1alpha1",
        "ScaledObject",
        _object(
            {
                "scaleTargetRef": _object({"name": _TEXT}),
                "triggers": _list({"oneOf": [_STREAMS, _PROMETHEUS]}),
            },
            {
                "pollingInterval": _COUNT,
                "minReplicaCount": _COUNT,
                "maxReplicaCount": _COUNT,
                "cooldownPeriod": _COUNT,
                "fallback": _object(
                    {"failureThreshold": _COUNT, "replicas": _COUNT},
                    {"behavior": {"enum": _BEHAVIORS}},
                ),
                "advanced": _object(
                    {
                        "horizontalPodAutoscalerConfig": _object(
                            {"behavior": _object({"scaleDown": _SCALING_RULES})}
                        )
                    }
                ),
            },
        ),
    ),
    "TriggerAuthentication": _resource(
        "keda.sh/v1alpha1",
        "TriggerAuthentication",
        _object(
            {"secretTargetRef": _list(_object({"parameter": _TEXT, "name": _TEXT, "key": _TEXT}))}
        ),
    ),
    "PodMonitor": _resource(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        _object(
            {
                "selector": _object(
                    {"matchLabels": {"type": "object", "additionalProperties": _TEXT}}
                ),
                "podMetricsEndpoints": _list(
                    _object(
                        {
                            "port": _TEXT,
                            "path": _TEXT,
                            "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
                            "relabelings": _list(
                                _object(
                                    {"targetLabel": _TEXT},
                                    {"replacement": _TEXT, "sourceLabels": _list(_TEXT)},
                                )
                            ),
                        }
                    )
                ),
            }
        ),
    ),
}


def errors(resource: dict[str, Any]) -> list[str]:
    """What is wrong with a custom resource; empty if nothing is. Raises KeyError for others."""
    validator = jsonschema.Draft202012Validator(SCHEMAS[resource["kind"]])
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(resource)]
