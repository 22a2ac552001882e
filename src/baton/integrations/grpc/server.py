"""Serve the calls of a gRPC service until the server is cancelled."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from baton.core.errors import ConfigError
from baton.integrations.grpc.http2 import Connection, Services

_UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class Listening:
    """Where and how a server listens."""

    address: str
    """`HOST:PORT`, or `unix:PATH`."""
    certificate: Path | None = None
    """Chain and private key in PEM. None: no TLS."""
    key: Path | None = None


def import_messages(extra: str, message_classes: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the classes of a service's messages. Raises ConfigError if a package of the extra is missing."""
    try:
        import_module("hpack")
        return message_classes()
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'baton[{extra}]'") from error


async def serve_calls(
    listening: Listening, services: Services, said: Callable[[], None], *, streams_max: int, message_bytes_max: int
) -> None:
    """Serve until it is cancelled. `said` is called once it listens.

    `streams_max`: calls at once on a connection. Raises ConfigError if it cannot listen.
    """
    connections: set[Connection] = set()

    def connect() -> Connection:
        return Connection(services, connections, streams_max=streams_max, message_bytes_max=message_bytes_max)

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
