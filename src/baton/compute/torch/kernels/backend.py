"""The port for attention over paged KV: plan once per step, run once per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from baton.compute.torch.kernels.paged import PagedKV, Row


class AttentionPlan(Protocol):
    """Everything about one step that is the same in all layers."""

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        """Attend to the keys and values of a layer, those of this step already written.

        queries: [tokens, heads, head_dim], in the order of the step's rows. Query head h reads KV head
        h // (heads / kv_heads). A token at position p sees positions <= p, and > p - window where there is one.
        Returns [tokens, heads * head_dim], in the queries' type.
        """
        ...


class AttentionBackend(Protocol):
    def plan(self, rows: Sequence[Row], kv: PagedKV) -> AttentionPlan: ...
