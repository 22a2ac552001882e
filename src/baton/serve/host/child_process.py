"""A process of ours as its host holds it: its socket, its exit, the end of its output."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import cast

from baton.core.errors import WorkerError
from baton.move.ipc.frames import FrameReader, frame

_OUTPUT_LINES = 20
_OUTPUT_BYTES = 4096
"""Output is read in such pieces; a line that is longer is cut."""

_LAST_WORDS_S = 1.0
"""What a dead process said is there at once; how long it is waited for the end of it."""


class ChildProcess(asyncio.Protocol):
    """Started once, with a descriptor beside its first message; what is started again is a new one."""

    def __init__(self, name: str, module: str, *, heard: Callable[[bytes], None], said: Callable[[str], None]) -> None:
        self.pid = 0
        self._name = name
        self._module = module
        self._heard = heard
        self._said = said
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._hung_up = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._output: deque[str] = deque(maxlen=_OUTPUT_LINES)
        self._relay: asyncio.Task[None] | None = None

    async def start(self, setup: bytes, descriptor: int, *, threads: int) -> None:
        """Start the process and tell it what to do, with a descriptor beside the message.

        Raises OSError where the host has no room for it, or it died before it was told: no process is left then.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                self._process = await _spawn(self._module, theirs, threads=threads)
            self.pid = self._process.pid
            self._relay = asyncio.create_task(self._relay_output(self._process))
            socket.send_fds(ours, [frame(setup)], [descriptor])
            ours.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        except OSError:
            ours.close()
            await self._bury()
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        for payload in self._reader.feed(data):
            self._heard(payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._hung_up.set()

    def pass_on(self, payload: bytes) -> None:
        """Send a message that is encoded already."""
        if self._transport is not None:
            self._transport.write(frame(payload))

    def kill(self) -> None:
        """End the process at once. Its end is noticed like any other."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def wait(self) -> str:
        """Wait until the process is certainly dead and everything that it said is heard. Returns how it ended."""
        if self._process is None:
            raise WorkerError(f"{self._name} was never started")
        code = await self._process.wait()
        await self._last_words()
        ended = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"{self._name} (pid {self.pid}) {ended}" + "".join(f"\n  {line}" for line in self._output)

    async def _bury(self) -> None:
        """End a process that was not told what to do, and take its last words."""
        self._hung_up.set()
        self.kill()
        if self._process is not None:
            await self._process.wait()
        await self._last_words()

    async def _last_words(self) -> None:
        """Hear what the dead process said. Not for long: a child that it left behind may hold its output open."""
        hearing = [asyncio.create_task(self._hung_up.wait()), *([self._relay] if self._relay is not None else [])]
        _done, late = await asyncio.wait(hearing, timeout=_LAST_WORDS_S)
        for task in late:
            task.cancel()
        if self._transport is not None:
            self._transport.abort()

    async def _relay_output(self, process: asyncio.subprocess.Process) -> None:
        """Pass on what the process prints, whatever it prints: unread, it would stop the process."""
        assert process.stdout is not None
        rest = b""
        while piece := await process.stdout.read(_OUTPUT_BYTES):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > _OUTPUT_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._note(line)
        if rest:
            self._note(rest)

    def _note(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip()
        self._output.append(line)
        self._said(f"{self._name}: {line}")


async def _spawn(module: str, theirs: socket.socket, *, threads: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        str(theirs.fileno()),
        pass_fds=(theirs.fileno(),),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"},
        start_new_session=True,  # signals to the group are for the server, which then ends its workers
    )
