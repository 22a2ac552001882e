"""JSON schemas of custom resources, from the definitions that their projects publish, without descriptions."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema_rs

from tests.deploy.cluster_tools import ROOT

_FILES = {
    ("disaggregatedset.x-k8s.io/v1", "DisaggregatedSet"): "disaggregatedset.json",
    ("inference.networking.k8s.io/v1", "InferencePool"): "inferencepool.json",
    ("keda.sh/v1alpha1", "ScaledObject"): "scaledobject.json",
    ("serving.kserve.io/v1alpha2", "LLMInferenceService"): "llminferenceservice.json",
}
"""Schemas by the version and kind of an object. Unknown fields are problems. Pod templates may be any object."""


@cache
def _validator(file: str) -> Any:
    return jsonschema_rs.validator_for(json.loads((ROOT / "tests" / "data" / "crds" / file).read_text()))


def is_known(thing: dict[str, Any]) -> bool:
    """Return whether there is a schema of the object."""
    return (thing["apiVersion"], thing["kind"]) in _FILES


def problems(thing: dict[str, Any]) -> list[str]:
    """Return where a custom resource differs from its schema."""
    validator = _validator(_FILES[thing["apiVersion"], thing["kind"]])
    return [f"{'/'.join(map(str, error.instance_path))}: {error.message}" for error in validator.iter_errors(thing)]
