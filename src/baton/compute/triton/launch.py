"""Launch the Triton kernels: paged attention, and products of rows with the weights of experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.compute.decode_sizes import SPLIT_TOKENS, splits_shape
from baton.compute.torch.kernels.attention_backend import NO_WINDOW, AttentionPlan
from baton.compute.torch.kernels.paged_decode import DecodeKernel, DecodeTables, decode_tables, padded_blocks
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.triton.chunk_kernel import chunk_kernel
from baton.compute.triton.kernels import expert_rows_kernel, merge_kernel, split_kernel
from baton.decide.kv.layout import KVDtype

BLOCK_HEADS_MAX = 32
"""Maximum number of query heads that one program computes. They share a KV head. With float32, it is `DOT_MIN`."""
FLOAT32_REGISTERS = 128
"""Registers of a thread with products in float32: a multiprocessor has them for 16 warps, of one program or two."""
DOT_MIN = 16
"""Minimum size of each dimension of a matrix instruction."""
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class TritonKernel(DecodeKernel, Protocol):
    """Decode attention by Triton."""

    @property
    def products(self) -> torch.dtype:
        """The input type of matrix products: the model's type on a GPU, float32 in Triton's interpreter."""
        ...

    @property
    def rope_dim(self) -> int:
        """With latent attention: number of last dimensions of a vector that belong to the key only. Else 0."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The sizes of a decode step's attention, and the options of its programs."""

    heads: int
    dim: int
    """Dimensions of a value."""
    head_rows: int
    """Query heads of a program, padding included."""
    tiles: int
    """Head tiles of a request: programs that read different keys, or the same keys for other heads."""
    warps: int
    constants: dict[str, object]
    """The arguments that kernels are compiled for."""

    @classmethod
    def of(cls, queries: Tensor, kv: PagedKV, kernel: TritonKernel) -> DecodeShape:
        """Return the sizes for queries [tokens, heads, width] over an arena."""
        layout, (_, heads, width) = kv.layout, queries.shape
        group, dim, rope = heads // layout.kv_heads, width - kernel.rope_dim, kernel.rope_dim
        head_rows = DOT_MIN if kernel.products == torch.float32 else min(BLOCK_HEADS_MAX, padded(group))
        keys, warps = tile_of(head_rows, padded(dim), kernel.products, layout.dtype)
        constants = {
            "GROUP": group, "KV_HEADS": layout.kv_heads, "DIM": dim, "DIM_PAD": padded(dim), "ROPE": rope,
            "ROPE_PAD": padded(rope), "LATENT": layout.planes == 1, "BLOCK_TOKENS": layout.block_tokens,
            "BLOCK_ROWS": kv.block_rows, "CELL": kv.cell, "SPLIT": SPLIT_TOKENS, "KEYS": keys, "HEADS": head_rows,
            "E4M3": layout.dtype == "fp8", "DOT": TRITON_DTYPES[kernel.products],
        }  # fmt: skip
        return cls(heads, dim, head_rows, layout.kv_heads * -(-group // head_rows), warps, constants)


@dataclass(frozen=True, slots=True)
class TritonDecodeKernel:
    """Implements `TritonKernel` with two launches: one computes the splits, one merges them."""

    products: torch.dtype
    rope_dim: int = 0

    def plan(self, tables: DecodeTables, kv: PagedKV) -> TritonDecodePlan:
        return TritonDecodePlan(tables, kv, self)


@dataclass(frozen=True, slots=True)
class TritonDecodePlan:
    """Implements `AttentionPlan` for a decode step of `TritonDecodeKernel`."""

    tables: DecodeTables
    kv: PagedKV
    kernel: TritonDecodeKernel

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        """Run attention. With latent attention, the last rope_dim values of each head of the result are zero."""
        kv, queries = self.kv, queries.contiguous()
        tokens, heads, width = queries.shape
        shape = DecodeShape.of(queries, kv, self.kernel)
        partial = splits_shape(tokens, heads, self.tables.blocks.shape[1] * kv.layout.block_tokens)
        parts = queries.new_empty((*partial, shape.dim), dtype=torch.float32)
        sums = queries.new_empty(partial, dtype=torch.float32)
        out = torch.zeros_like(queries) if self.kernel.rope_dim else torch.empty_like(queries)
        splits, back = partial[-1], NO_WINDOW if window is None else window
        split_kernel[(tokens, shape.tiles, splits)](
            queries, kv.data, kv.scales, self.tables.blocks, self.tables.lengths, parts, sums,
            layer * kv.layout.planes * kv.layout.block_tokens, width**-0.5 * math.log2(math.e), back,
            self.tables.blocks.shape[1], splits,
            **shape.constants, num_warps=shape.warps,
            maxnreg=registers_of(self.kernel.products, shape.warps, kv.layout.dtype, is_large=kv.layout.planes == 1),
        )  # fmt: skip
        merge_kernel[(tokens, heads)](
            parts, sums, self.tables.lengths, out, back, splits,
            HEADS=heads, DIM=shape.dim, DIM_PAD=padded(shape.dim), OUT_DIM=width, SPLIT=SPLIT_TOKENS,
        )  # fmt: skip
        return out.flatten(1)


@dataclass(frozen=True, slots=True)
class TritonChunkPlan:
    """Implements `AttentionPlan` for the chunks of a step, with keys and values per KV head."""

    tiles: Tensor  # [tiles, 4] int32, as `chunk_kernel` reads them
    blocks: Tensor  # [chunks, blocks] int32
    kv: PagedKV
    products: torch.dtype

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        """Run attention. Rows of the result that belong to no chunk are not written."""
        layout, queries = self.kv.layout, queries.contiguous()
        _, heads, dim = queries.shape
        rows, keys, warps = chunk_tile_of(padded(dim), self.products, layout.dtype)
        out = torch.empty_like(queries)
        chunk_kernel[(len(self.tiles), heads)](
            queries, self.kv.data, self.kv.scales, self.blocks, self.tiles, out,
            layer * layout.planes * layout.block_tokens,
            dim**-0.5 * math.log2(math.e), NO_WINDOW if window is None else window, self.blocks.shape[1],
            HEADS=heads, GROUP=heads // layout.kv_heads, DIM=dim, DIM_PAD=padded(dim),
            BLOCK_TOKENS=layout.block_tokens, BLOCK_ROWS=self.kv.block_rows, CELL=self.kv.cell,
            E4M3=layout.dtype == "fp8", QUERIES=rows, KEYS=keys, DOT=TRITON_DTYPES[self.products], num_warps=warps,
            maxnreg=FLOAT32_REGISTERS if self.products == torch.float32 else None,
        )  # fmt: skip
        return out.flatten(1)


@dataclass(frozen=True, slots=True)
class TritonBackend:
    """Implements `AttentionBackend` with Triton kernels: one for chunks, others for decoding requests."""

    kernel: TritonKernel

    def plan(self, rows: Sequence[Row], kv: PagedKV) -> TritonPlan:
        if kv.layout.planes == 1:  # latents: each token of a small chunk is read like a decoding request
            rows = [token for row in rows for token in _single_tokens(row, kv.layout.block_tokens)]
        decodes, chunks = [row for row in rows if row.count == 1], [row for row in rows if row.count > 1]
        device = kv.data.device
        return TritonPlan(
            decodes=self.kernel.plan(decode_tables(decodes, device), kv) if decodes else None,
            tokens=torch.tensor([row.first for row in decodes], dtype=torch.int64, device=device),
            chunks=self._chunks(chunks, kv) if chunks else None,
        )

    def _chunks(self, rows: Sequence[Row], kv: PagedKV) -> TritonChunkPlan:
        size, _, _ = chunk_tile_of(padded(kv.layout.head_dim), self.kernel.products, kv.layout.dtype)
        device = kv.data.device
        numbers = torch.tensor(tiles_of(rows, size), dtype=torch.int32, device=device)
        return TritonChunkPlan(numbers, padded_blocks(rows, device), kv, self.kernel.products)


class Tile(NamedTuple):
    """Successive tokens of a chunk."""

    first: int
    """Row of the step."""
    start: int
    """Position in the request."""
    count: int
    request: int
    """Row of the block tables."""

    @property
    def end(self) -> int:
        return self.start + self.count


def tiles_of(chunks: Sequence[Row], size: int, first_table: int = 0) -> list[Tile]:
    """Divide chunks into tiles of `size` tokens. first_table: row of the first chunk in the block tables."""
    return [
        Tile(row.first + offset, row.start + offset, min(size, row.count - offset), first_table + index)
        for index, row in enumerate(chunks)
        for offset in range(0, row.count, size)
    ]


def _single_tokens(row: Row, block_tokens: int) -> list[Row]:
    """Split a row into rows of one token."""
    positions = range(row.start, row.total)
    return [
        Row(row.first + index, 1, position, row.blocks[: position // block_tokens + 1])
        for index, position in enumerate(positions)
    ]


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Implements `AttentionPlan` for a step of `TritonBackend`."""

    decodes: AttentionPlan | None
    tokens: Tensor  # [decodes] rows of the step
    chunks: TritonChunkPlan | None

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        if self.chunks is None and self.decodes is not None:
            return self.decodes.run(layer, queries, window)
        assert self.chunks is not None, "a step has a chunk or a decoding request"
        out = self.chunks.run(layer, queries, window)
        if self.decodes is not None:
            out[self.tokens] = self.decodes.run(layer, queries[self.tokens], window)
        return out


def tile_of(head_rows: int, dim: int, products: torch.dtype, stored: KVDtype) -> tuple[int, int]:
    """Return (keys per pass of the inner loop, warps per program) that spill no register.

    Products in float32 use no matrix instructions, so each thread holds whole rows of its operands. Codes of fp8 pass
    through registers before they become operands.
    """
    if products == torch.float32:
        return (16, 16) if dim > 256 else (16, 8)
    return 32, 8 if head_rows * dim >= 16 * (256 if stored == "fp8" else 512) else 4


def chunk_tile_of(dim: int, products: torch.dtype, stored: KVDtype) -> tuple[int, int, int]:
    """Return (queries of a tile, keys per pass of the inner loop, warps per program) that spill no register."""
    if products == torch.float32:
        return 16, 16, 16 if dim > 128 else 8
    if stored == "fp8":
        return (64, 16, 8) if dim > 128 else (64, 32, 8 if dim > 64 else 4)
    return (64, 32, 8) if dim > 128 else (64, 64, 4)


def registers_of(products: torch.dtype, warps: int, stored: KVDtype, *, is_large: bool) -> int | None:
    """Return the most registers of a thread in decode attention, given as `maxnreg`. None: the assembler chooses.

    The assembler spills registers if one more program then fits on a multiprocessor. is_large: shared memory, or the
    number of programs, admits only one or two anyway. Products in float32 of fp8 codes load operands early into all
    registers that they may have, and spill at `FLOAT32_REGISTERS`.
    """
    if products != torch.float32:
        return 255 if is_large else None
    if stored != "fp8":
        return FLOAT32_REGISTERS
    return 255 if warps <= 8 else None


def padded(size: int) -> int:
    """Return the size rounded up to one that a matrix instruction takes: a power of two, at least 16."""
    return max(DOT_MIN, triton.next_power_of_2(size))


OUTPUTS, INPUTS = 32, 128
"""Rows and numbers per row of a matrix that one program reads at a time."""


class TritonRowProduct:
    """Implements `RowProduct` with a Triton kernel."""

    def __call__(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        rows, experts = rows.contiguous(), experts.contiguous()
        _, outputs, inputs = weights.shape
        out = rows.new_empty((len(experts), outputs))
        expert_rows_kernel[(len(experts), -(-outputs // OUTPUTS))](
            rows, weights, experts, out, inputs, outputs, len(experts) // len(rows), OUTPUTS=OUTPUTS, INPUTS=INPUTS
        )
        return out
