"""Slow kernels that follow the formulas: the references of the kernels that serve."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.compute.decode_sizes import SPLIT_TOKENS
from baton.compute.torch.kernels.layer_ops import HeadNorms, NewTokens, TorchOps
from baton.compute.torch.kernels.paged_decode import DecodeTables
from baton.compute.torch.kernels.paged_kv import PagedKV


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
        planes = self.kv.numbers(
            self.kv.data[self.tables.blocks.long(), layer], torch.float32
        )  # [tokens, blocks, planes, block_tokens, kv_heads, dim]
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
    return torch.where(total.isnan(), 0.0, out / total)  # a request without keys gets zeros


class PaddedOps(TorchOps):
    """Implements `LayerOps` on any device, with padding. Slow: the reference of the Triton kernels."""

    def rotate_and_write(self, qkv: Tensor, layer: int, new: NewTokens, norms: HeadNorms | None) -> Tensor:
        return TorchOps.rotate_and_write(self, qkv, layer, replace(new, kv=_PaddedKV(new.kv)), norms)

    def write_latents(self, latents: Tensor, layer: int, new: NewTokens) -> None:
        _PaddedKV(new.kv).write_latents(layer, new.slots, latents)


class _PaddedKV:
    """Writes to an arena for tokens of slots from 0 on. All shapes are fixed, so that a graph can record it."""

    def __init__(self, kv: PagedKV) -> None:
        self.layout = kv.layout
        self._kv = kv

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        for plane, rows in enumerate((keys, values)):
            self._write(self._kv.first_row(layer, plane), slots, self._kv.cells(rows).flatten(1))

    def write_latents(self, layer: int, slots: Tensor, latents: Tensor) -> None:
        self._write(self._kv.first_row(layer), slots, self._kv.cells(latents))

    def _write(self, first_row: int, slots: Tensor, rows: Tensor) -> None:
        """Padding repeats the write of the first real token. Without one, it writes what is already there."""
        real = slots >= 0
        source = torch.where(real, torch.arange(len(slots)), real.int().argmax())
        places = slots[source].clamp(min=0) + first_row
        stored = self._kv.token_rows[places]
        self._kv.token_rows.index_copy_(0, places, torch.where(real.any(), rows[source], stored))


class TorchRowProduct:
    """Gathers the weights of every product. Slow: the reference of the Triton kernel."""

    def __call__(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        repeated = rows.repeat_interleave(len(experts) // len(rows), 0)
        return (weights[experts].float() @ repeated.float()[..., None])[..., 0].to(rows.dtype)
