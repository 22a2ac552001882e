"""Launch decode attention in one kernel, whose programs take work from a queue."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from baton.compute.decode_sizes import SPLIT_TOKENS, splits_shape
from baton.compute.torch.kernels.attention_backend import NO_WINDOW
from baton.compute.torch.kernels.paged_decode import DecodeTables
from baton.compute.torch.kernels.paged_kv import PagedKV
from baton.compute.triton.launch import DecodeShape, registers_of
from baton.compute.triton.persistent_kernel import persistent_kernel, schedule_kernel

WIDE_NUMBERS, WIDE_KEYS = 32 * 512, 16
"""A program that sums this many numbers, and also merges, spills registers if it reads more keys per pass."""
ITEMS_PER_PROGRAM = 16
"""Items of work for each program, if the batch has enough splits. An item is then 1/16 of a program's work."""
REQUESTS_PAD_MIN = 128
"""All captured batch sizes schedule by the same binary."""


PROGRAMS_PER_PROCESSOR = 2
"""Programs that one multiprocessor of a GPU runs at a time, about."""
PROCESSORS_WITHOUT_DEVICE = 4


def processors() -> int:
    """Return the number of multiprocessors of the current GPU."""
    if not torch.cuda.is_available():
        return PROCESSORS_WITHOUT_DEVICE
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def resident_programs() -> int:
    """Return the number of programs that the current GPU runs at a time, about."""
    return PROGRAMS_PER_PROCESSOR * processors()


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters that kernels set back to zero at the end of a launch."""

    _zeros: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """By size: one entry per power of two. Captured graphs keep using their entry."""

    def of(self, size: int, device: torch.device) -> Tensor:
        """Return zeros: [size or more] int32."""
        size = triton.next_power_of_2(size)
        if size not in self._zeros:
            self._zeros[size] = torch.zeros(size, dtype=torch.int32, device=device)
        return self._zeros[size]


@dataclass(frozen=True, slots=True)
class PersistentDecodeKernel:
    """Implements `TritonKernel` with one launch per layer, and one more per step that writes the queue."""

    products: torch.dtype
    rope_dim: int = 0
    programs: int = PROGRAMS_PER_PROCESSOR * PROCESSORS_WITHOUT_DEVICE
    """Programs of a launch: about as many as the device runs at a time. Any number gives the same bits."""
    counters: Counters = field(default_factory=Counters)

    def plan(self, tables: DecodeTables, kv: PagedKV) -> PersistentDecodePlan:
        return PersistentDecodePlan(tables, kv, self)


@dataclass(frozen=True, slots=True)
class Queue:
    """The work of a step, in the order in which programs take it."""

    counts: Tensor  # [1 + requests] int32: all items, then those of one head tile of each request
    items: Tensor  # [items, 4] int32: request, head tile, first split, split after the last


@dataclass(frozen=True, slots=True)
class PersistentDecodePlan:
    """Implements `AttentionPlan` for a decode step of `PersistentDecodeKernel`."""

    tables: DecodeTables
    kv: PagedKV
    kernel: PersistentDecodeKernel
    queues: dict[int, Queue] = field(default_factory=dict[int, Queue])
    """By window. The first layer of a window schedules for all: a graph that contains it does so at each replay."""

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        """Run attention. With latent attention, the last rope_dim values of each head of the result are zero."""
        kv, queries = self.kv, queries.contiguous()
        tokens, heads, width = queries.shape
        shape = DecodeShape.of(queries, kv, self.kernel)
        partial = splits_shape(tokens, heads, self.tables.blocks.shape[1] * kv.layout.block_tokens)
        back = NO_WINDOW if window is None else window
        if back not in self.queues:
            wanted = self.kernel.programs * ITEMS_PER_PROGRAM
            self.queues[back] = schedule(self.tables.lengths, shape.tiles, partial[-1], back, wanted)
        queue = self.queues[back]
        parts = queries.new_empty((*partial, shape.dim), dtype=torch.float32)
        sums = queries.new_empty(partial, dtype=torch.float32)
        out = torch.zeros_like(queries) if self.kernel.rope_dim else torch.empty_like(queries)
        if shape.head_rows * shape.dim >= WIDE_NUMBERS:
            shape.constants["KEYS"] = WIDE_KEYS
        persistent_kernel[(self.kernel.programs,)](
            queries, kv.data, kv.scales, self.tables.blocks, self.tables.lengths, queue.counts, queue.items,
            self.kernel.counters.of(2 + tokens * shape.tiles, queries.device), parts, sums, out,
            layer * kv.layout.planes * kv.layout.block_tokens, width**-0.5 * math.log2(math.e), back,
            self.tables.blocks.shape[1], partial[-1],
            **shape.constants, num_warps=shape.warps,
            maxnreg=registers_of(self.kernel.products, shape.warps, kv.layout.dtype, is_large=True),
        )  # fmt: skip
        return out.flatten(1)


def schedule(lengths: Tensor, tiles: int, splits_max: int, window: int, items_wanted: int) -> Queue:
    """Return the queue of a decode step. lengths: [requests] int32, in tokens, on the device. splits_max: of a request.

    tiles: head tiles of a request. window: in tokens. items_wanted: about as many items, if there are enough splits.
    """
    requests = len(lengths)
    counts = torch.empty(1 + requests, dtype=torch.int32, device=lengths.device)
    items = torch.empty(requests * max(1, splits_max) * tiles, 4, dtype=torch.int32, device=lengths.device)
    schedule_kernel[(requests,)](
        lengths, counts, items, requests, window, items_wanted,
        TILES=tiles, TILES_PAD=triton.next_power_of_2(tiles), SPLIT=SPLIT_TOKENS,
        REQUESTS_PAD=max(REQUESTS_PAD_MIN, triton.next_power_of_2(requests)),
    )  # fmt: skip
    return Queue(counts, items)
