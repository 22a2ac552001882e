"""Process of a Mooncake client, started by `MooncakeStore`.

Mooncake's client holds Python's lock while it connects, and opens a port through which its peers read and write the
memory that it registered. In a process of its own it delays no request, a hanging call ends with the process, and
peers reach only the staging memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from baton.core.errors import StoreError
from baton.move.ipc.connections import receive_views, send_views
from baton.move.ipc.frames import HEAD_BYTES, frame

P2P = "P2PHANDSHAKE"
"""Clients exchange their addresses directly, without a metadata server."""


class ClientSettings(Struct, frozen=True, kw_only=True):
    """Everything that the process is started with."""

    master: str
    """host:port"""
    local_host: str
    """Address at which other Mooncake clients reach this one."""
    protocol: str
    devices: str
    staging_fd: int
    lanes: tuple[int, ...]
    """Descriptors of the sockets to the parent. Each has a thread, which runs one call at a time."""


class ClientStarted(Struct, frozen=True):
    """First message, on the first lane."""

    problem: str = ""
    """Why the client does not run. Empty: it runs."""


class ClientCall(Struct, frozen=True):
    """One call of Mooncake's client for a batch of keys."""

    verb: Literal["has", "put", "get", "drop"]
    keys: list[str]
    offsets: list[int] = []
    """Where each value is in the staging memory, for "put" and "get"."""
    size_bytes: int = 0
    """Size of each value."""


def send_message(connection: socket.socket, message: Struct | list[int]) -> None:
    send_views(connection, [frame(msgspec.msgpack.encode(message))])


def receive_payload(connection: socket.socket) -> bytearray:
    """Receive one message. Raises OSError if the other side is gone or too slow."""
    head = bytearray(HEAD_BYTES)
    receive_views(connection, [memoryview(head)])
    payload = bytearray(int.from_bytes(head, "little"))
    receive_views(connection, [memoryview(payload)])
    return payload


class _Client:
    """Mooncake's client and the staging memory that is registered with it."""

    def __init__(self, settings: ClientSettings) -> None:
        """Connect to the master. Raises StoreError with what is missing or refused."""
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise StoreError(
                f"it needs a Mooncake package ({error}): pip install 'baton[mooncake]', and libibverbs1"
            ) from None
        self._memory = mmap.mmap(settings.staging_fd, os.fstat(settings.staging_fd).st_size)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup(settings.local_host, P2P, 0, 0, settings.protocol, settings.devices, settings.master)
        if code != 0:
            raise StoreError(
                f"no Mooncake master answers (code {code}): start mooncake_master, or correct host and port"
            )
        code = self._store.register_buffer(self._base, len(self._memory))
        if code != 0:
            raise StoreError(f"Mooncake does not register {len(self._memory)} bytes of memory (code {code})")

    def run(self, call: ClientCall) -> list[int]:
        """Return Mooncake's code for each key."""
        places = [self._base + offset for offset in call.offsets]
        sizes = [call.size_bytes] * len(call.keys)
        match call.verb:
            case "has":
                return self._store.batch_is_exist(call.keys)
            case "put":
                return self._store.batch_put_from(call.keys, places, sizes)
            case "get":
                return self._store.batch_get_into(call.keys, places, sizes)
            case "drop":
                return self._store.batch_remove(call.keys, True)


def _serve(client: _Client, lane: socket.socket) -> None:
    """Run the calls of one lane. When the parent hangs up or dies, the process ends."""
    decoder = msgspec.msgpack.Decoder(ClientCall)
    try:
        while True:
            send_message(lane, client.run(decoder.decode(receive_payload(lane))))
    except OSError:
        pass
    finally:
        os._exit(0)  # Mooncake's own shutdown may wait for a master that hangs


def main(arguments: Sequence[str]) -> None:
    settings = msgspec.json.decode(arguments[0], type=ClientSettings)
    lanes = [socket.socket(fileno=descriptor) for descriptor in settings.lanes]
    try:
        client = _Client(settings)
    except StoreError as error:
        send_message(lanes[0], ClientStarted(str(error)))
        os._exit(1)
    threads = [threading.Thread(target=_serve, args=(client, lane)) for lane in lanes]
    for thread in threads:
        thread.start()
    send_message(lanes[0], ClientStarted())
    threads[0].join()


if __name__ == "__main__":
    main(sys.argv[1:])
