"""Attention with nested tensors (jagged layout) as the container of the ragged batch: no padding, and no masks.

Decoding requests are one nested tensor with one call. The query heads of a KV head become its queries, so every query
sees all of its keys. Chunks are computed one request after the other from views of the same container.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from baton.compute.torch.kernels.attention_backend import visible
from baton.compute.torch.kernels.paged_kv import PagedKV, Row


class JaggedBackend:
    """Implements `AttentionBackend` with nested tensors."""

    def plan(self, rows: Sequence[Row], kv: PagedKV) -> JaggedPlan:
        return JaggedPlan(rows, kv)


class JaggedPlan:
    """Implements `AttentionPlan` for a step of `JaggedBackend`."""

    def __init__(self, rows: Sequence[Row], kv: PagedKV) -> None:
        device = kv.data.device
        self._kv, self._rows = kv, rows
        self._chunks = [row for row in rows if row.count > 1]
        self._decodes = [row for row in rows if row.count == 1]
        self._tokens = torch.tensor([row.first for row in self._decodes], dtype=torch.int64, device=device)
        self._keys: dict[int | None, _Keys] = {}

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        if window not in self._keys:
            self._keys[window] = _Keys(self._decodes, self._chunks, self._kv, window)
        gathered = self._keys[window]
        keys, values = gathered.read(layer, 0, queries.dtype), gathered.read(layer, -1, queries.dtype)
        out = torch.empty_like(queries)
        if self._decodes:
            picked = queries[self._tokens]  # [batch, heads, head_dim]
            out[self._tokens] = self._decode(picked, gathered.nested(keys), gathered.nested(values))
        firsts = gathered.chunk_bounds
        for index, row in enumerate(self._chunks):
            part = slice(firsts[index], firsts[index + 1])
            tokens = slice(row.first, row.first + row.count)
            out[tokens] = _chunk(queries[tokens], keys[part], values[part], row, window)
        return out.flatten(1)

    def _decode(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """queries: [batch, heads, head_dim]. keys, values: nested [batch, kv_heads, (keys), head_dim]."""
        batch, heads, dim = queries.shape
        group = heads // self._kv.layout.kv_heads
        folded = queries.view(batch, -1, group, dim).transpose(1, 2).contiguous().view(batch * group, -1, dim)
        offsets = torch.arange(0, batch * group + 1, group, device=queries.device)
        nested = torch.nested.nested_tensor_from_jagged(folded, offsets, min_seqlen=group, max_seqlen=group)
        result = functional.scaled_dot_product_attention(nested.transpose(1, 2), keys, values)
        flat = result.transpose(1, 2).contiguous().values()  # [batch * group, kv_heads, head_dim]
        return flat.view(batch, group, -1, dim).transpose(1, 2).reshape(batch, heads, dim)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Ends of the runs of keys of several requests in one tensor."""

    offsets: Tensor  # [requests + 1]
    shortest: int
    longest: int


class _Keys:
    """The places of the keys that a step reads in layers of one window: decoding requests first, then chunks."""

    def __init__(self, decodes: Sequence[Row], chunks: Sequence[Row], kv: PagedKV, window: int | None) -> None:
        block_tokens, device = kv.layout.block_tokens, kv.data.device
        self._kv = kv
        blocks: list[Tensor] = []
        slots: list[Tensor] = []
        counts: list[int] = []
        for row in (*decodes, *chunks):
            first = 0 if window is None else max(0, row.start + 1 - window)
            positions = torch.arange(first, row.total)
            blocks.append(row.blocks[positions // block_tokens])
            slots.append(positions % block_tokens)
            counts.append(len(positions))
        self._blocks, self._slots = torch.cat(blocks).to(device), torch.cat(slots).to(device)
        ends = list(accumulate(counts, initial=0))
        self.chunk_bounds = ends[len(decodes) :]
        of_decodes = counts[: len(decodes)] or [0]
        self._bounds = _Bounds(torch.tensor(ends[: len(decodes) + 1]).to(device), min(of_decodes), max(of_decodes))

    def read(self, layer: int, plane: int, dtype: torch.dtype) -> Tensor:
        """Return the keys or values of all requests, one after the other: [keys, kv_heads, head_dim]."""
        return self._kv.numbers(self._kv.data[:, layer, plane][self._blocks, self._slots], dtype)

    def nested(self, keys: Tensor) -> Tensor:
        """Return the keys of the decoding requests as a nested tensor [batch, kv_heads, (keys), head_dim]."""
        bounds = self._bounds
        values = keys[: self.chunk_bounds[0]]
        nested = torch.nested.nested_tensor_from_jagged(
            values, bounds.offsets, min_seqlen=bounds.shortest, max_seqlen=bounds.longest
        )
        return nested.transpose(1, 2)


def _chunk(queries: Tensor, keys: Tensor, values: Tensor, row: Row, window: int | None) -> Tensor:
    """Return the attention of one chunk [count, heads, head_dim]. keys: the last ones [keys, kv_heads, head_dim]."""
    first = row.total - len(keys)
    is_causal = row.start == 0 and window is None
    queried, known = range(row.start, row.total), range(first, row.total)
    result = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=None if is_causal else visible(queried, known, window, queries.device),
        is_causal=is_causal,
        enable_gqa=True,
    )
    return result[0].transpose(0, 1)
