"""The inputs of kernels for a step: a ragged batch of tokens, and the place of their KV in the arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.core.step import Slice
from baton.decide.kv.layout import KVDtype, KVLayout

TORCH_DTYPES: dict[KVDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
}


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


class PagedKV:
    """The arena as tensors: three views of the same bytes (whole, a row per block and plane, a row per token)."""

    def __init__(self, memory: memoryview | Tensor, layout: KVLayout, part: BlockPart | None = None) -> None:
        """memory: the mapped arena of a CPU host, or a tensor of bytes on the device. It must be writable.

        part: the place of `layout` in every block of the arena. None: the whole block.
        """
        place = part or BlockPart(0, layout.block_bytes)
        data = memory if isinstance(memory, Tensor) else torch.frombuffer(memory, dtype=torch.uint8)
        blocks = data.numel() // place.block_bytes
        typed = data[: blocks * place.block_bytes].view(TORCH_DTYPES[layout.dtype])
        self.layout = layout
        width = layout.kv_heads * layout.head_dim
        plane, plane_bytes = layout.block_tokens * width, layout.block_bytes // (layout.planes * layout.layers)
        self._block_planes, self._first_plane = place.block_bytes // plane_bytes, place.offset_bytes // plane_bytes
        mine = typed.view(blocks, self._block_planes * plane).narrow(
            1, self._first_plane * plane, layout.planes * layout.layers * plane
        )
        self.data = mine.view(blocks, *layout.shape)  # [blocks, layers, planes, block_tokens, kv_heads, head_dim]
        self._block_rows = typed.view(-1, plane)  # [blocks * planes of a block, block_tokens * width]
        self._token_rows = typed.view(-1, width)  # [blocks * planes of a block * block_tokens, width]
        planes = torch.arange(layout.planes * layout.layers, device=typed.device) + self._first_plane
        self._planes = planes[:, None]  # [layers * planes, 1]

    def slots(self, rows: Sequence[Row]) -> Tensor:
        """Return the token rows that the batch is written to: [layers * planes, tokens] indices."""
        block_tokens = self.layout.block_tokens
        parts: list[Tensor] = []
        for row in rows:
            positions = torch.arange(row.start, row.total)
            planes = row.blocks[positions // block_tokens] * self._block_planes
            parts.append(planes * block_tokens + positions % block_tokens)
        return torch.cat(parts).to(self.data.device) + self._planes * block_tokens

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write one layer's new keys and values, each [tokens, kv_heads, head_dim], cast to the arena's type."""
        dtype = self._token_rows.dtype
        self._token_rows.index_copy_(0, slots[2 * layer], keys.flatten(1).to(dtype))
        self._token_rows.index_copy_(0, slots[2 * layer + 1], values.flatten(1).to(dtype))

    def write_latents(self, layer: int, slots: Tensor, latents: Tensor) -> None:
        """Write one layer's new latent vectors [tokens, head_dim] to a layout with a single plane."""
        self._token_rows.index_copy_(0, slots[layer], latents.to(self._token_rows.dtype))

    def planes(self, blocks: Tensor) -> Tensor:
        """Return the row indices of layer 0 of blocks: [planes, ...blocks]. For another layer, add planes * layer."""
        first = blocks.to(self.data.device) * self._block_planes + self._first_plane
        return torch.stack([first + plane for plane in range(self.layout.planes)])

    def gather(self, planes: Tensor, out: Tensor) -> Tensor:
        """Copy rows of blocks [planes, ...] to `out`: [planes, ..., block_tokens, kv_heads, head_dim]."""
        flat = out[: planes.numel() * self._block_rows.shape[1]].view(-1, self._block_rows.shape[1])
        torch.index_select(self._block_rows, 0, planes.reshape(-1), out=flat)
        return flat.view(*planes.shape, *self.layout.shape[2:])


def scratch_block(layout: KVLayout, device: torch.device) -> PagedKV:
    """Return an arena of one block, which the warm-up before the first request writes to."""
    return PagedKV(torch.zeros(layout.block_bytes, dtype=torch.uint8, device=device), layout)


def ragged_rows(slices: Sequence[Slice], layout: KVLayout) -> list[Row]:
    """Return the slices' places in a batch without padding."""
    rows: list[Row] = []
    first = 0
    for part in slices:
        blocks = -(-(part.start + part.count) // layout.block_tokens)
        table = torch.tensor(part.block_table[:blocks], dtype=torch.int64)
        rows.append(Row(first=first, count=part.count, start=part.start, blocks=table))
        first += part.count
    return rows
