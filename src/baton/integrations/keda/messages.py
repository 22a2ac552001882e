"""The messages of KEDA's external scaler protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.integrations import protobuf
from baton.integrations.protobuf import BOOL, DOUBLE, INT64, TEXT, Fields

PACKAGE = "externalscaler"
_MESSAGES: Mapping[str, Fields] = {
    "ScaledObjectRef": {"name": (1, TEXT), "namespace": (2, TEXT), "scalerMetadata": (3, f"@{TEXT}")},
    "IsActiveResponse": {"result": (1, BOOL)},
    "MetricSpec": {"metricName": (1, TEXT), "targetSize": (2, INT64), "targetSizeFloat": (3, DOUBLE)},
    "GetMetricSpecResponse": {"metricSpecs": (1, "*MetricSpec")},
    "GetMetricsRequest": {"scaledObjectRef": (1, "ScaledObjectRef"), "metricName": (2, TEXT)},
    "MetricValue": {"metricName": (1, TEXT), "metricValue": (2, INT64), "metricValueFloat": (3, DOUBLE)},
    "GetMetricsResponse": {"metricValues": (1, "*MetricValue")},
}
"""Source: externalscaler.proto of KEDA."""


def message_classes() -> dict[str, Any]:
    """Return the class of each message by its name. Raises ImportError without the package protobuf."""
    return protobuf.message_classes(PACKAGE, _MESSAGES)
