"""The parent's side of sandboxes: start a fork server, fork sandboxes, call them, and explain their ends."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress

import msgspec

from baton.compute.sandbox.messages import COMMAND, DONE, FORK, STACK_BYTES, STATUS, WAIT, SandboxSetup
from baton.core.errors import BatonError
from baton.move.clock import now_s
from baton.move.ipc.frames import FrameReader, frame

_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "TMPDIR", "VIRTUAL_ENV")
"""Environment variables that a sandbox gets. Others may hold keys and passwords."""
_RECEIVE_BYTES = 1 << 18
_LATE_S = 10.0
"""Time after a sandbox's own time limit at which its parent kills it."""


class SandboxError(BatonError):
    """A job failed: it broke a limit and ended its sandbox, or its code raised an error. The message is the reason."""

    def __init__(self, message: str, *, is_lasting: bool = True, is_memory_limit: bool = False) -> None:
        """`is_lasting`: the same job fails again. False: the machine was busy, or the sandbox was lost.

        `is_memory_limit`: the sandbox needs too much memory. Its earlier jobs may hold a part of it.
        """
        super().__init__(message)
        self.is_lasting = is_lasting
        self.is_memory_limit = is_memory_limit


class Sandbox:
    """One sandbox process. It answers jobs in order. Not thread-safe."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self._sock = sock
        self._unsent = bytearray()
        self._reader = FrameReader()
        self._poll = select.poll()
        weakref.finalize(self, sock.close)
        sock.setblocking(False)

    def put(self, job: bytes) -> None:
        """Send a job, or as much of it as the socket takes now. `answers` sends the rest."""
        self._unsent += frame(job)
        self._flush()

    def answers(self, wait_s: float) -> list[bytes | SandboxError]:
        """Wait up to `wait_s` for an answer or the process's end. Return the answers that have arrived, perhaps none.

        A SandboxError in the list is the answer of a job that failed. Raises EOFError if the process has ended.
        """
        self._poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        if not self._poll.poll(wait_s * 1000):
            return []
        self._flush()
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except ConnectionResetError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return [
            answer[1:] if answer[:1] == DONE else SandboxError(answer[1:].decode())
            for answer in self._reader.feed(data)
        ]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Hang up, which ends an idle sandbox."""
        self._sock.close()

    def _flush(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # the next read reports the end
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]


class ForkServer:
    """Forks the sandboxes of one setup. Thread-safe. The server process starts with the first sandbox."""

    def __init__(self, setup: SandboxSetup) -> None:
        self.limits = setup.limits
        self._setup = setup
        self._lock = threading.Lock()
        self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._finish: weakref.finalize[..., ForkServer] | None = None

    def fork(self) -> Sandbox:
        """Return a new sandbox. Raises SandboxError if the fork server cannot be started."""
        with self._lock:
            try:
                return self._fork()
            except OSError:
                self._end()  # the fork server was killed: start a new one
            try:
                return self._fork()
            except OSError as error:
                self._end()
                raise SandboxError(f"the sandbox cannot be started: {error}", is_lasting=False) from error

    def end_reason(self, sandbox: Sandbox) -> SandboxError | None:
        """Return an error with the reason why a sandbox has ended, the limit, and the setting that raises it.

        None: it ended because it had no job for some time. A job that it was sent at that moment has not begun.
        """
        sandbox.close()
        with self._lock:
            try:
                if self._control is None:
                    raise ConnectionResetError("the fork server was closed")
                status = self._exit_status(sandbox.pid)
            except OSError:
                self._end()
                return SandboxError("its sandbox was lost; send it again", is_lasting=False)
        if status == 0:
            return None
        return self._reason(os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))

    def close(self) -> None:
        """End the fork server, and with it every sandbox. A concurrent call of `fork` fails at once."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
        with self._lock:
            self._end()

    def _fork(self) -> Sandbox:
        self._command(FORK, 0)
        assert self._control is not None
        data, descriptors, _flags, _address = socket.recv_fds(self._control, STATUS.size, 1)
        if len(data) < STATUS.size:
            raise ConnectionResetError("the fork server ended before it had loaded the model's vocabulary")
        (pid,) = STATUS.unpack(data)
        if not descriptors:  # the kernel has closed the socket, which ends the sandbox
            self._exit_status(pid)
            raise SandboxError("this process has too many open files; send it again", is_lasting=False)
        return Sandbox(pid, socket.socket(fileno=descriptors[0]))

    def _exit_status(self, pid: int) -> int:
        self._command(WAIT, pid)
        return STATUS.unpack(self._receive(STATUS.size))[0]

    def _command(self, kind: bytes, pid: int) -> None:
        if self._control is None:
            self._start()
        assert self._control is not None
        self._control.sendall(COMMAND.pack(kind, pid))

    def _receive(self, size: int) -> bytes:
        assert self._control is not None
        data = self._control.recv(size, socket.MSG_WAITALL)
        if len(data) < size:
            raise ConnectionResetError("the fork server has ended")
        return data

    def _start(self) -> None:
        if self._is_closed:
            raise ConnectionResetError("it was closed")
        ours, theirs = socket.socketpair()
        kept = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "baton.compute.sandbox", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**kept, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._control, self._process = ours, process
        self._finish = weakref.finalize(self, _finish, process, ours)
        if self._is_closed:
            raise ConnectionResetError("it was closed")
        ours.sendall(frame(msgspec.msgpack.encode(self._setup)))

    def _end(self) -> None:
        if self._finish is not None:
            self._finish()
        self._control = self._finish = self._process = None

    def _reason(self, number: int) -> SandboxError:
        limits = self.limits
        match number:
            case signal.SIGPROF:
                text = f"it takes more than {limits.cpu_s:g} s of CPU time; simplify it, or raise sandbox.cpu_s"
            case signal.SIGKILL:
                return SandboxError("its sandbox was killed; send it again", is_lasting=False)
            case signal.SIGALRM:
                text = f"it takes more than {limits.wall_s:g} s; simplify it, or raise sandbox.wall_s"
                return SandboxError(text, is_lasting=False)
            case signal.SIGSEGV | signal.SIGBUS:
                text = f"it is nested too deeply for a stack of {STACK_BYTES >> 20} MiB; nest it less"
            case signal.SIGABRT:
                size = f"{limits.memory_bytes >> 20} MiB"
                text = f"it needs more than {size} of memory; simplify it, or raise sandbox.memory_bytes"
                return SandboxError(text, is_memory_limit=True)
            case _:
                text = "the library that compiles it fails on it; simplify it"
        return SandboxError(text)


class SandboxPool:
    """Sandboxes of one kind, at most `size` at a time. Thread-safe: a call blocks until it has its answer."""

    def __init__(self, setup: SandboxSetup, size: int) -> None:
        self._closed = False
        self._server = ForkServer(setup)
        self._idle: list[Sandbox] = []
        self._turns = threading.Semaphore(size)

    def call(self, job: bytes) -> bytes:
        """Return the answer of a job. Raises SandboxError if it fails or breaks a limit."""
        with self._turns:
            if self._closed:
                raise SandboxError("the server is shutting down; send it again", is_lasting=False)
            while True:
                is_new = not self._idle
                sandbox = self._server.fork() if is_new else self._idle.pop()
                try:
                    answer = _call(sandbox, job, self._server.limits.wall_s + _LATE_S)
                    break
                except EOFError:
                    error = self._server.end_reason(sandbox)
                    if error is not None and (is_new or not error.is_memory_limit):
                        raise error from None
            self._idle.append(sandbox)
        if isinstance(answer, SandboxError):
            raise answer
        return answer

    def warm_up(self) -> None:
        """Start a sandbox before the first call."""
        with self._turns:
            self._idle.append(self._server.fork())

    def close(self) -> None:
        """End all sandboxes. Calls that wait for one fail at once."""
        self._closed = True
        self._server.close()


def _call(sandbox: Sandbox, job: bytes, wait_s: float) -> bytes | SandboxError:
    """Return the answer of an idle sandbox. Raises EOFError if it ends instead."""
    sandbox.put(job)
    end_s = now_s() + wait_s
    while now_s() < end_s:
        for answer in sandbox.answers(end_s - now_s()):
            return answer
    sandbox.kill()
    raise EOFError


def _finish(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """End a fork server. Its sandboxes end with it."""
    control.close()
    process.kill()
    process.wait()
