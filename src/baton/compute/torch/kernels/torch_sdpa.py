"""Attention with torch's fused kernel (scaled_dot_product_attention), on any device and optimized for the CPU.

Blocks are gathered into scratch memory that fits into the second-level cache, then read once by the kernel. KV heads
are not copied per query head. Decode folds the query heads of a KV head into the kernel's query dimension; prefill
reads the KV head through a stride of zero. Index tensors and masks are made once per step and kind of layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.compute.torch.kernels.attention_backend import visible
from baton.compute.torch.kernels.paged_kv import PagedKV, Row

SCRATCH_BYTES = 4 << 20
"""The maximum size of a decode batch's gathered KV of one layer. More would not fit into the cache."""
LENGTH_RATIO_MIN = 0.5
"""The minimum length of a request relative to the longest in its decode batch, which the batch is padded to."""
TILE_QUERIES = 512
"""Queries per mask. Chunks with cached keys are masked in tiles of this size, so that a mask stays small."""


class SdpaBackend:
    """Implements `AttentionBackend` with torch's fused attention kernel."""

    def plan(self, rows: Sequence[Row], kv: PagedKV) -> SdpaPlan:
        return SdpaPlan(rows, kv)


@dataclass(frozen=True, slots=True)
class _DecodeBatch:
    """Requests with one new token each."""

    tokens: Tensor  # [batch] rows of the step
    planes: Tensor  # [planes, batch, blocks]
    keys: int
    """The keys of the longest request; the rest of its last block is not read."""
    mask: Tensor | None  # [batch, 1, 1, keys], 0 or -inf. None: every request sees all keys
    stale: Tensor | None
    """Indices of gathered slots [planes * batch * blocks * block_tokens] that hold no KV of their request.

    They are set to zero, because they may contain NaN. None: a single request, whose keys end before them.
    """


@dataclass(frozen=True, slots=True)
class _Tile:
    """The queries of one chunk that one call computes."""

    first: int
    count: int
    keys: int
    mask: Tensor | None  # [count, keys]. None: causal from the first token


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The tiles of a request with several new tokens."""

    planes: Tensor  # [planes, blocks]
    tiles: tuple[_Tile, ...]


class SdpaPlan:
    """Implements `AttentionPlan` with batches and chunks for each kind of layer (full attention, or a window)."""

    def __init__(self, rows: Sequence[Row], kv: PagedKV) -> None:
        self._kv = kv
        self._decodes = sorted((row for row in rows if row.count == 1), key=lambda row: -row.total)
        self._chunks = [row for row in rows if row.count > 1]
        self._kinds: dict[int | None, tuple[list[_DecodeBatch], list[_Chunk]]] = {}
        self._scratch = torch.empty(0, dtype=kv.data.dtype, device=kv.data.device)

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        if window not in self._kinds:
            self._kinds[window] = self._plan_kind(window, queries.dtype)
        batches, chunks = self._kinds[window]
        out = torch.empty_like(queries)
        for batch in batches:
            self._run_decodes(batch, layer, queries, out)
        for chunk in chunks:
            self._run_chunk(chunk, layer, queries, out)
        return out.flatten(1)

    # ---- once per step and kind of layer -------------------------------------------------------------------------

    def _plan_kind(self, window: int | None, dtype: torch.dtype) -> tuple[list[_DecodeBatch], list[_Chunk]]:
        batches = [self._decode_batch(rows, window, dtype) for rows in self._decode_groups(window)]
        chunks = [self._chunk(row, window, dtype) for row in self._chunks]
        largest = max((part.planes.numel() for part in (*batches, *chunks)), default=0)
        layout = self._kv.layout
        needed = largest * layout.block_tokens * layout.kv_heads * self._kv.cell
        if needed > self._scratch.numel():
            self._scratch = self._scratch.new_empty(needed)
        return batches, chunks

    def _decode_groups(self, window: int | None) -> list[list[Row]]:
        """Group the decoding requests, longest first, into batches of similar length that fit into scratch memory."""
        layout = self._kv.layout
        layer_block_bytes = layout.block_bytes // layout.layers
        groups: list[list[Row]] = []
        for row in self._decodes:
            blocks = len(row.blocks) - _first_block(row, window, layout.block_tokens)
            if groups:
                longest = len(groups[-1][0].blocks) - _first_block(groups[-1][0], window, layout.block_tokens)
                fits = (len(groups[-1]) + 1) * longest * layer_block_bytes <= SCRATCH_BYTES
                if fits and blocks >= LENGTH_RATIO_MIN * longest:
                    groups[-1].append(row)
                    continue
            groups.append([row])
        return groups

    def _decode_batch(self, rows: Sequence[Row], window: int | None, dtype: torch.dtype) -> _DecodeBatch:
        block_tokens, device = self._kv.layout.block_tokens, self._kv.data.device
        firsts = [_first_block(row, window, block_tokens) for row in rows]
        tables = [row.blocks[first:] for row, first in zip(rows, firsts, strict=True)]
        blocks = max(len(table) for table in tables)
        padded = torch.stack([torch.cat((table, table[:1].expand(blocks - len(table)))) for table in tables])  # on host
        ends = torch.tensor([row.total - first * block_tokens for row, first in zip(rows, firsts, strict=True)])
        keys = int(ends.max())
        position = torch.arange(blocks * block_tokens)
        written = position < ends[:, None]  # [batch, blocks * block_tokens]
        seen = written if window is None else written & (position >= ends[:, None] - window)
        stale = (
            (~written).expand(self._kv.layout.planes, -1, -1).flatten().nonzero().flatten() if len(rows) > 1 else None
        )
        return _DecodeBatch(
            tokens=torch.tensor([row.first for row in rows], device=device),
            planes=self._kv.planes(padded),
            keys=keys,
            mask=None if bool(seen[:, :keys].all()) else _additive(seen[:, :keys], dtype, device)[:, None, None],
            stale=None if stale is None else stale.to(device),
        )

    def _chunk(self, row: Row, window: int | None, dtype: torch.dtype) -> _Chunk:
        block_tokens = self._kv.layout.block_tokens
        first_block = _first_block(row, window, block_tokens)
        planes = self._kv.planes(row.blocks[first_block:])
        if row.start == 0 and (window is None or row.total <= window):
            return _Chunk(planes, (_Tile(row.first, row.count, row.total, None),))
        key_start = first_block * block_tokens
        tiles: list[_Tile] = []
        for offset in range(0, row.count, TILE_QUERIES):
            count = min(TILE_QUERIES, row.count - offset)
            start, end = row.start + offset, row.start + offset + count
            seen = visible(range(start, end), range(key_start, end), window, self._kv.data.device)
            mask = _additive(seen, dtype, self._kv.data.device)
            tiles.append(_Tile(row.first + offset, count, end - key_start, mask))
        return _Chunk(planes, tuple(tiles))

    # ---- once per layer ------------------------------------------------------------------------------------------

    def _run_decodes(self, batch: _DecodeBatch, layer: int, queries: Tensor, out: Tensor) -> None:
        layout = self._kv.layout
        picked = queries[batch.tokens]  # [batch, heads, head_dim]
        folded = picked.view(len(picked), layout.kv_heads, -1, layout.head_dim)  # [batch, kv_heads, group, head_dim]
        gathered = self._kv.gather(batch.planes + layout.planes * layer, self._scratch)
        if batch.stale is not None:
            gathered.view(-1, layout.kv_heads * self._kv.cell).index_fill_(0, batch.stale, 0)
        kv = (
            self._kv.numbers(gathered, queries.dtype).flatten(2, 3)[:, :, : batch.keys].transpose(2, 3)
        )  # [planes, batch, kv_heads, keys, head_dim]
        result = functional.scaled_dot_product_attention(folded, kv[0], kv[-1], attn_mask=batch.mask)
        out[batch.tokens] = result.reshape(picked.shape)

    def _run_chunk(self, chunk: _Chunk, layer: int, queries: Tensor, out: Tensor) -> None:
        layout = self._kv.layout
        gathered = self._kv.gather(chunk.planes + layout.planes * layer, self._scratch)
        kv = (
            self._kv.numbers(gathered, queries.dtype).flatten(1, 2).transpose(1, 2)
        )  # [planes, kv_heads, keys, head_dim]
        for tile in chunk.tiles:
            rows = slice(tile.first, tile.first + tile.count)
            grouped = queries[rows].view(tile.count, layout.kv_heads, -1, layout.head_dim).permute(1, 2, 0, 3)
            heads = kv[:, :, None, : tile.keys].expand(-1, -1, grouped.shape[1], -1, -1)
            result = functional.scaled_dot_product_attention(
                grouped, heads[0], heads[-1], attn_mask=tile.mask, is_causal=tile.mask is None
            )  # [kv_heads, group, count, head_dim]
            out[rows] = result.permute(2, 0, 1, 3).reshape(tile.count, -1, layout.head_dim)


def _first_block(row: Row, window: int | None, block_tokens: int) -> int:
    """Return the first block that a query of this row can see."""
    return 0 if window is None else max(0, row.start - window + 1) // block_tokens


def _additive(seen: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    seen = seen.to(device)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
