"""The port for the attention of a decoder."""

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
    """The tensors of one step. For a step replayed as a graph they are fixed, and refilled before each replay."""

    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens], as `PagedKV.slots` returns them. -1: padding
    kv: PagedKV
    plan: AttentionPlan


class AttentionPass(Protocol):
    """The attention of all layers in one step."""

    def attend(self, layer: int, hidden: Tensor) -> Tensor:
        """Write a layer's new KV, and return its projected attention [tokens, hidden].

        hidden: normalized hidden states [tokens, hidden].
        """
        ...


class IdlePass:
    """Implements `AttentionPass` on a rank without tokens in a step, which computes experts for other ranks."""

    def attend(self, layer: int, hidden: Tensor) -> Tensor:
        return hidden


class Attention(Protocol):
    """The attention weights of all layers."""

    def begin(self, rows: Sequence[Row], kv: PagedKV, backend: AttentionBackend) -> AttentionPass:
        """Plan a step and begin it."""
        ...

    def begin_decode(self, step: PlannedStep) -> AttentionPass:
        """Begin a step of one token per request, which is already planned."""
        ...


def positions_of(rows: Sequence[Row], device: torch.device) -> Tensor:
    """Return the positions of all tokens of a batch: [tokens]."""
    return torch.cat([torch.arange(row.start, row.total) for row in rows]).to(device)
