"""A publisher of KV events as vLLM has it: a PUB socket, and a ROUTER socket that repeats messages."""

from __future__ import annotations

import asyncio
from typing import Self

import zmq
import zmq.asyncio


class EventPublisher:
    """Publishes on loopback. Use it as a context."""

    def __init__(self) -> None:
        self.kept: dict[int, bytes] = {}
        """The messages that it can repeat, by their numbers."""
        self.next = 0
        self._context = zmq.asyncio.Context()

    async def __aenter__(self) -> Self:
        self._events = self._context.socket(zmq.XPUB)
        self._events.set(zmq.XPUB_VERBOSE, 1)
        self.address = f"tcp://127.0.0.1:{self._events.bind_to_random_port('tcp://127.0.0.1')}"
        self._repeats = self._context.socket(zmq.ROUTER)
        self.replay_address = f"tcp://127.0.0.1:{self._repeats.bind_to_random_port('tcp://127.0.0.1')}"
        self._subscribed = False
        self._serving = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._serving.cancel()
        self._context.destroy(linger=0)

    def keep(self, payload: bytes) -> None:
        """Add a message that reaches no subscriber."""
        self.kept[self.next] = payload
        self.next += 1

    async def publish(self, payload: bytes) -> None:
        """Send a message once there is a subscriber."""
        if not self._subscribed:
            await self._events.recv()
            self._subscribed = True
        self.keep(payload)
        number = self.next - 1
        await self._events.send_multipart((b"", number.to_bytes(8, "big"), payload))

    async def _serve(self) -> None:
        while True:
            client, _, first = await self._repeats.recv_multipart()
            for number, payload in list(self.kept.items()):
                if number >= int.from_bytes(first, "big"):
                    await self._repeats.send_multipart((client, b"", b"", number.to_bytes(8, "big"), payload))
            await self._repeats.send_multipart((client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))
