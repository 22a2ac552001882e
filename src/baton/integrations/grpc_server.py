"""What gRPC services share: the import of an optional package, and a server that runs until it is cancelled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

from baton.core.errors import ConfigError


class CallContext(Protocol):
    """The context of a gRPC call."""

    async def abort(self, code: object, details: str) -> None:
        """End the call with an error. Does not return."""
        ...


class GrpcServer(Protocol):
    """A server of `grpc.aio`."""

    def add_insecure_port(self, address: str) -> int: ...

    async def start(self) -> None: ...

    async def wait_for_termination(self) -> object: ...

    async def stop(self, grace: float | None) -> None: ...


def import_grpc(extra: str, message_classes: Callable[[], Mapping[str, Any]]) -> tuple[Any, Mapping[str, Any]]:
    """Return the module `grpc` and the classes of the messages. Raises ConfigError if the extra is missing."""
    try:
        return import_module("grpc"), message_classes()
    except ImportError as error:
        raise ConfigError(f"gRPC is not installed ({error.name}): pip install 'baton[{extra}]'") from error


async def run_server(server: GrpcServer, address: str, said: Callable[[], None]) -> None:
    """Run a server on `HOST:PORT` until this is cancelled. Call `said` once it listens.

    Raises ConfigError if it cannot listen.
    """
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: {error}; choose another --port or --host") from error
    await server.start()
    said()
    try:
        await server.wait_for_termination()
    finally:
        await server.stop(0)
