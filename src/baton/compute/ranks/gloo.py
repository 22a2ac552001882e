"""How ranks on the CPUs of one host talk: torch.distributed's gloo, over loopback."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from baton.compute.ranks.group_ranks import ANSWER_S, GroupRanks
from baton.compute.ranks.place import RankPlace

ADDRESS = "127.0.0.1"


def gloo_ranks(place: RankPlace, store: Store) -> GroupRanks:
    """Meet the others. Called on every rank at the same time: each waits. No host's name is looked up."""
    device = ProcessGroupGloo.create_device(hostname=ADDRESS)  # a thread, which both groups share
    stage = _group(PrefixStore(f"stage-{place.stage}", store), device, place.column, place.tensor)
    column = _group(PrefixStore(f"column-{place.column}", store), device, place.stage, place.pipeline)
    return GroupRanks(place, stage, column)


def _group(store: Store, device: ProcessGroupGloo.Device, rank: int, size: int) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()
    options._devices = [device]
    options._timeout = timedelta(seconds=ANSWER_S)
    return ProcessGroupGloo(store, rank, size, options)
