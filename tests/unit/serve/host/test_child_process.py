"""A child process that ends: what it has said is passed on once, and its end takes one line."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from baton.move.ipc.frames import ControlWriter
from baton.serve.host.child_process import ChildProcess


def test_the_output_of_a_dead_process_is_not_repeated_with_its_end() -> None:
    """A traceback stood in the log for each message about one loss."""

    async def story() -> tuple[str, list[str], int]:
        said: list[str] = []
        process = ChildProcess("w", "baton.no_such_module", on_message=lambda _: None, on_output=said.append)
        await process.start(b"setup", [0], threads=1)
        return await process.wait(), said, process.pid

    ended, said, pid = asyncio.run(story())
    assert ended == f"w (pid {pid}) ended with code 1"
    assert sum("No module named baton.no_such_module" in line for line in said) == 1


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGBUS, "killed by signal 7: a page of the model file or the KV cache could not be read"),
        (signal.SIGKILL, "killed by signal 9: by an operator, or by the system when memory runs out"),
        (signal.SIGTERM, "killed by signal 15"),
    ],
)
def test_a_signal_that_a_fault_of_the_machine_sends_is_explained(number: int, why: str) -> None:
    async def story() -> str:
        process = ChildProcess("w", "timeit", on_message=lambda _: None, on_output=lambda _: None)
        await process.start(b"setup", [0], threads=1)
        os.kill(process.pid, number)
        return await process.wait()

    assert why in asyncio.run(story())


def test_a_process_whose_message_is_lost_is_killed_and_no_later_message_is_handled() -> None:
    """Without the number of a message, a request whose grant or report is lost would hang."""
    heard: list[bytes] = []

    async def story() -> str:
        process = ChildProcess("w", "timeit", on_message=heard.append, on_output=lambda _: None)
        await process.start(b"setup", [0], threads=1)
        writer = ControlWriter()
        first, _lost, third, last = (writer.frame(message) for message in (b"first", b"lost", b"third", b"last"))
        process.data_received(first + first)
        process.data_received(third)
        process.data_received(last)
        return await process.wait()

    assert "was killed: control message 1 was lost: message 2 arrived" in asyncio.run(story())
    assert heard == [b"first"]
