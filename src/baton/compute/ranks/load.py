"""Load one rank's part of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype
from baton.compute.models.weights import open_model
from baton.compute.ranks.orders import Orders
from baton.compute.ranks.place import rank_config, rank_layout, rank_refusals, rank_shard
from baton.compute.ranks.runner import LeadRunner, RankParts
from baton.compute.ranks.weights import RankWeights
from baton.compute.torch.engine import TorchEngine
from baton.compute.torch.kernels.paged import TORCH_DTYPES, BlockPart, PagedKV
from baton.compute.torch.kernels.torch_sdpa import SdpaBackend
from baton.compute.torch.layers.decoder import Decoder
from baton.compute.torch.layers.loader import Loader
from baton.compute.torch.layers.ranks import Ranks
from baton.compute.torch.load import check_layout, on_device, triton_attention
from baton.core.errors import ModelError
from baton.decide.kv.layout import KVLayout
from baton.move.arena.cuda import DeviceArray

CPU = torch.device("cpu")


def load_lead(parts: RankParts, layout: KVLayout, orders: Orders) -> TorchEngine:
    """Make the engine of the first rank, which is that of the whole worker."""
    return TorchEngine(parts.model, parts.kv, LeadRunner(parts, orders), parts.device, layout)


@dataclass(frozen=True, slots=True)
class RankArena:
    """Where a rank's KV lies, and so where it computes."""

    memory: memoryview | DeviceArray
    part: BlockPart

    @property
    def device(self) -> torch.device:
        """The rank's own GPU, or the CPU."""
        return torch.device(self.memory.device) if isinstance(self.memory, DeviceArray) else CPU

    @classmethod
    def of(cls, memory: memoryview | DeviceArray, layout: KVLayout, rank: int) -> RankArena:
        """Ranks on the CPU share the worker's arena; on GPUs each has one of its own, with its part of every block."""
        if isinstance(memory, DeviceArray):
            return cls.alone(memory, layout, rank)
        return cls(memory, BlockPart(layout.shards[rank].offset_bytes, layout.block_bytes))

    @classmethod
    def alone(cls, memory: memoryview | DeviceArray, layout: KVLayout, rank: int) -> RankArena:
        """Return an arena of this rank only."""
        return cls(memory, BlockPart(0, layout.shards[rank].size_bytes))


def load_rank(
    card: ModelCard,
    layout: KVLayout,
    arena: RankArena,
    ranks: Ranks,
    *,
    dtype: Dtype,
    threads: int,
) -> RankParts:
    """Read this rank's part of the weights and bind it to its part of the arena's blocks.

    layout: the worker's, not the rank's. threads: CPU threads of this rank.
    Raises ModelError where the model cannot be computed by so many ranks.
    """
    check_layout(card, layout)
    refusals = rank_refusals(card, layout)
    if refusals:
        raise ModelError(f"{card.name} cannot be computed by {layout.ranks} ranks: {'; '.join(refusals)}")
    device = arena.device
    memory = on_device(arena.memory, device)
    (config, whole), place = open_model(card), ranks.place
    torch.set_num_threads(threads)
    weights = RankWeights(whole, config, place, rank_shard(layout, place))
    mine, loader = rank_config(config, layout, place), Loader(weights, TORCH_DTYPES[dtype], device)
    backend = SdpaBackend() if device.type == "cpu" else triton_attention(mine, loader)[0]
    with torch.inference_mode():
        model = Decoder(mine, loader, ranks)
    kv = PagedKV(memory, rank_layout(layout, place), arena.part)
    return RankParts(model, kv, backend, ranks, loader.dtype, device)
