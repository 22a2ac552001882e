"""Load one rank's part of a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from baton.compute.models.card import ModelCard
from baton.compute.models.dtype import Dtype
from baton.compute.models.model_config import ModelConfig
from baton.compute.models.open_model import open_model
from baton.compute.models.quantized import QuantizedMatrix
from baton.compute.models.weights import TensorSlice, WeightReader
from baton.compute.ranks.commands import RankCommandChannel
from baton.compute.ranks.context_attention import ContextBackend
from baton.compute.ranks.place import RankPlace, rank_config, rank_layout, rank_problems, rank_shard
from baton.compute.ranks.runner import LeaderRunner, RankModel
from baton.compute.torch.engine import TorchEngine
from baton.compute.torch.kernels.paged_kv import TORCH_DTYPES, BlockPart, PagedKV
from baton.compute.torch.kernels.torch_sdpa import SdpaBackend
from baton.compute.torch.layers.collectives import Collectives
from baton.compute.torch.layers.decoder import Decoder
from baton.compute.torch.layers.tensor_loader import TensorLoader
from baton.compute.torch.load_torch import check_layout, on_device, triton_kernels
from baton.core.errors import ModelError
from baton.decide.kv.layout import KVLayout, Shard
from baton.move.arena.cuda import DeviceArray

LAYERS = "model.layers."
WIDTHS_OUT = ("gate_proj", "up_proj", "w1", "w3")
"""Modules whose outputs are divided among ranks."""
WIDTHS_IN = ("down_proj", "w2")
"""Modules whose inputs are divided among ranks."""


@dataclass(frozen=True, slots=True)
class RankWeights:
    """Implements `WeightReader`. Reads only the rank's part of each tensor."""

    whole: WeightReader
    config: ModelConfig
    """The configuration of the whole model."""
    place: RankPlace
    shard: Shard

    def read(self, name: str, part: TensorSlice | None = None) -> np.ndarray:
        """Return the rank's part of a tensor. `name` counts the layers of the stage from 0."""
        assert part is None, f"{name} is already a part"
        prefix, _, rest = name.removeprefix(LAYERS).partition(".")
        if not name.startswith(LAYERS):
            return self._read_outer(name)
        name = f"{LAYERS}{int(prefix) + self.shard.layers.start}.{rest}"
        module, kind = name.split(".")[-2:]
        if module in ("o_proj", *WIDTHS_IN) and kind == "bias":
            bias = self.whole.read(name)  # the ranks' results are summed, so only one rank adds it
            return bias if self.place.column == 0 or self.place.data else np.zeros_like(bias)
        return self.whole.read(name, self._slice(name, module))

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        """Return None: ranks compute with dense weights."""
        return None

    def _read_outer(self, name: str) -> np.ndarray:
        """Read the final norm, or the rank's rows of the embedding or output projection, padded with zeros."""
        if name == "model.norm.weight":
            return self.whole.read(name)
        part, tokens = self.place.vocab(self.config.vocab_tokens), self.config.vocab_tokens
        rows = self.whole.read(name, TensorSlice(0, part))
        missing = -(-tokens // self.place.tensor) - len(part)
        return np.pad(rows, ((0, missing), (0, 0))) if missing else rows

    def _slice(self, name: str, module: str) -> TensorSlice | None:
        """Return the rank's part of a tensor of a layer. None: the whole tensor."""
        config, latent = self.config, self.config.latent
        queries = self.place.part(config.heads)
        match module:
            case "q_proj" | "q_b_proj":
                return TensorSlice(
                    0, _rows_of(queries, config.head_dim if latent is None else latent.nope_dim + latent.rope_dim)
                )
            case "kv_b_proj":
                assert latent is not None, f"{name} belongs to latent attention"
                return TensorSlice(0, _rows_of(queries, latent.nope_dim + latent.value_dim))
            case "k_proj" | "v_proj":
                return TensorSlice(0, _rows_of(self.shard.heads, config.head_dim))
            case "o_proj":
                return TensorSlice(1, _rows_of(queries, config.value_dim))
            case _ if self._is_whole(name):
                return None
            case _ if module in WIDTHS_OUT:
                return TensorSlice(0, self.place.part(self._width(name)))
            case _ if module in WIDTHS_IN:
                return TensorSlice(1, self.place.part(self._width(name)))
            case _:
                return None

    def _is_whole(self, name: str) -> bool:
        """Return whether a tensor belongs to an expert that this rank computes without the other ranks."""
        experts = self.config.experts
        if experts is None:
            return False
        shared = ".shared_expert" in name and self.place.sends_tokens(experts)
        return shared or (".experts." in name and self.place.experts)

    def _width(self, name: str) -> int:
        experts = self.config.experts
        if experts is not None and ".experts." in name:
            return experts.intermediate
        if experts is not None and ".shared_expert" in name:
            return experts.shared_intermediate
        return self.config.intermediate


def _rows_of(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


CPU = torch.device("cpu")


def leader_engine(
    own: RankModel, layout: KVLayout, channel: RankCommandChannel, overlap_tokens_min: int = 0
) -> TorchEngine:
    """Return the engine of the whole worker, which runs on its first rank and commands the others.

    overlap_tokens_min: see `ParallelConfig`.
    """
    runner = LeaderRunner(own, channel, overlap_tokens_min)
    return TorchEngine(own.model, own.kv, runner, own.device, layout=layout)


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
    def of(cls, memory: memoryview | DeviceArray, layout: KVLayout, place: RankPlace) -> RankArena:
        """Return the arena of a rank: on a CPU the worker's, shared by all ranks; on a GPU one of its own."""
        if isinstance(memory, DeviceArray):
            return cls.alone(memory, layout, place)
        shard = rank_shard(layout, place)
        return cls(memory, BlockPart(shard.offset_bytes, layout.block_bytes, shard.tokens, layout.block_tokens))

    @classmethod
    def alone(cls, memory: memoryview | DeviceArray, layout: KVLayout, place: RankPlace) -> RankArena:
        """Return an arena that holds this rank's part of every block, and no other part."""
        shard = rank_shard(layout, place)
        return cls(memory, BlockPart(0, shard.size_bytes, shard.tokens, layout.block_tokens))


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
        kernels = triton_kernels(part, number)
        backend, loader = kernels.backend, TensorLoader(weights, number, device, kernels.row_product, kernels.ops)
    if place.context > 1:
        backend = ContextBackend(collectives, backend)
    with torch.inference_mode():
        model = Decoder(part, loader, collectives)
    kv = PagedKV(memory, rank_layout(layout, place), arena.part)
    return RankModel(model, kv, backend, collectives, number, device)
