"""`python -m baton.serve.worker.rank FD`: one rank of a parallel worker, started by the worker's first rank.

It computes its part of every step. Between two steps it blocks until the first rank sends the next one.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator

import msgspec

from baton.compute.ranks.commands import RankCommand
from baton.compute.ranks.load_rank import RankArena, load_rank
from baton.compute.ranks.place import rank_place
from baton.compute.ranks.process_groups import connect_ranks, join_rendezvous
from baton.compute.ranks.runner import FollowerRank
from baton.move.ipc.child import die_with_parent
from baton.move.ipc.frames import FrameReader, frame
from baton.serve.worker.rank_wire import RankReady, RankSetup, open_rank_arena, rank_cores

_RECEIVE_BYTES = 256 * 1024


def run_rank(descriptor: int) -> None:
    """Serve on an inherited Unix socket until the first rank hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; only the server ends this process
    die_with_parent()
    sock = socket.socket(fileno=descriptor)
    data, descriptors, _flags, _address = socket.recv_fds(sock, _RECEIVE_BYTES, 1)
    frames = _frames(sock, data)
    told = msgspec.msgpack.decode(next(frames), type=RankSetup)
    setup = told.setup
    threads, cores = rank_cores(setup, told.rank)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    memory = open_rank_arena(setup, descriptors[0], told.rank).memory
    place = rank_place(setup.layout, told.rank, experts=setup.parallel.experts)
    arena = RankArena.of(memory, setup.layout, place)
    ranks = connect_ranks(place, join_rendezvous(told.port), arena.device)
    parts = load_rank(setup.card, setup.layout, arena, ranks, dtype=setup.precision.dtype, threads=threads)
    follower, decoder = FollowerRank(parts), msgspec.msgpack.Decoder(RankCommand)
    sock.sendall(frame(msgspec.msgpack.encode(RankReady(told.rank))))
    for payload in frames:
        follower.execute(decoder.decode(payload))


def _frames(sock: socket.socket, data: bytes) -> Iterator[bytes]:
    """Yield the messages in `data`, which was received before, then those of the socket until the peer hangs up."""
    reader = FrameReader()
    while data:
        yield from reader.feed(data)
        data = sock.recv(_RECEIVE_BYTES)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]))
    sys.exit(0)
