"""Background tasks that no caller awaits."""

from __future__ import annotations

import asyncio

from baton.serve.host.tasks import spawn


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
