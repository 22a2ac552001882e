"""Let the bodies of requests be parsed and tokenized without delaying the event loop, and clients in turns."""

from __future__ import annotations

import asyncio
import gc
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class ReceivedBody:
    """The body of a request."""

    raw: bytes
    client: int
    """Number of its client."""


class Turns:
    """A lock that clients get in turns, so that one with many requests waits longer than others. Not thread-safe."""

    def __init__(self) -> None:
        self._is_free = True
        self._waiting: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting requests of each client. The first client in the dictionary is next."""

    def take_free(self) -> bool:
        """Take the turn if it is free: then return True, and `pass_on` must follow. Faster than `take`."""
        was_free, self._is_free = self._is_free, False
        return was_free

    async def take(self, client: int) -> None:
        """Wait for the turn of a request of a client. `pass_on` must follow."""
        if self.take_free():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.pass_on()
            raise

    def pass_on(self) -> None:
        """Give the turn to the next request."""
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns
            if not turn.done():  # else the request was cancelled
                turn.set_result(None)
                return
        self._is_free = True


class BodyThreads:
    """Runs work on request bodies: small ones on the event loop, larger ones in threads, large ones one at a time.

    Work in Python shares the interpreter with the event loop, which gets its turn every few milliseconds. Many threads
    would multiply that time, and the memory that the work needs.
    """

    def __init__(self, *, inline_bytes_max: int, parallel_bytes_max: int) -> None:
        """Set the sizes of the largest bodies on the event loop, and in several threads at once."""
        self._inline_bytes_max = inline_bytes_max
        self._parallel_bytes_max = parallel_bytes_max
        self._turns = Turns()

    async def run(self, work: Callable[[], Made], body: ReceivedBody, *, may_block: bool = False) -> Made:
        """Run `work` on a body and return its result. `may_block`: never run it on the event loop."""
        size = len(body.raw)
        if size > self._parallel_bytes_max:
            await self._turns.take(body.client)
            try:
                return await asyncio.to_thread(_without_collections, work)
            finally:
                self._turns.pass_on()
        in_thread = may_block or size > self._inline_bytes_max
        return await asyncio.to_thread(work) if in_thread else work()


def _without_collections(work: Callable[[], Made]) -> Made:
    """Run `work` without garbage collections: each would visit all parts of a large body, and block the event loop."""
    gc.disable()
    try:
        return work()
    finally:
        gc.enable()
