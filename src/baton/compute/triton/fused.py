"""Launch attention over chunks and decoding requests together: one launch per layer of a mixed step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
import triton
from torch import Tensor

from baton.compute.decode_sizes import splits_shape
from baton.compute.torch.kernels.attention_backend import NO_WINDOW, AttentionPlan
from baton.compute.torch.kernels.paged_decode import padded_blocks
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.triton.fused_kernel import fused_kernel
from baton.compute.triton.launch import (
    FLOAT32_REGISTERS,
    DecodeShape,
    Tile,
    TritonBackend,
    TritonKernel,
    chunk_tile_of,
    padded,
    registers_of,
    tiles_of,
)
from baton.compute.triton.persistent import Counters, Queue, processors, schedule
from baton.decide.kv.layout import KVLayout

FLOP_PER_BYTE = 90
"""The arithmetic of chunks in the time in which decoding requests read a byte. An estimate: half of the products of an
H200 (780 TFLOP/s in bfloat16) over its bandwidth (4.3 TB/s)."""
COUNTERS = 3
"""Counters of a launch besides tickets and arrivals."""


@dataclass(frozen=True, slots=True)
class FusedBackend:
    """Implements `AttentionBackend`: in one launch per layer if a step has chunks and decoding requests."""

    kernel: TritonKernel
    """Of steps without chunks."""
    programs: int
    """Programs of a launch: about as many as the device runs at a time."""
    pools: int = 1
    """Pools of tickets, a power of two: each multiprocessor has its own if there are enough. 1: for the interpreter."""
    _counters: Counters = field(default_factory=Counters)

    def plan(self, rows: Sequence[Row], kv: PagedKV) -> AttentionPlan:
        decodes, chunks = [row for row in rows if row.count == 1], [row for row in rows if row.count > 1]
        if kv.layout.planes == 1 or not decodes or not chunks:
            return TritonBackend(self.kernel).plan(rows, kv)
        queries, _, _ = chunk_tile_of(padded(kv.layout.head_dim), self.kernel.products, kv.layout.dtype)
        tiles = sorted(tiles_of(chunks, queries, len(decodes)), key=lambda tile: -tile.end)  # the most keys first
        lengths, device = [row.total for row in decodes], kv.data.device
        return FusedPlan(
            tiles=tiles,
            tile_numbers=torch.tensor(tiles, dtype=torch.int32, device=device),
            rows=torch.tensor([row.first for row in decodes], dtype=torch.int32, device=device),
            host_lengths=lengths,
            lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
            blocks=padded_blocks([*decodes, *chunks], device),
            kv=kv,
            backend=self,
        )

    def counters(self, head_tiles: int, device: torch.device) -> Tensor:
        """Return the counters of a launch over this many head tiles of decoding requests. All are 0."""
        return self._counters.of(self.pools + COUNTERS + head_tiles, device)


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """Implements `AttentionPlan` for a mixed step of `FusedBackend`."""

    tiles: list[Tile]
    tile_numbers: Tensor  # [tiles, 4] int32, as `attend_tile` reads them
    rows: Tensor  # [decoding requests] int32: rows of the step
    host_lengths: list[int]
    lengths: Tensor  # [decoding requests] int32, the new token included
    blocks: Tensor  # [decoding requests, then chunks; blocks] int32
    kv: PagedKV
    backend: FusedBackend
    queues: dict[int, Queue] = field(default_factory=dict[int, Queue])
    """By window. The first layer of a window schedules for all."""

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        """Run attention. Rows of the result that belong to no request are not written."""
        kv, kernel, queries = self.kv, self.backend.kernel, queries.contiguous()
        _, heads, dim = queries.shape
        shape, layout, back = DecodeShape.of(queries, kv, kernel), kv.layout, NO_WINDOW if window is None else window
        tile_queries, tile_keys, tile_warps = chunk_tile_of(padded(dim), kernel.products, layout.dtype)
        warps = max(tile_warps, shape.warps)
        partial = splits_shape(len(self.host_lengths), heads, max(self.host_lengths))
        if back not in self.queues:
            wanted = items_wanted(self.tiles, tile_queries, self.host_lengths, back, layout)
            self.queues[back] = schedule(self.lengths, shape.tiles, partial[-1], back, wanted)
        queue, out = self.queues[back], torch.empty_like(queries)
        parts = queries.new_empty((*partial, dim), dtype=torch.float32)
        sums = queries.new_empty(partial, dtype=torch.float32)
        fused_kernel[(self.backend.programs,)](
            queries, kv.data, kv.scales, self.blocks, self.tile_numbers, self.rows, self.lengths, queue.counts,
            queue.items, self.backend.counters(len(self.host_lengths) * shape.tiles, queries.device), parts, sums, out,
            layer * layout.planes * layout.block_tokens, dim**-0.5 * math.log2(math.e), back, self.blocks.shape[1],
            partial[-1], len(self.tiles) * heads,
            **shape.constants, QUERIES=tile_queries, TILE_KEYS=tile_keys, POOLS=self.backend.pools, num_warps=warps,
            maxnreg=registers_of(kernel.products, warps, layout.dtype, is_large=True) or FLOAT32_REGISTERS,
        )  # fmt: skip
        return out.flatten(1)


def ticket_pools() -> int:
    """Return the number of pools with which each multiprocessor of the current GPU has its own."""
    return triton.next_power_of_2(processors())


def items_wanted(tiles: Sequence[Tile], queries: int, lengths: Sequence[int], window: int, layout: KVLayout) -> int:
    """Return the number of decode items of which each takes as long as a tile of chunks, on average.

    The ratio of their numbers is then that of the times of both kinds. queries: rows of a tile, padding included.
    """
    tile_keys = fmean(tile.end - max(0, tile.start - window + 1) for tile in tiles)
    tile_flop = 4 * queries * layout.head_dim * tile_keys
    read_bytes = sum(min(length, window) for length in lengths) * layout.token_bytes / layout.layers
    return max(1, round(read_bytes * FLOP_PER_BYTE / tile_flop))
