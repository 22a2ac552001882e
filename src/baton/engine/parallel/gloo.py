"""Ranks that talk over loopback: torch.distributed's gloo, between processes of one host.

The groups are made here and held by nobody else: no process-wide state, and no lookup of the host's name.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import (
    GatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from baton.engine.parallel.place import RankPlace

ADDRESS = "127.0.0.1"
ANSWER_S = 300.0
"""Longest wait for another rank. The server kills a worker that is silent for `survival.silent_s`, which is sooner as
it is set by default; this bounds the rest."""


def host_meeting() -> TCPStore:
    """Open the place where ranks find each other, on a free port: `port` says which. The first rank keeps it.

    The socket is ours: one of the store's own would listen at every address of the host, without a password.
    """
    with socket.create_server((ADDRESS, 0)) as listening:
        port, descriptor = listening.getsockname()[1], listening.detach()  # the store closes it
    wait = timedelta(seconds=ANSWER_S)
    return TCPStore(ADDRESS, port, None, True, wait, wait_for_workers=False, master_listen_fd=descriptor)


def join_meeting(port: int) -> TCPStore:
    return TCPStore(ADDRESS, port, None, False, timedelta(seconds=ANSWER_S))


class GlooRanks:
    """Implements `Ranks`. Made on every rank at the same time: each waits for the others."""

    def __init__(self, place: RankPlace, store: Store) -> None:
        self.place = place
        device = ProcessGroupGloo.create_device(hostname=ADDRESS)  # a thread, which both groups share
        self._stage = _group(PrefixStore(f"stage-{place.stage}", store), device, place.column, place.tensor)
        self._stages = _group(PrefixStore(f"column-{place.column}", store), device, place.stage, place.pipeline)

    def summed(self, partial: Tensor) -> Tensor:
        """See `Ranks`."""
        if self.place.tensor > 1:
            partial = partial.contiguous()
            self._stage.allreduce(partial).wait()
        return partial

    def joined(self, columns: Tensor) -> Tensor | None:
        """See `Ranks`."""
        options = GatherOptions()
        options.rootRank = 0
        first = self.place.column == 0
        parts = [torch.empty_like(columns) for _ in range(self.place.tensor)] if first else []
        self._stage.gather([parts] if first else [], [columns.contiguous()], options).wait()
        return torch.cat(parts, 1) if first else None

    def pass_on(self, hidden: Tensor) -> None:
        """See `Ranks`. Waits until it is sent, which does not take the other's receiving."""
        self._stages.send([hidden.contiguous()], (self.place.stage + 1) % self.place.pipeline, 0).wait()

    def receive(self, hidden: Tensor) -> None:
        """See `Ranks`."""
        self._stages.recv([hidden], (self.place.stage - 1) % self.place.pipeline, 0).wait()


def _group(store: Store, device: ProcessGroupGloo.Device, rank: int, size: int) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()
    options._devices = [device]
    options._timeout = timedelta(seconds=ANSWER_S)
    return ProcessGroupGloo(store, rank, size, options)
