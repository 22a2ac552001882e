"""Load one rank's part of a model."""

from __future__ import annotations

import torch

from baton.core.errors import ModelError
from baton.engine.card import ModelCard
from baton.engine.dtype import Dtype
from baton.engine.kernels.paged import TORCH_DTYPES, BlockPart, PagedKV
from baton.engine.kernels.torch_sdpa import SdpaBackend
from baton.engine.load_torch import check_layout
from baton.engine.models.decoder import Decoder
from baton.engine.models.loader import Loader
from baton.engine.models.ranks import Ranks
from baton.engine.parallel.orders import Orders
from baton.engine.parallel.place import rank_config, rank_layout, rank_refusals, rank_shard
from baton.engine.parallel.runner import LeadRunner, RankParts
from baton.engine.parallel.weights import RankWeights
from baton.engine.resolve import read_config
from baton.engine.torch_engine import TorchEngine
from baton.engine.weights import open_weights
from baton.kv.layout import KVLayout

CPU = torch.device("cpu")


def load_lead(parts: RankParts, layout: KVLayout, orders: Orders) -> TorchEngine:
    """Make the engine of the first rank, which is that of the whole worker."""
    return TorchEngine(parts.model, parts.kv, LeadRunner(parts, orders), CPU, layout)


def load_rank(
    card: ModelCard, layout: KVLayout, memory: memoryview, ranks: Ranks, *, dtype: Dtype, threads: int
) -> RankParts:
    """Read this rank's part of the weights and bind it to its part of the arena's blocks.

    memory: the whole arena. layout: the worker's, not the rank's. threads: CPU threads of this rank.
    Raises ModelError where the model cannot be computed by so many ranks.
    """
    check_layout(card, layout)
    refusals = rank_refusals(card, layout, "cpu")
    if refusals:
        raise ModelError(f"{card.name} cannot be computed by {layout.ranks} ranks: {'; '.join(refusals)}")
    config, place = read_config(card), ranks.place
    torch.set_num_threads(threads)
    shard = rank_shard(layout, place)
    weights = RankWeights(open_weights(card, config), config, place, shard)
    number = TORCH_DTYPES[dtype]
    with torch.inference_mode():
        model = Decoder(rank_config(config, layout, place), Loader(weights, number, CPU), ranks)
    kv = PagedKV(memory, rank_layout(layout, place), BlockPart(shard.offset_bytes, layout.block_bytes))
    return RankParts(model, kv, SdpaBackend(), ranks, number)
