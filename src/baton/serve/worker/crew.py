"""Start and watch the rank processes of a parallel worker, and send them orders. The first rank runs this code.

To the server, the worker is one process. If a rank dies, the first rank exits and the kernel kills the others, so the
server sees the death of one worker and no rank is left.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass

import msgspec

from baton.compute.ranks.commands import RankCommand
from baton.core.errors import WorkerError
from baton.move.ipc.frames import FrameReader, frame
from baton.serve.messages.setup import WorkerSetup
from baton.serve.worker.rank_wire import RankReady, RankSetup, rank_cores

log = logging.getLogger("baton.worker")
_RECEIVE_BYTES = 4096
_RANK_LOST = 3
"""Exit code of a worker that ends because one of its ranks has died."""


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    sock: socket.socket


class RankCrew:
    """Implements `RankProcesses`. The constructor starts the processes, because their imports take long."""

    def __init__(self, setup: WorkerSetup, arena_fd: int) -> None:
        self._setup = setup
        self._arena_fd = arena_fd
        self._encoder = msgspec.msgpack.Encoder()
        self._closing = False
        self._ranks = [_start(rank, setup) for rank in range(1, setup.layout.ranks)]
        for rank in self._ranks:
            threading.Thread(target=self._watch, args=(rank,), name=f"rank-{rank.number}", daemon=True).start()

    def begin(self, port: int) -> None:
        for rank in self._ranks:
            setup = RankSetup(setup=self._setup, rank=rank.number, port=port)
            socket.send_fds(rank.sock, [frame(self._encoder.encode(setup))], [self._arena_fd])

    def wait_ready(self) -> None:
        """Wait until all ranks have loaded their part of the model. Raises WorkerError if a rank ended instead."""
        for rank in self._ranks:
            reader, messages = FrameReader(), list[bytes]()
            while not messages:
                data = rank.sock.recv(_RECEIVE_BYTES)
                if not data:
                    raise WorkerError(f"rank {rank.number} ended before it had loaded; its output says why")
                messages += reader.feed(data)
            msgspec.msgpack.decode(messages[0], type=RankReady)

    def send(self, command: RankCommand) -> None:
        data = frame(self._encoder.encode(command))
        for rank in self._ranks:
            rank.sock.sendall(data)

    def close(self) -> None:
        """Kill all ranks. They have no state to save."""
        self._closing = True
        for rank in self._ranks:
            rank.process.kill()
            rank.process.wait()

    def _watch(self, rank: _Rank) -> None:
        """Wait for the end of a rank's process, then end this process too, even in the middle of a step."""
        code = rank.process.wait()
        if not self._closing:
            ended = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            log.error("rank %d (pid %d) %s, and the worker with it", rank.number, rank.process.pid, ended)
            os._exit(_RANK_LOST)  # the main thread may wait for that rank forever


def _start(rank: int, setup: WorkerSetup) -> _Rank:
    """Start a rank's process. It inherits this worker's output, which the host reads."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "baton.serve.worker.rank", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": str(rank_cores(setup, rank)[0])},
        )
    return _Rank(rank, process, ours)
