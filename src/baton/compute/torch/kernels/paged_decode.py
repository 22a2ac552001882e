"""Attention of decode steps (one token per request) from tensors of fixed size, so that a CUDA graph can replay it.

The keys of a request are split at absolute positions, every SPLIT_TOKENS, and merged in order. So a token's result
does not depend on the other requests of the batch. Source: Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from baton.compute.decode_sizes import SPLIT_TOKENS
from baton.compute.torch.kernels.attention_backend import AttentionPlan
from baton.compute.torch.kernels.paged_kv import PagedKV, Row


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """The places of the requests' keys. Entries after a request's last block may be any valid block."""

    blocks: Tensor  # [tokens, blocks] int32
    lengths: Tensor  # [tokens] int32, the new token included


class DecodeKernel(Protocol):
    """Plans the attention of decode steps."""

    def plan(self, tables: DecodeTables, kv: PagedKV) -> AttentionPlan:
        """Prepare a step. The plan reads the tables only when it runs, so a graph may refill them between runs."""
        ...


def decode_tables(rows: Sequence[Row], device: torch.device) -> DecodeTables:
    """Return the tables of rows with one token each."""
    assert all(row.count == 1 for row in rows), f"{[row.count for row in rows]} tokens, and not one each"
    blocks = pad_sequence([row.blocks for row in rows], batch_first=True).to(device=device, dtype=torch.int32)
    return DecodeTables(blocks, torch.tensor([row.total for row in rows], dtype=torch.int32, device=device))


class TorchDecodeKernel:
    """Implements `DecodeKernel` on any device, with the same splits. Slow: the reference of the Triton kernel."""

    def plan(self, tables: DecodeTables, kv: PagedKV) -> TorchDecodePlan:
        return TorchDecodePlan(tables, kv)


@dataclass(frozen=True, slots=True)
class TorchDecodePlan:
    """Implements `AttentionPlan` for a decode step of `TorchDecodeKernel`."""

    tables: DecodeTables
    kv: PagedKV

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        layout, lengths = self.kv.layout, self.tables.lengths[:, None]
        planes = self.kv.data[self.tables.blocks.long(), layer]  # [tokens, blocks, planes, block_tokens, kv_heads, dim]
        stored = planes.transpose(1, 2).flatten(2, 3)  # [tokens, planes, keys, kv_heads, head_dim]
        position = torch.arange(stored.shape[2], device=stored.device)
        seen = position < lengths  # [tokens, keys]
        if window is not None:
            seen = seen & (position >= lengths - window)
        stored = stored.masked_fill(~seen[:, None, :, None, None], 0.0).float()
        grouped = queries.unflatten(1, (layout.kv_heads, -1)).float()  # [tokens, kv_heads, group, head_dim]
        keys, values = stored[:, 0].movedim(1, 2), stored[:, -1].movedim(1, 2)  # [tokens, kv_heads, keys, head_dim]
        scores = grouped @ keys.transpose(2, 3) * layout.head_dim**-0.5
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))  # [tokens, kv_heads, group, keys]
        return _merged(scores, values).to(queries.dtype).flatten(1)


def _merged(scores: Tensor, values: Tensor) -> Tensor:
    """Return the weighted sum of values, one split after the other: [tokens, kv_heads, group, head_dim]."""
    peak = scores.amax(-1, keepdim=True)
    total = torch.zeros_like(peak)
    out = values.new_zeros(*scores.shape[:-1], values.shape[-1])
    for first in range(0, scores.shape[-1], SPLIT_TOKENS):
        weights = (scores[..., first : first + SPLIT_TOKENS] - peak).exp()
        total = total + weights.sum(-1, keepdim=True)
        out = out + weights @ values[:, :, first : first + SPLIT_TOKENS]
    return out / total
