"""Attention by torch's `flex_attention`: the block tables of a step become the block mask of one compiled kernel.

Every call has ENTRIES batch entries, and tables, lengths and windows are tensors of fixed size, so a change of them
compiles nothing. There are two compiled forms: one query per entry (decode), and TILE_QUERIES per entry (chunks). Their
first use takes some 10 s. All layers of a step share a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from baton.compute.torch.kernels.attention_backend import NO_WINDOW
from baton.compute.torch.kernels.paged_kv import PagedKV, Row

TILE_QUERIES = 128
"""Queries of a chunk in one batch entry."""
ENTRIES = 16
"""Batch entries of a call. A smaller batch gets empty ones."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Consecutive queries of one request."""

    first: int
    """Row of the step."""
    count: int
    position: int
    row: Row


class FlexBackend:
    """Implements `AttentionBackend` with `flex_attention`. The arena has to hold the type that the model computes in.

    `plan` sets the unwritten slots of each request's last block to zero, because the kernel multiplies them with 0.
    """

    def __init__(self) -> None:
        compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)  # pyright: ignore[reportUnknownMemberType]
        self._attend: Callable[..., Tensor] = compiled
        self._logical = torch.empty(0, dtype=torch.int32)

    def plan(self, rows: Sequence[Row], kv: PagedKV) -> FlexPlan:
        _clear_unwritten(rows, kv)
        logical = self._logical_blocks(rows, kv)
        decodes = [_Entry(row.first, 1, row.start, row) for row in rows if row.count == 1]
        tiles = [
            _Entry(row.first + offset, min(TILE_QUERIES, row.count - offset), row.start + offset, row)
            for row in rows
            if row.count > 1
            for offset in range(0, row.count, TILE_QUERIES)
        ]
        batches = [
            _Batch(kv, entries[first : first + ENTRIES], width, logical)
            for width, entries in ((1, decodes), (TILE_QUERIES, tiles))
            for first in range(0, len(entries), ENTRIES)
        ]
        return FlexPlan(kv, self._attend, batches)

    def prepare(self, heads: int, kv: PagedKV) -> None:
        """Compile both forms for this arena, and for queries of its type with `heads` heads. Writes nothing to it."""
        queries = torch.zeros(1, heads, kv.layout.head_dim, dtype=kv.data.dtype, device=kv.data.device)
        logical = self._logical_blocks((), kv)
        for width in (1, TILE_QUERIES):
            FlexPlan(kv, self._attend, [_Batch(kv, (), width, logical)]).run(0, queries, None)

    def _logical_blocks(self, rows: Sequence[Row], kv: PagedKV) -> Tensor:
        """Return the index of each block in its request [blocks]. Blocks of no request have arbitrary entries."""
        blocks, device = len(kv.data), kv.data.device
        if len(self._logical) != blocks or self._logical.device != device:
            self._logical = torch.zeros(blocks, dtype=torch.int32, device=device)
        if rows:
            ids = torch.cat([row.blocks for row in rows]).to(device)
            indices = torch.cat([torch.arange(len(row.blocks), dtype=torch.int32) for row in rows]).to(device)
            self._logical[ids] = indices  # a block that requests share has the same index in all of them
        return self._logical


class _Batch:
    """The entries of a step that one call computes, with the block masks of its windows."""

    def __init__(self, kv: PagedKV, entries: Sequence[_Entry], width: int, logical: Tensor) -> None:
        self._kv, self._entries, self._logical, self.width = kv, entries, logical, width
        device = kv.data.device
        padding = [0] * (ENTRIES - len(entries))
        positions = [each.position for each in entries] + padding
        self._positions = torch.tensor(positions, dtype=torch.int32).to(device)  # [ENTRIES]
        firsts = torch.tensor([each.first for each in entries] + padding)[:, None]  # [ENTRIES, 1]
        counts = torch.tensor([each.count for each in entries] + padding)[:, None]
        offsets = torch.arange(width)[None]
        self._is_real = (offsets < counts).to(device)  # [ENTRIES, width]
        self._rows = (firsts + offsets.minimum((counts - 1).clamp(min=0))).to(
            device
        )  # [ENTRIES, width] rows of the step
        self._masks: dict[int | None, BlockMask] = {}

    def take(self, queries: Tensor) -> Tensor:
        """Return the queries of the entries: [ENTRIES, heads, width, head_dim]."""
        return queries[self._rows].transpose(1, 2).contiguous()

    def put(self, result: Tensor, out: Tensor) -> None:
        """Write results [ENTRIES, heads, width, head_dim] to the rows of a step [tokens, heads, head_dim]."""
        out[self._rows[self._is_real]] = result.transpose(1, 2)[self._is_real]

    def mask(self, window: int | None, rows_total: int) -> BlockMask:
        """Return the block mask of a window. `rows_total`: the length of the keys."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window, rows_total)
        return self._masks[window]

    def _make_mask(self, window: int | None, rows_total: int) -> BlockMask:
        block_tokens, device = self._kv.layout.block_tokens, self._kv.data.device
        stride = _rows_per_block(self._kv) // block_tokens
        tables: list[Tensor] = []
        for each in self._entries:
            end = -(-(each.position + each.count) // block_tokens)
            begin = 0 if window is None else max(0, each.position + 1 - window) // block_tokens
            tables.append((each.row.blocks[begin:end] * stride).to(torch.int32))
        # A mask needs a column for every plane of the arena; only a row's first ones are read: rows may overlap.
        width, columns = len(self._kv.data), rows_total // block_tokens
        numbers = torch.zeros(ENTRIES * width + columns, dtype=torch.int32)
        for index, table in enumerate(tables):
            numbers[index * width : index * width + len(table)] = table
        indices = numbers.to(device).as_strided((ENTRIES, 1, 1, columns), (width, width, width, 1))
        counts = torch.tensor([len(table) for table in tables] + [0] * (ENTRIES - len(tables)), dtype=torch.int32)
        back = torch.tensor(NO_WINDOW if window is None else window, dtype=torch.int32, device=device)
        return BlockMask.from_kv_blocks(
            counts.to(device).view(ENTRIES, 1, 1),
            indices,
            BLOCK_SIZE=(TILE_QUERIES, block_tokens),
            mask_mod=_sees(self._positions, self._logical, back, block_tokens, stride * block_tokens),
            seq_lengths=(self.width, rows_total),
            compute_q_blocks=False,
        )


@dataclass(frozen=True, slots=True)
class FlexPlan:
    """Implements `AttentionPlan` for a step of `FlexBackend`."""

    kv: PagedKV
    attend: Callable[..., Tensor]
    batches: Sequence[_Batch]

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        out = torch.empty_like(queries)
        keys, values = _plane(self.kv, layer, 0), _plane(self.kv, layer, self.kv.layout.planes - 1)
        options = {"BLOCK_N": min(64, self.kv.layout.block_tokens)} if queries.is_cuda else None
        for batch in self.batches:
            mask = batch.mask(window, keys.shape[2])
            result = self.attend(
                batch.take(queries), keys, values, block_mask=mask, enable_gqa=True, kernel_options=options
            )
            batch.put(result, out)
        return out.flatten(1)


def _sees(
    positions: Tensor, logical: Tensor, back: Tensor, block_tokens: int, block_rows: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the mask function: a query sees keys up to its own position, and after its position minus `back`."""

    def sees(entry: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = positions[entry] + query
        position = logical[key // block_rows] * block_tokens + key % block_tokens
        return (position <= at) & (at - position < back)

    return sees


def _plane(kv: PagedKV, layer: int, plane: int) -> Tensor:
    """Return one plane of a layer as a view: [1, kv_heads, rows, head_dim].

    Rows of other planes lie between its blocks, and no mask names them. Block b begins at row b * rows per block.
    """
    layout, width = kv.layout, kv.layout.kv_heads * kv.layout.head_dim
    rows = (len(kv.data) - 1) * _rows_per_block(kv) + layout.block_tokens
    size, strides = (1, layout.kv_heads, rows, layout.head_dim), (rows * width, layout.head_dim, width, 1)
    return kv.data.as_strided(size, strides, kv.data[0, layer, plane].storage_offset())


def _rows_per_block(kv: PagedKV) -> int:
    return kv.data.stride(0) // (kv.layout.kv_heads * kv.layout.head_dim)


def _clear_unwritten(rows: Sequence[Row], kv: PagedKV) -> None:
    """Zero the slots after each request's last token. They are in its last block, which no other request reads."""
    block_tokens, device = kv.layout.block_tokens, kv.data.device
    slots = [
        row.blocks[-1] * block_tokens + torch.arange(row.total % block_tokens, block_tokens)
        for row in rows
        if row.total % block_tokens
    ]
    if slots:
        picked = torch.cat(slots)
        blocks, offsets = (picked // block_tokens).to(device), (picked % block_tokens).to(device)
        kv.data[blocks, :, kv.layout.planes - 1, offsets] = 0
