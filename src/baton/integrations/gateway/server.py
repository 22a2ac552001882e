"""The gRPC server of an endpoint picker: Envoy's external processing, and gRPC's health service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from baton.core.errors import ConfigError
from baton.integrations.gateway.exchange import BODY_BYTES_MAX, Exchange, Replies
from baton.integrations.gateway.messages import (
    HEALTH,
    NOT_SERVING,
    SERVICE,
    SERVING,
    ProcessingRequest,
    message_classes,
)
from baton.integrations.gateway.picker import REQUESTS_MAX, Picker
from baton.integrations.grpc_server import CallContext, import_grpc, run_server

_LIVENESS, _READINESS = "liveness", "readiness"


@dataclass(frozen=True, slots=True)
class Listening:
    """Where and how the server listens."""

    address: str
    """`HOST:PORT`."""
    certificate: Path | None = None
    """Chain and private key in PEM. None: no TLS."""
    key: Path | None = None


class _Context(CallContext, Protocol):
    """The context of a gRPC call that answers with a stream."""

    async def write(self, message: bytes) -> None: ...


async def serve_picker(
    listening: Listening, picker: Picker, is_ready: Callable[[], bool], said: Callable[[], None]
) -> None:
    """Serve until it is cancelled. `said` is called once it listens.

    Raises ConfigError if it cannot listen, or the extra is missing.
    """
    grpc, messages = import_grpc("gateway", message_classes)
    replies, numbers = Replies(messages), count(1)

    async def process(stream: AsyncIterator[ProcessingRequest], context: _Context) -> None:
        exchange = Exchange(next(numbers), picker, replies)
        try:
            async for message in stream:
                for reply in await exchange.handle(message):
                    await context.write(reply)
        finally:
            exchange.close()

    async def check(service: str, context: _Context) -> int:
        if service not in ("", _LIVENESS, _READINESS, SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {service[:80]!r}")
        return SERVING if service == _LIVENESS or is_ready() else NOT_SERVING

    def service_of(raw: bytes) -> str:
        return messages["HealthCheckRequest"].FromString(raw).service

    def status_bytes(status: int) -> bytes:
        return messages["HealthCheckResponse"](status=status).SerializeToString()

    options = (("grpc.max_receive_message_length", BODY_BYTES_MAX + (1 << 20)), ("grpc.so_reuseport", 0))
    server = import_module("grpc.aio").server(maximum_concurrent_rpcs=REQUESTS_MAX, options=options)
    processing = grpc.stream_stream_rpc_method_handler(process, replies.parse, None)
    checking = grpc.unary_unary_rpc_method_handler(check, service_of, status_bytes)
    handler = grpc.method_handlers_generic_handler
    server.add_generic_rpc_handlers((handler(SERVICE, {"Process": processing}), handler(HEALTH, {"Check": checking})))
    await run_server(server, listening.address, said, _credentials(grpc.ssl_server_credentials, listening))


def _credentials(credentials: Callable[[Any], object], listening: Listening) -> object:
    """Return the credentials for TLS; None without a certificate. Raises ConfigError if it cannot be read."""
    if listening.certificate is None or listening.key is None:
        return None
    try:
        return credentials([(listening.key.read_bytes(), listening.certificate.read_bytes())])
    except OSError as error:
        raise ConfigError(f"cannot read the certificate: {error}; give --tls-cert and --tls-key") from error
