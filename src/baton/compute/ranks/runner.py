"""A step in lockstep: the first rank says what is computed, all compute their part, the first one draws.

Stages do not overlap: a step is one batch, and a stage waits while the others compute. Cutting a batch into
micro-batches would help prompts only; the tokens of a decode step depend on the whole step before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.compute.ranks.orders import Forward, Order, Orders, Project, RowOrder
from baton.compute.torch.kernels.backend import AttentionBackend
from baton.compute.torch.kernels.paged import PagedKV, Row, scratch_block
from baton.compute.torch.layers.decoder import Decoder
from baton.compute.torch.layers.ranks import Ranks


@dataclass(frozen=True, slots=True)
class RankParts:
    """What every rank has."""

    model: Decoder
    kv: PagedKV
    backend: AttentionBackend
    ranks: Ranks
    dtype: torch.dtype
    device: torch.device

    def forward(self, tokens: Sequence[int], rows: Sequence[Row], kv: PagedKV) -> Tensor:
        """Compute this rank's part of a step: [tokens, hidden].

        On the first stage these are the hidden states after the last layer, elsewhere after the stage's.
        """
        place, attention = self.ranks.place, self.model.attention.begin(rows, kv, self.backend)
        between = torch.empty(len(tokens), self.model.config.hidden, dtype=self.dtype, device=self.device)
        if place.first_stage:
            hidden = self.model.embed(torch.tensor(tokens, device=self.device))
        else:
            self.ranks.receive(between)
            hidden = between
        hidden = self.model.through(hidden, attention)
        if place.pipeline == 1:
            return hidden
        self.ranks.pass_on(hidden)
        if not place.first_stage:
            return hidden
        self.ranks.receive(between)
        return between

    def project(self, hidden: Tensor, picked: Sequence[int]) -> Tensor:
        """Compute this rank's part of some rows' logits. On the first rank: [picked, vocab]."""
        return self.model.logits(hidden[torch.tensor(picked, dtype=torch.int64, device=self.device)])


@dataclass(frozen=True, slots=True)
class LeadRunner:
    """Implements `StepRunner` on the first rank. Orders the others to do what it does itself."""

    parts: RankParts
    orders: Orders

    def hidden(self, tokens: Sequence[int], rows: Sequence[Row], kv: PagedKV) -> Tensor:
        """See `StepRunner.hidden`."""
        with _together():
            ordered = [RowOrder(row.count, row.start, row.blocks.tolist()) for row in rows]
            self.orders.put(Forward(list(tokens), ordered, kv is not self.parts.kv))
            return self.parts.forward(tokens, rows, kv)

    def logits(self, hidden: Tensor, picked: Sequence[int]) -> Tensor:
        """See `StepRunner.logits`."""
        with _together():
            if self.parts.ranks.place.tensor > 1:
                self.orders.put(Project(list(picked)))
            return self.parts.project(hidden, picked)


class Follower:
    """A rank that does what it is told."""

    def __init__(self, parts: RankParts) -> None:
        self._parts = parts
        self._scratch = scratch_block(parts.kv.layout, parts.device)
        self._hidden = torch.empty(0)

    @torch.inference_mode()
    def obey(self, order: Order) -> None:
        """Compute this rank's part. Returns when it is done."""
        match order:
            case Forward(tokens=tokens):
                kv = self._scratch if order.scratch else self._parts.kv
                self._hidden = self._parts.forward(tokens, _rows(order.rows), kv)
            case Project(picked=picked):
                if self._parts.ranks.place.first_stage:
                    self._parts.project(self._hidden, picked)


def _rows(orders: Sequence[RowOrder]) -> list[Row]:
    """Lay the ordered rows one after the other."""
    rows: list[Row] = []
    first = 0
    for order in orders:
        rows.append(Row(first, order.count, order.start, torch.tensor(order.blocks, dtype=torch.int64)))
        first += order.count
    return rows


@contextmanager
def _together() -> Iterator[None]:
    """End the process where the ranks got out of step: nothing that one of them computes alone is of use.

    SystemExit, so that nobody who tries a failed request again tries it here; the server starts another worker.
    """
    try:
        yield
    except Exception as error:
        raise SystemExit(f"ranks are out of step, the worker ends: {type(error).__name__}: {error}") from error
