"""How ranks on GPUs talk: torch.distributed's NCCL, over what connects the devices of one host."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store

from baton.compute.ranks.group_ranks import ANSWER_S, Group, GroupRanks
from baton.compute.ranks.place import RankPlace
from baton.core.errors import ModelError


def nccl_ranks(place: RankPlace, store: Store, device: torch.device) -> GroupRanks:
    """Meet the others, each on a device of its own, which is this process's current one from now on.

    Raises ModelError where this PyTorch was built without NCCL.
    """
    try:
        from torch.distributed import ProcessGroupNCCL
    except ImportError as error:
        raise ModelError(
            f"ranks on GPUs talk over NCCL, which torch {torch.__version__} was built without;"
            " install a build with CUDA, or use --device cpu"
        ) from error

    torch.cuda.set_device(device)

    def group(name: str, rank: int, size: int) -> Group:
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=ANSWER_S)
        return ProcessGroupNCCL(PrefixStore(name, store), rank, size, options)

    stage = group(f"stage-{place.stage}", place.column, place.tensor)
    return GroupRanks(place, stage, group(f"column-{place.column}", place.stage, place.pipeline))
