"""The port for attention over paged KV: plan once per step, run once per layer."""

from __future__ import annotations

from collections.abc import Sequence
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


def visible(start: int, end: int, key_start: int, key_end: int, window: int | None) -> Tensor:
    """Return which keys [key_start, key_end) each query [start, end) sees: [queries, keys], bool."""
    queries = torch.arange(start, end)[:, None]
    keys = torch.arange(key_start, key_end)[None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)
