"""The inputs of kernels for a step: a ragged batch of tokens, and the place of their KV in the arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from baton.compute.torch.kernels import e4m3
from baton.core.spill import SPILLED_FROM
from baton.core.step import Slice
from baton.core.types import BlockId, RequestId
from baton.decide.kv.layout import KVDtype, KVLayout

TORCH_DTYPES: dict[KVDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
    "fp8": torch.uint8,
}
"""The types of the tensors that hold an arena. fp8 has cells of bytes, with a scale in each."""


@dataclass(frozen=True, slots=True)
class Row:
    """One slice in the batch: its tokens are rows [first, first + count), at positions [start, total)."""

    first: int
    count: int
    start: int
    blocks: Tensor  # [blocks] ids, int64, on the host: a small copy to a GPU per request would be slow

    @property
    def total(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class BlockPart:
    """The place of one rank's KV in the blocks of an arena. The planes of all ranks have the same size."""

    offset_bytes: int
    block_bytes: int
    """Bytes from the start of one block of the arena to the start of the next."""
    tokens: range
    """Offsets in a block of the tokens that the rank holds."""
    block_tokens: int
    """Tokens of a block over all ranks."""

    @property
    def is_shared(self) -> bool:
        """Whether other ranks hold some tokens of each block."""
        return len(self.tokens) < self.block_tokens

    def held_before(self, positions: Tensor) -> Tensor:
        """Return how many of the tokens before each position of a request the rank holds."""
        held = (positions % self.block_tokens - self.tokens.start).clamp(0, len(self.tokens))
        return positions // self.block_tokens * len(self.tokens) + held


class PagedKV:
    """The arena as tensors: three views of the same bytes (whole, a row per block and plane, a row per token)."""

    def __init__(self, memory: memoryview | Tensor, layout: KVLayout, part: BlockPart | None = None) -> None:
        """memory: the mapped arena of a CPU host, or a tensor of bytes on the device. It must be writable.

        part: the place of `layout` in every block of the arena. None: the whole block.
        """
        place = part or BlockPart(0, layout.block_bytes, range(layout.block_tokens), layout.block_tokens)
        data = memory if isinstance(memory, Tensor) else torch.frombuffer(memory, dtype=torch.uint8)
        blocks = data.numel() // place.block_bytes
        typed = data[: blocks * place.block_bytes].view(TORCH_DTYPES[layout.dtype])
        self.layout = layout
        self.part = place
        self.cell = layout.head_bytes // typed.element_size()
        """Elements of `data` per head of a token: head_dim numbers; with fp8, head_dim codes and 4 bytes of scale."""
        width = layout.kv_heads * self.cell
        plane, plane_bytes = layout.block_tokens * width, layout.block_bytes // (layout.planes * layout.layers)
        self._block_planes, self._first_plane = place.block_bytes // plane_bytes, place.offset_bytes // plane_bytes
        mine = typed.view(blocks, self._block_planes * plane).narrow(
            1, self._first_plane * plane, layout.planes * layout.layers * plane
        )
        self.data = mine.view(blocks, *layout.shape[:-1], self.cell)
        """[blocks, layers, planes, block_tokens, kv_heads, cell]"""
        is_scaled = layout.dtype == "fp8"
        self.scales = self.data.view(torch.float32) if is_scaled else self.data
        """With fp8, the memory of `data` as float32, from which kernels load scales. Otherwise `data` itself."""
        self._block_rows = typed.view(-1, plane)  # [blocks * planes of a block, block_tokens * width]
        self.token_rows = typed.view(-1, width)  # [blocks * planes of a block * block_tokens, width]
        self.token_scales = self.token_rows.view(torch.float32) if is_scaled else self.token_rows
        self.block_rows = self._block_planes * layout.block_tokens
        """Token rows of one block of the arena."""
        self._spill: Tensor | None = None  # [layers, slots, planes, block_tokens * width]

    def use_spill(self, memory: memoryview) -> None:
        """Read spilled blocks of one rank from this memory, as `SpillMemory` has it."""
        typed = torch.frombuffer(memory, dtype=torch.uint8).view(self._block_rows.dtype)
        self._spill = typed.view(self.layout.layers, -1, self.layout.planes, self._block_rows.shape[1])

    def slots(self, rows: Sequence[Row]) -> Tensor:
        """Return the places of the batch's tokens: [tokens] token rows of the first plane of a block of the arena.

        Add `first_row` for another plane. -1: another rank holds the token.
        """
        block_tokens, held = self.part.block_tokens, self.part.tokens
        parts: list[Tensor] = []
        for row in rows:
            positions = torch.arange(row.start, row.total)
            offsets = positions % block_tokens
            places = row.blocks[positions // block_tokens] * self.block_rows + offsets - held.start
            parts.append(places.masked_fill((offsets < held.start) | (offsets >= held.stop), -1))
        return torch.cat(parts).to(self.data.device)

    def decode_slots(self, positions: Tensor, blocks: Tensor, lengths: Tensor) -> Tensor:
        """Return the slots of one token per request, from tensors on the device: [requests].

        positions: [requests]. blocks: [requests, blocks]. lengths: [requests]; a request of length 0 gets -1.
        """
        index = positions.long()
        block = blocks.gather(1, index[:, None] // self.layout.block_tokens)[:, 0].long()
        slots = block * self.block_rows + index % self.layout.block_tokens
        return slots.masked_fill(lengths == 0, -1)

    def first_row(self, layer: int, plane: int = 0) -> int:
        """Return the distance of a layer's plane from the start of its block, in token rows."""
        return (self._first_plane + self.layout.planes * layer + plane) * self.layout.block_tokens

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write one layer's new keys and values, each [tokens, kv_heads, head_dim], cast to the arena's type."""
        for plane, heads in enumerate((keys, values)):
            self._write(layer, plane, slots, self.cells(heads).flatten(1))

    def write_latents(self, layer: int, slots: Tensor, latents: Tensor) -> None:
        """Write one layer's new latent vectors [tokens, head_dim] to a layout with a single plane."""
        self._write(layer, 0, slots, self.cells(latents))

    def _write(self, layer: int, plane: int, slots: Tensor, cells: Tensor) -> None:
        if self.part.is_shared:
            held = slots >= 0
            slots, cells = slots[held], cells[held]
        self.token_rows.index_copy_(0, slots + self.first_row(layer, plane), cells)

    def cells(self, numbers: Tensor) -> Tensor:
        """Return heads [..., head_dim] as they are stored: [..., cell]."""
        return e4m3.encode(numbers) if self.layout.dtype == "fp8" else numbers.to(self.token_rows.dtype)

    def numbers(self, cells: Tensor, dtype: torch.dtype) -> Tensor:
        """Return stored heads [..., cell] as numbers: [..., head_dim]."""
        return e4m3.decode(cells, dtype) if self.layout.dtype == "fp8" else cells.to(dtype)

    def planes(self, blocks: Tensor) -> Tensor:
        """Return the row indices of layer 0 of blocks: [planes, ...blocks]. For another layer, add planes * layer."""
        first = blocks.to(self.data.device) * self._block_planes + self._first_plane
        return torch.stack([first + plane for plane in range(self.layout.planes)])

    def gather(self, planes: Tensor, out: Tensor) -> Tensor:
        """Copy rows of blocks [planes, ...] to `out`: [planes, ..., block_tokens, kv_heads, cell]."""
        flat = out[: planes.numel() * self._block_rows.shape[1]].view(-1, self._block_rows.shape[1])
        rows = planes.reshape(-1)
        if self._spill is None:
            torch.index_select(self._block_rows, 0, rows, out=flat)
        else:
            self._gather_with_spilled(self._spill, rows, flat)
        return flat.view(*planes.shape, *self.layout.shape[2:-1], self.cell)

    def _gather_with_spilled(self, spill: Tensor, rows: Tensor, flat: Tensor) -> None:
        """Copy rows of blocks in the arena and in the spill space: [rows, block_tokens * width]."""
        beyond = rows - SPILLED_FROM * self._block_planes
        is_spilled = beyond >= 0
        torch.index_select(self._block_rows, 0, rows.masked_fill(is_spilled, 0), out=flat)
        beyond = beyond[is_spilled]
        slot, plane_of_block = beyond // self._block_planes, beyond % self._block_planes
        layer, plane = plane_of_block // self.layout.planes, plane_of_block % self.layout.planes
        flat[is_spilled] = spill[layer, slot, plane]


def scratch_block(kv: PagedKV) -> PagedKV:
    """Return an arena of one block like those of `kv`, which the warm-up before the first request writes to."""
    size_bytes = kv.layout.block_bytes
    memory = torch.zeros(size_bytes, dtype=torch.uint8, device=kv.data.device)
    return PagedKV(memory, kv.layout, replace(kv.part, offset_bytes=0, block_bytes=size_bytes))


@dataclass(frozen=True, slots=True)
class _Table:
    """A request's block table."""

    granted: Sequence[BlockId]
    whole: Tensor  # [granted blocks] ids, int64
    used: Tensor
    """The blocks of the tokens so far: the beginning of `whole`."""


@dataclass(slots=True)
class BlockTables:
    """The block tables of the last step's requests as tensors.

    A table changes only with a grant, and converting that of a long request takes longer than the rest of its step.
    """

    _tables: dict[RequestId, _Table] = field(default_factory=dict)
    """At most one entry per request of a step."""

    def rows(self, slices: Sequence[Slice], layout: KVLayout) -> list[Row]:
        """Return the slices' places in a batch without padding.

        While a request's table and its number of blocks stay the same, so does the tensor object in its row.
        """
        rows: list[Row] = []
        tables: dict[RequestId, _Table] = {}
        first = 0
        for part in slices:
            count = -(-(part.start + part.count) // layout.block_tokens)
            table = self._tables.get(part.request_id)
            # The same tuple is unchanged; the same list may not be.
            if table is None or table.granted is not part.block_table or not isinstance(table.granted, tuple):
                whole = torch.tensor(part.block_table, dtype=torch.int64)
                table = _Table(part.block_table, whole, whole[:count])
            elif len(table.used) != count:
                table = _Table(table.granted, table.whole, table.whole[:count])
            tables[part.request_id] = table
            rows.append(Row(first=first, count=part.count, start=part.start, blocks=table.used))
            first += part.count
        self._tables = tables
        return rows
