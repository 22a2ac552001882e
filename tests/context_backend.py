"""Ranks that share the tokens of each KV head, in one process, as an attention backend for the conformance suite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional

from baton.compute.ranks.context_attention import ContextBackend
from baton.compute.torch.kernels.paged_kv import BlockPart, PagedKV, Row
from baton.compute.torch.kernels.reference import ReferenceBackend
from baton.compute.torch.layers.collectives import SingleRank


class _Exchange(SingleRank):
    """Implements `Collectives` for a rank whose partners have computed before, or compute later."""

    def __init__(self) -> None:
        self.queries, self.sent = torch.empty(0), torch.empty(0)
        self.received: Tensor | None = None
        """None: the partners have not computed, and the result is of no use."""

    def gather_context(self, rows: Tensor) -> Tensor:
        return self.queries

    def exchange_context(self, parts: Tensor) -> Tensor:
        self.sent = parts
        return parts if self.received is None else self.received


class ContextRanksBackend:
    """Implements `AttentionBackend` with ranks that hold a part of the tokens of one KV head each."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def plan(self, rows: Sequence[Row], kv: PagedKV) -> ContextRanksPlan:
        return ContextRanksPlan(rows, kv, self.ranks)


class ContextRanksPlan:
    """Implements `AttentionPlan`. Each rank computes twice, because it needs results of the others in the midst."""

    def __init__(self, rows: Sequence[Row], kv: PagedKV, ranks: int) -> None:
        size = kv.layout.block_tokens // ranks
        layout = replace(kv.layout, kv_heads=1, block_tokens=size)
        self.ranks = [[_Exchange() for _ in range(ranks)] for _ in range(kv.layout.kv_heads)]
        self.plans = []
        for head, exchanges in enumerate(self.ranks):
            for rank, exchange in enumerate(exchanges):
                tokens = range(rank * size, (rank + 1) * size)
                part = BlockPart(0, layout.block_bytes, tokens, kv.layout.block_tokens)
                memory = torch.empty(layout.block_bytes * len(kv.data), dtype=torch.uint8)
                own = PagedKV(memory, layout, part)
                own.data.copy_(kv.data[:, :, :, tokens.start : tokens.stop, head : head + 1])
                self.plans.append(ContextBackend(exchange, ReferenceBackend()).plan(rows, own))

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        tokens, ranks, found = len(queries), len(self.ranks[0]), []
        for head, exchanges in enumerate(self.ranks):
            group = queries.unflatten(1, (len(self.ranks), -1))[:, head]  # [tokens, group, head_dim]
            padded = functional.pad(group, (0, 0, 0, -group.shape[1] % ranks))
            by_rank = padded.unflatten(1, (ranks, -1)).transpose(0, 1)
            plans = self.plans[head * ranks : (head + 1) * ranks]
            for exchange in exchanges:
                exchange.queries, exchange.received = by_rank, None
            for own, plan in zip(by_rank, plans, strict=True):
                plan.run(layer, own, window)
            for rank, exchange in enumerate(exchanges):
                exchange.received = torch.stack([other.sent[rank] for other in exchanges])
            results = [plan.run(layer, own, window) for own, plan in zip(by_rank, plans, strict=True)]
            joined = torch.cat([result.view(tokens, -1, queries.shape[2]) for result in results], 1)
            found.append(joined[:, : group.shape[1]])
        return torch.cat(found, 1).flatten(1)
