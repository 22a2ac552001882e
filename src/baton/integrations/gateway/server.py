"""The gRPC server of an endpoint picker: Envoy's external processing, and gRPC's health service."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from baton.integrations.gateway.exchange import BODY_BYTES_MAX, BodyMemory, Exchange, Replies
from baton.integrations.gateway.messages import HEALTH, NOT_SERVING, SERVICE, SERVING, message_classes
from baton.integrations.gateway.picker import REQUESTS_MAX, Picker
from baton.integrations.grpc.http2 import NOT_FOUND, Services, Stream
from baton.integrations.grpc.server import Listening, import_messages, serve_calls

_LIVENESS, _READINESS = "liveness", "readiness"


@dataclass(frozen=True, slots=True)
class _HealthCheck:
    """A call of gRPC's health service. Implements `Call`."""

    messages: Mapping[str, Any]
    is_ready: Callable[[], bool]
    stream: Stream

    def handle(self, message: bytes) -> None:
        service = self.messages["HealthCheckRequest"].FromString(message).service
        if service not in ("", _LIVENESS, _READINESS, SERVICE):
            self.stream.end(NOT_FOUND, f"unknown service {service[:80]!r}")
            return
        status = SERVING if service == _LIVENESS or self.is_ready() else NOT_SERVING
        self.stream.send(self.messages["HealthCheckResponse"](status=status).SerializeToString())
        self.stream.end()

    def finish(self) -> None:
        self.stream.end()

    def close(self) -> None: ...


async def serve_picker(
    listening: Listening, picker: Picker, is_ready: Callable[[], bool], said: Callable[[], None]
) -> None:
    """Serve until it is cancelled. `said` is called once it listens.

    Raises ConfigError if it cannot listen, or the extra is missing.
    """
    messages = import_messages("gateway", message_classes)
    replies, numbers, memory = Replies(messages), count(1), BodyMemory()
    services: Services = {
        f"/{SERVICE}/Process": lambda stream: Exchange(next(numbers), picker, replies, memory, stream),
        f"/{HEALTH}/Check": partial(_HealthCheck, messages, is_ready),
    }
    message_bytes_max = BODY_BYTES_MAX + (1 << 20)
    await serve_calls(listening, services, said, streams_max=REQUESTS_MAX, message_bytes_max=message_bytes_max)
