"""Background tasks that no caller awaits."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from baton.move.arena.memfd import create_arena, open_arena
from baton.serve.host.tasks import prefault, spawn
from tests.machine_faults import small_disk

ARENA_BYTES = 4 << 20


def _told(*, fails: bool, cancelled: bool = False) -> list[str]:
    lines: list[str] = []

    async def keep() -> None:
        await asyncio.sleep(0)
        if fails:
            raise ValueError("no such thing")

    async def run() -> None:
        task = spawn(keep(), lines.append)
        if cancelled:
            task.cancel()
        await asyncio.wait({task})

    asyncio.run(run())
    return lines


def test_work_that_fails_is_told_and_no_other() -> None:
    [line] = _told(fails=True)
    assert "keep ended: ValueError: no such thing" in line
    assert _told(fails=False) == []
    assert _told(fails=True, cancelled=True) == [], "it was ended on purpose"


def test_an_arena_that_the_system_has_no_memory_for_is_told_once(tmp_path: Path) -> None:
    """The server then ends with the reason, instead of workers that are killed one after the other."""
    told: list[str] = []
    whole = create_arena(ARENA_BYTES)
    asyncio.run(prefault(whole, told.append))
    whole.close()
    assert not told
    with small_disk(tmp_path, ARENA_BYTES // 2) as disk, (disk / "arena").open("w+b") as file:
        file.truncate(ARENA_BYTES)
        arena = open_arena(os.dup(file.fileno()), ARENA_BYTES)
        asyncio.run(prefault(arena, told.append))
        arena.close()
    assert ["set kv.bytes or --kv-blocks to less" in line for line in told] == [True]
