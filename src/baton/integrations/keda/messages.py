"""The messages of KEDA's external scaler protocol.

They are described here instead of by generated code, which depends on the version of its generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

PACKAGE = "externalscaler"
_TEXT, _BOOL, _INT64, _DOUBLE = "TYPE_STRING", "TYPE_BOOL", "TYPE_INT64", "TYPE_DOUBLE"
_ENTRY = "ScaledObjectRef.ScalerMetadataEntry"
_FIELDS: Mapping[str, Mapping[str, str]] = {
    "ScaledObjectRef": {"name": _TEXT, "namespace": _TEXT, "scalerMetadata": f"*{_ENTRY}"},
    "IsActiveResponse": {"result": _BOOL},
    "MetricSpec": {"metricName": _TEXT, "targetSize": _INT64, "targetSizeFloat": _DOUBLE},
    "GetMetricSpecResponse": {"metricSpecs": "*MetricSpec"},
    "GetMetricsRequest": {"scaledObjectRef": "ScaledObjectRef", "metricName": _TEXT},
    "MetricValue": {"metricName": _TEXT, "metricValue": _INT64, "metricValueFloat": _DOUBLE},
    "GetMetricsResponse": {"metricValues": "*MetricValue"},
}
"""Fields of each message, numbered from 1: a scalar type, a message, or `*` and a message that is repeated.

Source: externalscaler.proto of KEDA."""


def message_classes() -> dict[str, Any]:
    """Return the class of each message by its name. Raises ImportError without the package protobuf."""
    descriptors = import_module("google.protobuf.descriptor_pb2")
    pools, factory = import_module("google.protobuf.descriptor_pool"), import_module("google.protobuf.message_factory")
    file = descriptors.FileDescriptorProto(name="externalscaler.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields.items(), start=1):
            added = message.field.add(name=field, number=number, label="LABEL_OPTIONAL")
            if kind.startswith("*"):
                added.label = descriptors.FieldDescriptorProto.LABEL_REPEATED
            if kind.startswith("TYPE_"):
                added.type = descriptors.FieldDescriptorProto.Type.Value(kind)
            else:
                added.type = descriptors.FieldDescriptorProto.TYPE_MESSAGE
                added.type_name = f".{PACKAGE}.{kind.removeprefix('*')}"
        if name == "ScaledObjectRef":
            entry = message.nested_type.add(name="ScalerMetadataEntry", options={"map_entry": True})
            for number, field in enumerate(("key", "value"), start=1):
                entry.field.add(name=field, number=number, label="LABEL_OPTIONAL", type="TYPE_STRING")
    pool = pools.DescriptorPool()
    pool.Add(file)
    return {name: factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _FIELDS}
