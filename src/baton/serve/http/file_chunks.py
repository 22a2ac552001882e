"""A file as the body of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

CHUNK_BYTES = 1 << 18


async def file_chunks(path: Path, size_bytes: int) -> AsyncIterator[bytes]:
    """Read the first `size_bytes` of a file that may grow meanwhile, in a thread: the streams of others go on.

    One chunk is in memory at a time, however slowly the client reads.
    """
    file = await asyncio.to_thread(path.open, "rb")
    try:
        left_bytes = size_bytes
        while left_bytes and (chunk := await asyncio.to_thread(file.read, min(left_bytes, CHUNK_BYTES))):
            left_bytes -= len(chunk)
            yield chunk
    finally:
        file.close()
