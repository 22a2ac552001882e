"""Load one rank's part of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype
from baton.compute.models.open_model import open_model
from baton.compute.ranks.commands import RankCommandChannel
from baton.compute.ranks.place import rank_config, rank_layout, rank_problems, rank_shard
from baton.compute.ranks.runner import LeaderRunner, RankModel
from baton.compute.ranks.weights import RankWeights
from baton.compute.torch.engine import TorchEngine
from baton.compute.torch.kernels.paged_kv import TORCH_DTYPES, BlockPart, PagedKV
from baton.compute.torch.kernels.torch_sdpa import SdpaBackend
from baton.compute.torch.layers.collectives import Collectives
from baton.compute.torch.layers.decoder import Decoder
from baton.compute.torch.layers.tensor_loader import TensorLoader
from baton.compute.torch.load_torch import check_layout, on_device, triton_kernels
from baton.core.errors import ModelError
from baton.decide.kv.layout import KVLayout
from baton.move.arena.cuda import DeviceArray

CPU = torch.device("cpu")


def leader_engine(own: RankModel, layout: KVLayout, channel: RankCommandChannel) -> TorchEngine:
    """Return the engine of the whole worker, which runs on its first rank and commands the others."""
    return TorchEngine(own.model, own.kv, LeaderRunner(own, channel), own.device, layout=layout)


@dataclass(frozen=True, slots=True)
class RankArena:
    """The memory that holds a rank's KV, and where the rank's part of a block lies in it."""

    memory: memoryview | DeviceArray
    part: BlockPart

    @property
    def device(self) -> torch.device:
        """The rank's own GPU, or the CPU."""
        return torch.device(self.memory.device) if isinstance(self.memory, DeviceArray) else CPU

    @classmethod
    def of(cls, memory: memoryview | DeviceArray, layout: KVLayout, rank: int) -> RankArena:
        """Return the arena of a rank: on a CPU the worker's, shared by all ranks; on a GPU one of its own."""
        if isinstance(memory, DeviceArray):
            return cls.alone(memory, layout, rank)
        return cls(memory, BlockPart(layout.shards[rank].offset_bytes, layout.block_bytes))

    @classmethod
    def alone(cls, memory: memoryview | DeviceArray, layout: KVLayout, rank: int) -> RankArena:
        """Return an arena that holds this rank's part of every block, and no other part."""
        return cls(memory, BlockPart(0, layout.shards[rank].size_bytes))


def load_rank(
    card: ModelCard,
    layout: KVLayout,
    arena: RankArena,
    collectives: Collectives,
    *,
    dtype: Dtype,
    threads: int,
) -> RankModel:
    """Load this rank's part of the weights and bind it to its part of the arena's blocks.

    layout: of the worker, not of the rank. threads: CPU threads of this rank.
    Raises ModelError if the worker's number of ranks cannot compute the model.
    """
    check_layout(card, layout)
    problems = rank_problems(card, layout)
    if problems:
        raise ModelError(f"{card.name} cannot be computed by {layout.ranks} ranks: {'; '.join(problems)}")
    device, place, number = arena.device, collectives.place, TORCH_DTYPES[dtype]
    memory = on_device(arena.memory, device)
    config, whole = open_model(card)
    torch.set_num_threads(threads)
    weights = RankWeights(whole, config, place, rank_shard(layout, place))
    part = rank_config(config, layout, place)
    if device.type == "cpu":
        backend, loader = SdpaBackend(), TensorLoader(weights, number, device)
    else:
        backend, _, row_product = triton_kernels(part, number)
        loader = TensorLoader(weights, number, device, row_product)
    with torch.inference_mode():
        model = Decoder(part, loader, collectives)
    kv = PagedKV(memory, rank_layout(layout, place), arena.part)
    return RankModel(model, kv, backend, collectives, number, device)
