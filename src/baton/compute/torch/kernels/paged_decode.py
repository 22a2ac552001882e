"""Attention of decode steps (one token per request) from tensors of fixed size, so that a CUDA graph can replay it.

The keys of a request are split at absolute positions, every SPLIT_TOKENS, and merged in order. So a token's result
does not depend on the other requests of the batch. Source: Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from baton.compute.torch.kernels.attention_backend import AttentionPlan
from baton.compute.torch.kernels.paged_kv import PagedKV, Row


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """The places of the requests' keys. Entries after a request's last block may be any valid block."""

    blocks: Tensor  # [tokens, blocks] int32
    lengths: Tensor  # [tokens] int32, the new token included


class DecodeKernel(Protocol):
    """Plans the attention of decode steps."""

    def plan(self, tables: DecodeTables, kv: PagedKV) -> AttentionPlan:
        """Prepare a step. The plan reads the tables only when it runs, so a graph may refill them between runs."""
        ...


def padded_blocks(rows: Sequence[Row], device: torch.device) -> Tensor:
    """Return the block tables of rows, padded to equal length: [rows, blocks] int32."""
    return pad_sequence([row.blocks for row in rows], batch_first=True).to(device=device, dtype=torch.int32)


def decode_tables(rows: Sequence[Row], device: torch.device) -> DecodeTables:
    """Return the block tables and lengths of a decode step's rows, padded to equal length. Each row has one token."""
    assert all(row.count == 1 for row in rows), f"{[row.count for row in rows]} tokens, and not one each"
    return DecodeTables(
        padded_blocks(rows, device), torch.tensor([row.total for row in rows], dtype=torch.int32, device=device)
    )
