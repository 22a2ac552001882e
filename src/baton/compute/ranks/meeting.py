"""Where the ranks of a worker find each other, and what they talk over then."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
from torch.distributed import Store, TCPStore

from baton.compute.ranks.gloo import ADDRESS, gloo_ranks
from baton.compute.ranks.group_ranks import ANSWER_S, GroupRanks
from baton.compute.ranks.nccl import nccl_ranks
from baton.compute.ranks.place import RankPlace


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


def meet(place: RankPlace, store: Store, device: torch.device) -> GroupRanks:
    """Connect a rank that computes on this device with the others: over gloo on CPUs, over NCCL on GPUs.

    Called on every rank at the same time: each waits for the others. Raises ModelError where this PyTorch cannot.
    """
    return gloo_ranks(place, store) if device.type == "cpu" else nccl_ranks(place, store, device)
