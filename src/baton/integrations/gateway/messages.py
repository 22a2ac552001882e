"""The messages of Envoy's external processing protocol, as far as an endpoint picker needs them, and of gRPC's health.

Fields that are left out are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from baton.integrations import protobuf
from baton.integrations.protobuf import BOOL, BYTES, INT32, STRUCT, TEXT, Fields

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"
FULL_DUPLEX_STREAMED = 4
"""Body mode in which the processor receives all chunks of a body before its answers, and sends the chunks back."""
OVERWRITE = 2
"""`append_action` that replaces a header."""
SERVING, NOT_SERVING = 1, 2
_MESSAGES: Mapping[str, Fields] = {
    "HeaderValue": {"key": (1, TEXT), "value": (2, TEXT), "raw_value": (3, BYTES)},
    "HeaderMap": {"headers": (1, "*HeaderValue")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, INT32)},
    "HeaderMutation": {"set_headers": (1, "*HeaderValueOption"), "remove_headers": (2, f"*{TEXT}")},
    "Metadata": {"filter_metadata": (1, f"@{STRUCT}")},
    "ProtocolConfiguration": {"request_body_mode": (1, INT32), "response_body_mode": (2, INT32)},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, BOOL)},
    "HttpBody": {"body": (1, BYTES), "end_of_stream": (2, BOOL)},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "attributes": (9, f"@{STRUCT}"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "StreamedBodyResponse": {"body": (1, BYTES), "end_of_stream": (2, BOOL)},
    "BodyMutation": {"body": (1, BYTES), "streamed_response": (3, "StreamedBodyResponse")},
    "CommonResponse": {"header_mutation": (2, "HeaderMutation"), "body_mutation": (3, "BodyMutation")},
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "HttpStatus": {"code": (1, INT32)},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, BYTES),
        "details": (5, TEXT),
    },
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse"),
        "response_headers": (2, "HeadersResponse"),
        "request_body": (3, "BodyResponse"),
        "response_body": (4, "BodyResponse"),
        "request_trailers": (5, "TrailersResponse"),
        "response_trailers": (6, "TrailersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, STRUCT),
    },
    "HealthCheckRequest": {"service": (1, TEXT)},
    "HealthCheckResponse": {"status": (1, INT32)},
}
"""Sources: external_processor.proto and base.proto of Envoy 1.40, health.proto of gRPC."""


class HeaderValue(Protocol):
    key: str
    value: str
    raw_value: bytes


class HeaderMap(Protocol):
    headers: Iterable[HeaderValue]


class HttpHeaders(Protocol):
    headers: HeaderMap
    end_of_stream: bool


class HttpBody(Protocol):
    body: bytes
    end_of_stream: bool


class JsonValue(Protocol):
    string_value: str
    list_value: JsonValues


class JsonValues(Protocol):
    values: Iterable[JsonValue]


class JsonObject(Protocol):
    fields: Mapping[str, JsonValue]


class Metadata(Protocol):
    filter_metadata: Mapping[str, JsonObject]


class ProtocolConfiguration(Protocol):
    request_body_mode: int
    response_body_mode: int


class ProcessingRequest(Protocol):
    """A message of the proxy. It has one of the first four fields, or trailers."""

    request_headers: HttpHeaders
    response_headers: HttpHeaders
    request_body: HttpBody
    response_body: HttpBody
    metadata_context: Metadata
    attributes: Mapping[str, JsonObject]
    protocol_config: ProtocolConfiguration

    def HasField(self, name: str) -> bool:
        """Return whether the message has a field."""
        ...


def message_classes() -> dict[str, Any]:
    """Return the class of each message by its name. Raises ImportError without the package protobuf."""
    return protobuf.message_classes("baton.gateway", _MESSAGES)
