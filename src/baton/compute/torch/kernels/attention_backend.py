"""The port for attention over paged KV (plan once per step, run once per layer), and its reference implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton.compute.torch.kernels.paged_kv import PagedKV, Row


class AttentionPlan(Protocol):
    """The preparation of one step, which all layers share."""

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        """Return the attention of a step's queries to the keys and values of a layer, which include this step's.

        queries: [tokens, heads, head_dim], in the order of the step's rows. Query head h reads KV head
        h // (heads / kv_heads). A token at position p sees positions <= p, and > p - window where there is one.
        Returns [tokens, heads * head_dim], in the queries' type.
        """
        ...


class AttentionBackend(Protocol):
    """Plans the attention of steps."""

    def plan(self, rows: Sequence[Row], kv: PagedKV) -> AttentionPlan: ...


class ReferenceBackend:
    """Computes the formula of attention directly, one request and one head at a time, in float32. For tests."""

    def plan(self, rows: Sequence[Row], kv: PagedKV) -> ReferencePlan:
        return ReferencePlan(rows, kv)


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    rows: Sequence[Row]
    kv: PagedKV

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        out = torch.empty_like(queries)
        group = queries.shape[1] // self.kv.layout.kv_heads
        for row in self.rows:
            planes = self.kv.data[row.blocks, layer].unbind(1)  # [blocks, block_tokens, kv_heads, head_dim] each
            keys, values = planes[0], planes[-1]  # the same plane if the cache holds latent vectors
            tokens = slice(row.first, row.first + row.count)
            for head in range(queries.shape[1]):
                k = keys.flatten(0, 1)[: row.total, head // group].float()  # [total, head_dim]
                v = values.flatten(0, 1)[: row.total, head // group].float()
                scores = queries[tokens, head].float() @ k.T / k.shape[1] ** 0.5  # [count, total]
                hidden = ~visible(row.start, row.total, 0, row.total, window).to(scores.device)
                weights = scores.masked_fill(hidden, float("-inf"))
                out[tokens, head] = (weights.softmax(-1) @ v).to(out.dtype)
        return out.flatten(1)


def visible(start: int, end: int, key_start: int, key_end: int, window: int | None) -> Tensor:
    """Return which keys [key_start, key_end) each query [start, end) sees: [queries, keys], bool."""
    queries = torch.arange(start, end)[:, None]
    keys = torch.arange(key_start, key_end)[None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)
