"""The process that forks sandboxes. It has loaded the libraries and the vocabulary, so a fork takes 2 ms.

Commands arrive on a Unix socket: `FORK` is answered by the pid and the socket of a new sandbox, `WAIT` by the exit
status of a dead one. The fork server itself never touches input of a client, so such input cannot end it.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
from pathlib import Path

import msgspec

from baton.compute.sandbox.messages import COMMAND, DONE, FAILED, FORK, STACK_BYTES, STATUS, SandboxSetup
from baton.compute.sandbox.work import SandboxWork, open_work
from baton.move.ipc.child import die_with_parent
from baton.move.ipc.frames import HEAD_BYTES, frame


def run_fork_server(descriptor: int) -> int:
    """Fork sandboxes on command until the parent hangs up. Return the exit code."""
    control = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; only the parent ends this process
    setup = msgspec.msgpack.decode(receive(control), type=SandboxSetup)
    work = open_work(setup.task)
    _limit(resource.RLIMIT_STACK, STACK_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    while command := control.recv(COMMAND.size, socket.MSG_WAITALL):
        kind, pid = COMMAND.unpack(command)
        if kind == FORK:
            _fork(control, work, setup)
        else:
            control.sendall(STATUS.pack(_wait(pid)))
    return 0


def _wait(pid: int) -> int:
    """Return the exit status of a dead sandbox.

    A sandbox of an earlier fork server counts as killed, because it ended with that server.
    """
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return signal.SIGKILL


def receive(sock: socket.socket) -> bytes:
    """Return the next framed message. Raises EOFError if the peer hangs up before."""
    size = int.from_bytes(_receive_exactly(sock, HEAD_BYTES), "little")
    return _receive_exactly(sock, size)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _fork(control: socket.socket, work: SandboxWork, setup: SandboxSetup) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pid = os.fork()
        if pid == 0:
            control.close()
            theirs.close()
            _run_sandbox(ours, work, setup)
        socket.send_fds(control, [STATUS.pack(pid)], [theirs.fileno()])


def _run_sandbox(sock: socket.socket, work: SandboxWork, setup: SandboxSetup) -> None:
    """Answer jobs until the peer hangs up, a limit ends this process, or no job arrives in time. Never returns."""
    limits = setup.limits
    die_with_parent()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # native libraries print a message for each hostile input
    _limit(resource.RLIMIT_DATA, _data_bytes() + limits.memory_bytes)
    _limit(resource.RLIMIT_FSIZE, 0)
    try:
        while True:
            if not select.select([sock], [], [], setup.idle_s)[0]:
                os._exit(0)
            job = receive(sock)
            _set_timers(limits.cpu_s, limits.wall_s)
            answer = _answer(work, job)
            _set_timers(0.0, 0.0)
            sock.sendall(frame(answer))
    except MemoryError:
        os.abort()
    finally:
        os._exit(1)


def _answer(work: SandboxWork, job: bytes) -> bytes:
    """Return the answer of a job, or the reason of its failure. Other errors end the process."""
    try:
        return DONE + work.run(job)
    except MemoryError:
        os.abort()
    except RecursionError:
        return FAILED + b"it is nested too deeply; nest it less"
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, OSError) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return FAILED + text.encode(errors="replace")


def _set_timers(cpu_s: float, wall_s: float) -> None:
    """End this process by a signal after these times, even inside of native code. 0 clears the timers."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _limit(kind: int, amount: int) -> None:
    _, hard = resource.getrlimit(kind)
    soft = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(kind, (soft, hard))


def _data_bytes() -> int:
    """Return the private writable memory of this process, which `RLIMIT_DATA` counts."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
