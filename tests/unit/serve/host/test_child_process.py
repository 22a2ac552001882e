"""A child process that ends: what it has said is passed on once, and its end takes one line."""

from __future__ import annotations

import asyncio

from baton.serve.host.child_process import ChildProcess


def test_the_output_of_a_dead_process_is_not_repeated_with_its_end() -> None:
    """A traceback stood in the log for each message about one loss."""

    async def story() -> tuple[str, list[str], int]:
        said: list[str] = []
        process = ChildProcess("w", "baton.no_such_module", on_message=lambda _: None, on_output=said.append)
        await process.start(b"setup", 0, threads=1)
        return await process.wait(), said, process.pid

    ended, said, pid = asyncio.run(story())
    assert ended == f"w (pid {pid}) ended with code 1"
    assert sum("No module named baton.no_such_module" in line for line in said) == 1
