"""What a decoder asks of its attention, whichever kind it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton.compute.torch.kernels.attention_backend import AttentionBackend, AttentionPlan
from baton.compute.torch.kernels.paged_kv import PagedKV, Row


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step's tensors, made on the host or, where a step is replayed, filled in before each replay."""

    positions: Tensor  # [tokens]
    slots: Tensor  # [layers * planes, tokens]
    kv: PagedKV
    plan: AttentionPlan


class AttentionPass(Protocol):
    """One step through the attention of all layers."""

    def attend(self, layer: int, hidden: Tensor) -> Tensor:
        """Write a layer's new KV, attend, project. hidden: [tokens, hidden], normalized. Returns the same shape."""
        ...


class Attention(Protocol):
    """The attention weights of all layers."""

    def begin(self, rows: Sequence[Row], kv: PagedKV, backend: AttentionBackend) -> AttentionPass: ...

    def begin_decode(self, step: PlannedStep) -> AttentionPass:
        """Begin a step of one token per request, whose plan is there already."""
        ...


def positions_of(rows: Sequence[Row], device: torch.device) -> Tensor:
    """Return the position of every token of a ragged batch: [tokens]."""
    return torch.cat([torch.arange(row.start, row.total) for row in rows]).to(device)
