"""Run work on large request bodies in threads, so that it does not delay the event loop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")


class BodyThreads:
    """Runs work on request bodies: small ones on the event loop, larger ones in threads, large ones one at a time.

    Work in Python shares the interpreter with the event loop, which gets its turn every few milliseconds. Many threads
    would multiply that time, and the memory that the work needs.
    """

    def __init__(self, *, inline_bytes_max: int, parallel_bytes_max: int) -> None:
        """Set the sizes of the largest bodies on the event loop, and in several threads at once."""
        self._inline_bytes_max = inline_bytes_max
        self._parallel_bytes_max = parallel_bytes_max
        self._turns = asyncio.Semaphore(1)

    async def run(self, work: Callable[[], Made], *, size: int, may_block: bool = False) -> Made:
        """Run `work` on a body of `size` bytes and return its result. `may_block`: never run it on the event loop."""
        if size > self._parallel_bytes_max:
            async with self._turns:
                return await asyncio.to_thread(_without_collections, work)
        in_thread = may_block or size > self._inline_bytes_max
        return await asyncio.to_thread(work) if in_thread else work()


def _without_collections(work: Callable[[], Made]) -> Made:
    """Run `work` without garbage collections: each would visit all parts of a large body, and block the event loop."""
    gc.disable()
    try:
        return work()
    finally:
        gc.enable()
