"""A child process of a host (a worker or the mover): its socket, its output and its exit."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import cast

import msgspec

from baton.core.errors import WorkerError
from baton.core.types import WorkerView
from baton.decide.control.message_order import MessageLostError
from baton.move.ipc.frames import ControlReader, ControlWriter
from baton.serve.messages.setup import ToWorkerMessage, WorkerSetup

_OUTPUT_BYTES = 4096
"""Largest read of output; a longer line is split."""
_DRAIN_S = 1.0
"""Maximum wait for the remaining messages and output of a dead process. They arrive at once, unless a grandchild
holds the pipe open."""


class ChildProcess(asyncio.Protocol):
    """One child process. It is started once; each restart needs a new object."""

    def __init__(
        self, name: str, module: str, *, on_message: Callable[[bytes], None], on_output: Callable[[str], None]
    ) -> None:
        """`on_message` gets each encoded message, `on_output` each line of output."""
        self.pid = 0
        self._name = name
        self._module = module
        self._on_message = on_message
        self._on_output = on_output
        self._reader = ControlReader()
        self._writer = ControlWriter()
        self._broken = ""
        """Reason why further messages are ignored. Empty: messages are handled."""
        self._transport: asyncio.Transport | None = None
        self._hung_up = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._relay: asyncio.Task[None] | None = None

    async def start(self, setup: bytes, descriptors: Sequence[int], *, threads: int) -> None:
        """Start the process and send its first message, with descriptors attached.

        Raises OSError, and leaves no process, if the process cannot be started or dies before it gets the message.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                self._process = await _spawn(self._module, theirs, threads=threads)
            self.pid = self._process.pid
            self._relay = asyncio.create_task(self._relay_output(self._process))
            socket.send_fds(ours, [self._writer.frame(setup)], descriptors)
            ours.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        except OSError:
            ours.close()
            await self._reap()
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport does not subclass it

    def data_received(self, data: bytes) -> None:
        if self._broken:
            return
        payloads = self._reader.feed(data)
        while True:
            try:
                payload = next(payloads, None)
            except MessageLostError as error:
                self._broken = str(error)
                self.kill()
                return
            if payload is None:
                return
            self._on_message(payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._hung_up.set()

    def send_payload(self, payload: bytes) -> None:
        """Send an encoded message. After the process has died this does nothing."""
        if self._transport is not None:
            self._transport.write(self._writer.frame(payload))

    def kill(self) -> None:
        """Kill the process. `wait` then returns."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def wait(self) -> str:
        """Wait until the process is dead and its messages are delivered. Return how it ended, in one line.

        The line excludes the output, which `on_output` has received.
        """
        if self._process is None:
            raise WorkerError(f"{self._name} was never started")
        code = await self._process.wait()
        await self._drain()
        ended = _killed_by(-code) if code < 0 else f"ended with code {code}"
        if self._broken:
            ended = f"was killed: {self._broken}"
        return f"{self._name} (pid {self.pid}) {ended}"

    async def _reap(self) -> None:
        """Kill a process that got no first message, and collect its output."""
        self._hung_up.set()
        self.kill()
        if self._process is not None:
            await self._process.wait()
        await self._drain()

    async def _drain(self) -> None:
        """Receive the remaining messages and output of a dead process, for at most `_DRAIN_S`."""
        hearing = [asyncio.create_task(self._hung_up.wait()), *([self._relay] if self._relay is not None else [])]
        _done, late = await asyncio.wait(hearing, timeout=_DRAIN_S)
        for task in late:
            task.cancel()
        if self._transport is not None:
            self._transport.abort()

    async def _relay_output(self, process: asyncio.subprocess.Process) -> None:
        """Pass each line of output to `on_output`. An unread pipe would fill up and block the process."""
        assert process.stdout is not None
        async for line in output_lines(process.stdout):
            self._on_output(f"{self._name}: {line}")


async def output_lines(output: asyncio.StreamReader) -> AsyncGenerator[str]:
    """Yield the lines of a process's output until it ends. A line without end is divided."""
    rest = b""
    while piece := await output.read(_OUTPUT_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _OUTPUT_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            yield line.decode(errors="replace").rstrip()
    if rest:
        yield rest.decode(errors="replace").rstrip()


def _killed_by(number: int) -> str:
    """Describe a process's death by a signal, with the likely fault of the machine if only the signal shows it."""
    match number:
        case signal.SIGBUS:
            why = ": a page of the model file or the KV cache could not be read, or memory for it ran out"
        case signal.SIGKILL:
            why = ": by an operator, or by the system when memory runs out; see its log"
        case _:
            why = ""
    return f"killed by signal {number}{why}"


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
        start_new_session=True,  # so that Ctrl-C reaches the server only, which then ends its workers in order
    )


class WorkerProcess(ChildProcess):
    """Implements `WorkerLink` for a worker process on this host."""

    def __init__(
        self, view: WorkerView, *, on_message: Callable[[bytes], None], on_output: Callable[[str], None]
    ) -> None:
        super().__init__(view.id, "baton.serve.worker", on_message=on_message, on_output=on_output)
        self.view = view
        self.state = "starting"
        self.attention_backend = ""
        self._encoder = msgspec.msgpack.Encoder()

    async def begin(self, setup: WorkerSetup, descriptors: Sequence[int]) -> None:
        """Start the worker. Raises OSError as `start` does."""
        await self.start(self._encoder.encode(setup), descriptors, threads=setup.threads)

    def send(self, message: ToWorkerMessage) -> None:
        self.send_payload(self._encoder.encode(message))
