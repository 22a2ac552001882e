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

_LIVENESS, _READINESS = "liveness", "readiness"


@dataclass(frozen=True, slots=True)
class Listening:
    """Where and how the server listens."""

    address: str
    """`HOST:PORT`."""
    certificate: Path | None = None
    """Chain and private key in PEM. None: no TLS."""
    key: Path | None = None


class _Context(Protocol):
    """The context of a gRPC call."""

    async def write(self, message: bytes) -> None: ...

    async def abort(self, code: object, details: str) -> None:
        """End the call with an error. Does not return."""
        ...


class _Server(Protocol):
    """A gRPC server before its start."""

    def add_insecure_port(self, address: str) -> int: ...

    def add_secure_port(self, address: str, credentials: object) -> int: ...


async def serve_picker(
    listening: Listening, picker: Picker, is_ready: Callable[[], bool], said: Callable[[], None]
) -> None:
    """Serve until it is cancelled. `said` is called once it listens.

    Raises ConfigError if it cannot listen, or the extra is missing.
    """
    try:
        grpc, messages = import_module("grpc"), message_classes()
    except ImportError as error:
        raise ConfigError(f"gRPC is not installed ({error.name}): pip install 'baton[gateway]'") from error
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
    checking = grpc.unary_unary_rpc_method_handler(
        check,
        service_of,
        status_bytes,
    )
    handler = grpc.method_handlers_generic_handler
    server.add_generic_rpc_handlers((handler(SERVICE, {"Process": processing}), handler(HEALTH, {"Check": checking})))
    _listen(server, grpc.ssl_server_credentials, listening)
    await server.start()
    said()
    try:
        await server.wait_for_termination()
    finally:
        await server.stop(0)


def _listen(server: _Server, credentials: Callable[[Any], object], listening: Listening) -> None:
    try:
        if listening.certificate is None or listening.key is None:
            server.add_insecure_port(listening.address)
            return
        pair = (listening.key.read_bytes(), listening.certificate.read_bytes())
        server.add_secure_port(listening.address, credentials([pair]))
    except OSError as error:
        raise ConfigError(f"cannot read the certificate: {error}; give --tls-cert and --tls-key") from error
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {listening.address}: {error}; choose another --port or --host") from error
