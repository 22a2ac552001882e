"""A file as the body of an answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.serve.http.pages import CHUNK_BYTES, file_chunks


def _sent(path: Path, size_bytes: int) -> list[int]:
    async def collect() -> list[int]:
        return [len(chunk) async for chunk in file_chunks(path, size_bytes)]

    return asyncio.run(collect())


@pytest.mark.parametrize(
    ("there", "announced", "sent"),
    [
        (CHUNK_BYTES + 9, CHUNK_BYTES + 5, [CHUNK_BYTES, 5]),
        (3, 3, [3]),
        (0, 0, []),
        (3, 8, [3]),  # somebody has cut it: no chunk is made up
    ],
)
def test_what_was_announced_is_sent_however_long_the_file_has_grown(
    there: int, announced: int, sent: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "decisions.log"
    path.write_bytes(b"x" * there)
    assert _sent(path, announced) == sent
