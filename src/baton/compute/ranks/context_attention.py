"""Attention over KV whose tokens several ranks share: each reads its part, and the partial results are merged.

The ranks of a group hold the same KV head, and each has some query heads of it. They gather the queries of the group,
attend to the tokens they hold, and send each rank the results of its heads with their log-sum-exp.
Source: FlashAttention's merge of partial softmax (arXiv 2205.14135, section 3.1), and Helix (arXiv 2507.07120).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.compute.torch.kernels.attention_backend import AttentionBackend, AttentionPlan
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.kernels.torch_sdpa import LENGTH_RATIO_MIN, SCRATCH_BYTES, TILE_QUERIES
from baton.compute.torch.layers.collectives import Collectives

SCORES_BYTES = 256 << 20
"""The maximum size of the scores that are computed together without a fused kernel."""


@dataclass(frozen=True, slots=True)
class ContextBackend:
    """Implements `AttentionBackend` for a rank that holds some tokens of one KV head."""

    collectives: Collectives
    whole: AttentionBackend
    """Computes attention to KV of which this rank has all tokens, such as an expanded latent."""

    def plan(self, rows: Sequence[Row], kv: PagedKV) -> AttentionPlan:
        return ContextPlan(rows, kv, self.collectives) if kv.part.is_shared else self.whole.plan(rows, kv)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries that are computed together: a token each of several requests, or some tokens of one request."""

    tokens: Tensor  # [requests, queries] rows of the step
    mask: Tensor | None  # [requests, 1, queries, keys], 0 or -inf. None: every query sees all keys
    unseen: Tensor | None
    """Which queries see no key of this rank [requests, queries]; the mask shows them the first. None: none."""
    keys: int
    """The keys of the longest request here. 0: its queries see none."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The tiles of requests whose KV is gathered at once."""

    planes: Tensor  # [planes, requests, blocks]
    stale: Tensor | None
    """Indices of gathered slots that hold no KV of their request, which may contain NaN. None: there are none."""
    tiles: list[_Tile]


@dataclass(frozen=True, slots=True)
class _Span:
    """The keys of this rank that a request's queries see, counted from the first block that is read."""

    row: Row
    blocks: Tensor  # [blocks] ids, from the first one with a visible token
    begins: Tensor  # [count] the first key that each query sees
    ends: Tensor  # [count] the end of its keys


class ContextPlan:
    """Implements `AttentionPlan` with batches for each kind of layer (full attention, or a window)."""

    def __init__(self, rows: Sequence[Row], kv: PagedKV, collectives: Collectives) -> None:
        self._rows = sorted(rows, key=lambda row: (row.count > 1, -row.total))
        self._kv = kv
        self._collectives = collectives
        self._kinds: dict[int | None, list[_Batch]] = {}
        self._scratch = torch.empty(0, dtype=kv.data.dtype, device=kv.data.device)

    def run(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        """Return the attention of this rank's query heads, as `AttentionPlan.run`. All ranks of the group call it."""
        if window not in self._kinds:
            self._kinds[window] = self._plan_kind(window, queries.dtype)
        gathered = self._collectives.gather_context(queries)  # [ranks, tokens, heads, head_dim]
        shared = gathered.transpose(0, 1).flatten(1, 2)  # [tokens, ranks * heads, head_dim]
        values, sums = torch.zeros_like(shared), shared.new_full(shared.shape[:2], float("-inf"), dtype=torch.float32)
        for batch in self._kinds[window]:
            self._run(batch, layer, shared, values, sums)
        # The sums travel as numbers of the values' type, so that one message has both.
        packed = torch.cat((values, sums[..., None].view(values.dtype)), -1)
        parts = packed.unflatten(1, (len(gathered), -1)).transpose(0, 1)  # [ranks, tokens, heads, head_dim + 1 or 2]
        return merged(self._collectives.exchange_context(parts), queries.shape[-1]).flatten(1)

    # ---- once per step and kind of layer -------------------------------------------------------------------------

    def _plan_kind(self, window: int | None, dtype: torch.dtype) -> list[_Batch]:
        batches = [self._batch(spans, dtype) for spans in self._groups(window)]
        layout, largest = self._kv.layout, max(batch.planes.numel() for batch in batches)
        needed = largest * layout.block_tokens * layout.kv_heads * self._kv.cell
        if needed > self._scratch.numel():
            self._scratch = self._scratch.new_empty(needed)
        return batches

    def _groups(self, window: int | None) -> Iterator[list[_Span]]:
        """Yield requests whose KV is gathered at once: a chunk, or decodes of similar length that fit into scratch."""
        layer_block_bytes = self._kv.layout.block_bytes // self._kv.layout.layers
        group: list[_Span] = []
        for span in (self._span(row, window) for row in self._rows):
            if group:
                longest = len(group[0].blocks)
                fits = (len(group) + 1) * longest * layer_block_bytes <= SCRATCH_BYTES
                if span.row.count == 1 and fits and len(span.blocks) >= LENGTH_RATIO_MIN * longest:
                    group.append(span)
                    continue
                yield group
            group = [span]
        yield group

    def _span(self, row: Row, window: int | None) -> _Span:
        part, positions = self._kv.part, torch.arange(row.start, row.total)
        begins = torch.zeros_like(positions) if window is None else (positions + 1 - window).clamp(0)
        first_block = int(begins[0]) // part.block_tokens
        before = first_block * len(part.tokens)
        ends = part.held_before(positions + 1) - before
        return _Span(row, row.blocks[first_block:], part.held_before(begins) - before, ends)

    def _batch(self, spans: Sequence[_Span], dtype: torch.dtype) -> _Batch:
        block_tokens, device = self._kv.layout.block_tokens, self._kv.data.device
        blocks = max(len(span.blocks) for span in spans)
        padded = torch.stack(
            [torch.cat((span.blocks, span.blocks[:1].expand(blocks - len(span.blocks)))) for span in spans]
        )
        written = torch.stack([span.ends[-1] for span in spans])  # [requests]
        is_stale = torch.arange(blocks * block_tokens) >= written[:, None]  # [requests, slots]
        stale = is_stale.expand(self._kv.layout.planes, -1, -1).flatten().nonzero().flatten()
        tiles: list[_Tile] = []
        for first in range(0, spans[0].row.count, TILE_QUERIES):
            end = min(first + TILE_QUERIES, spans[0].row.count)
            tiles.append(_tile(spans, range(first, end), dtype, device))
        return _Batch(self._kv.planes(padded), stale.to(device) if len(stale) else None, tiles)

    # ---- once per layer ------------------------------------------------------------------------------------------

    def _run(self, batch: _Batch, layer: int, queries: Tensor, values: Tensor, sums: Tensor) -> None:
        """Write a batch's partial results into `values` [tokens, heads, head_dim] and `sums` [tokens, heads]."""
        gathered = self._kv.gather(batch.planes + self._kv.layout.planes * layer, self._scratch)
        if batch.stale is not None:
            gathered.view(-1, self._kv.cell).index_fill_(0, batch.stale, 0)
        kv = self._kv.numbers(gathered, queries.dtype).flatten(2, 3).transpose(2, 3)
        for tile in batch.tiles:  # kv: [planes, requests, 1, slots, head_dim]
            if not tile.keys:
                continue
            picked = queries[tile.tokens].transpose(1, 2)  # [requests, heads, queries, head_dim]
            keys, held = (kv[plane][:, :, : tile.keys].expand(-1, picked.shape[1], -1, -1) for plane in (0, -1))
            found, total = partial_attention(picked, keys, held, tile.mask)
            if tile.unseen is not None:
                total = total.masked_fill(tile.unseen[:, None], float("-inf"))
            values[tile.tokens], sums[tile.tokens] = found.transpose(1, 2), total.transpose(1, 2)


def _tile(spans: Sequence[_Span], part: range, dtype: torch.dtype, device: torch.device) -> _Tile:
    """Return the tile of some queries of each request."""
    own = slice(part.start, part.stop)
    begins = torch.stack([span.begins[own] for span in spans])[..., None]  # [requests, queries, 1]
    ends = torch.stack([span.ends[own] for span in spans])[..., None]
    tokens = torch.stack([torch.arange(span.row.first + part.start, span.row.first + part.stop) for span in spans])
    keys = int(ends.max())
    place = torch.arange(keys)
    seen = (place >= begins) & (place < ends)  # [requests, queries, keys]
    unseen = ~seen.any(-1)
    if keys and bool(unseen.any()):
        seen[..., 0] |= unseen
    mask = None
    if not bool(seen.all()):
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None].to(device)
    return _Tile(tokens.to(device), mask, unseen.to(device) if bool(unseen.any()) else None, keys)


def partial_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return softmax(queries keys^T / sqrt(head_dim) + mask) values, and the log of the softmax's sum in float32.

    queries: [requests, heads, queries, head_dim]. keys, values: [requests, heads, keys, head_dim]. The results have the
    shape of queries, and that without head_dim.
    """
    if queries.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, attn_mask=mask)
    return plain_partial_attention(queries, keys, values, mask)


def plain_partial_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the results of `partial_attention` by matrix products, on any device."""
    requests, heads, count, head_dim = queries.shape
    size = max(1, SCORES_BYTES // (4 * requests * heads * keys.shape[2]))
    found: list[Tensor] = []
    sums: list[Tensor] = []
    for first in range(0, count, size):
        part = slice(first, first + size)
        scores = torch.matmul(queries[:, :, part], keys.transpose(2, 3)).float() * head_dim**-0.5
        if mask is not None:
            scores += mask[:, :, part]
        sums.append(scores.logsumexp(-1))
        found.append(torch.matmul((scores - sums[-1][..., None]).exp().to(values.dtype), values))
    return torch.cat(found, 2), torch.cat(sums, 2)


def merged(parts: Tensor, head_dim: int) -> Tensor:
    """Return the attention to the tokens of all ranks: [tokens, heads, head_dim], in the type of `parts`.

    parts: [ranks, tokens, heads, ...]: values [head_dim], then their log-sum-exp, in the bytes of a float32.
    """
    values, sums = parts[..., :head_dim], parts[..., head_dim:].contiguous().view(torch.float32)
    return (values * sums.softmax(0)).sum(0).to(parts.dtype)
