"""Load a torch engine: configuration, weights, kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.core.errors import ModelError
from baton.engine.card import ModelCard
from baton.engine.dtype import Dtype
from baton.engine.kernels.paged import TORCH_DTYPES, PagedKV
from baton.engine.kernels.torch_sdpa import SdpaBackend
from baton.engine.models.decoder import Decoder
from baton.engine.resolve import read_config
from baton.engine.torch_engine import TorchEngine
from baton.engine.weights import open_weights
from baton.kv.layout import KVLayout


def load_torch_engine(
    card: ModelCard, layout: KVLayout, memory: memoryview | Tensor, *, dtype: Dtype, threads: int, device: str
) -> TorchEngine:
    """See `load_engine`. An engine on a GPU needs an arena there: `memory` as a tensor of bytes on its device."""
    if layout != card.layout(block_tokens=layout.block_tokens, dtype=layout.dtype) or layout.dtype == "uint8":
        raise ModelError(
            f"the arena's layout ({layout.layers} layers, {layout.kv_heads} KV heads of {layout.head_dim}, "
            f"{layout.dtype}) does not hold {card.name} ({card.layers} layers, {card.kv_heads} KV heads of "
            f"{card.head_dim}); start both workers with the same model and --kv-dtype"
        )
    torch.set_num_threads(threads)
    target = torch.device(device)
    if target.type != "cpu" and not isinstance(memory, Tensor):
        raise ModelError(f"the arena lies in host memory, which an engine on {device} cannot use; set device to cpu")
    config = read_config(card)
    with torch.inference_mode():
        model = Decoder(config, open_weights(card, config), TORCH_DTYPES[dtype], target)
    return TorchEngine(model, PagedKV(memory, layout), SdpaBackend(), target)
