"""The gRPC server of an endpoint picker: Envoy's external processing, and gRPC's health service."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from baton.core.errors import ConfigError
from baton.integrations.gateway.exchange import BODY_BYTES_MAX, Exchange, Replies
from baton.integrations.gateway.http2 import NOT_FOUND, Connection, Services, Stream
from baton.integrations.gateway.messages import HEALTH, NOT_SERVING, SERVICE, SERVING, message_classes
from baton.integrations.gateway.picker import REQUESTS_MAX, Picker

_LIVENESS, _READINESS = "liveness", "readiness"
_UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class Listening:
    """Where and how the server listens."""

    address: str
    """`HOST:PORT`, or `unix:PATH`."""
    certificate: Path | None = None
    """Chain and private key in PEM. None: no TLS."""
    key: Path | None = None


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
    try:
        import_module("hpack")
        messages = message_classes()
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'baton[gateway]'") from error
    replies, numbers = Replies(messages), count(1)
    services: Services = {
        f"/{SERVICE}/Process": lambda stream: Exchange(next(numbers), picker, replies, stream),
        f"/{HEALTH}/Check": partial(_HealthCheck, messages, is_ready),
    }
    connections: set[Connection] = set()

    def connect() -> Connection:
        return Connection(services, connections, streams_max=REQUESTS_MAX, message_bytes_max=BODY_BYTES_MAX + (1 << 20))

    server = await _listen(listening, connect)
    said()
    try:
        await server.serve_forever()
    finally:
        server.close()
        for connection in list(connections):
            connection.stop()


async def _listen(listening: Listening, connect: Callable[[], Connection]) -> asyncio.Server:
    loop, secure = asyncio.get_running_loop(), _tls(listening)
    address = listening.address
    try:
        if address.startswith(_UNIX):
            return await loop.create_unix_server(connect, address.removeprefix(_UNIX), ssl=secure)
        host, _, port = address.rpartition(":")
        return await loop.create_server(connect, host.strip("[]"), int(port), ssl=secure)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error}; choose another --port or --host") from error


def _tls(listening: Listening) -> ssl.SSLContext | None:
    """Return the context for TLS; None without a certificate. Raises ConfigError if it cannot be read."""
    if listening.certificate is None or listening.key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["h2"])
    try:
        context.load_cert_chain(listening.certificate, listening.key)
    except OSError as error:
        raise ConfigError(f"cannot read the certificate: {error}; give --tls-cert and --tls-key") from error
    return context
