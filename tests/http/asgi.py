"""A client at the ASGI level, whose every move the test makes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Message, Scope


def scope(path: str = "/v1/completions") -> Scope:
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "server": ("127.0.0.1", 80),
        "headers": [(b"content-type", b"application/json")],
    }


class Connection:
    """A client's connection, held by the test: it sends a body, then stays until `hang_up`; it reads when `reading`."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._gone = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if self._incoming:
            return self._incoming.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.reading.wait()
        self.sent.append(message)

    def hang_up(self) -> None:
        self._gone.set()

    def text(self) -> str:
        chunks = b"".join(message.get("body", b"") for message in self.sent).decode().split("\n\n")
        events = [json.loads(chunk[6:]) for chunk in chunks if chunk.startswith("data: {")]
        return "".join(choice["text"] for event in events for choice in event["choices"])


async def settle() -> None:
    """Let every task that can go on go on."""
    for _ in range(20):
        await asyncio.sleep(0)
