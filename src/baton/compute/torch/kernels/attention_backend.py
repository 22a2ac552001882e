"""The port for attention over paged KV: plan once per step, run once per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from baton.compute.torch.kernels.paged_kv import PagedKV, Row

NO_WINDOW = 1 << 30
"""The window that kernels take for a layer whose queries see all keys."""


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


def visible(queries: range, keys: range, window: int | None, device: torch.device | None = None) -> Tensor:
    """Return which keys each query sees, by their positions: [queries, keys], bool. device: None is the CPU."""
    queries = torch.arange(queries.start, queries.stop, device=device)[:, None]
    keys = torch.arange(keys.start, keys.stop, device=device)[None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)
