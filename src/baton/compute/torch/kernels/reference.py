"""The formula of attention, without any optimization: the reference of the other backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.compute.torch.kernels.attention_backend import visible
from baton.compute.torch.kernels.paged_kv import PagedKV, Row


class ReferenceBackend:
    """Computes the formula of attention directly, one request and one head at a time, in float32."""

    def plan(self, rows: Sequence[Row], kv: PagedKV) -> ReferencePlan:
        return ReferencePlan(rows, kv)


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """Implements `AttentionPlan` for a step of `ReferenceBackend`."""

    rows: Sequence[Row]
    kv: PagedKV

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        out = torch.empty_like(queries)
        group = queries.shape[1] // self.kv.layout.kv_heads
        for row in self.rows:
            numbers = self.kv.numbers(self.kv.data[row.blocks, layer], torch.float32)
            planes = numbers.unbind(1)  # [blocks, block_tokens, kv_heads, head_dim] each
            keys, values = planes[0], planes[-1]  # the same plane if the cache holds latent vectors
            tokens = slice(row.first, row.first + row.count)
            for head in range(queries.shape[1]):
                k = keys.flatten(0, 1)[: row.total, head // group]  # [total, head_dim]
                v = values.flatten(0, 1)[: row.total, head // group]
                scores = queries[tokens, head].float() @ k.T / k.shape[1] ** 0.5  # [count, total]
                hidden = ~visible(range(row.start, row.total), range(row.total), window, scores.device)
                weights = scores.masked_fill(hidden, float("-inf"))
                out[tokens, head] = (weights.softmax(-1) @ v).to(out.dtype)
        return out.flatten(1)
